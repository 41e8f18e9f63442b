"""The verdicts on a dump as files: csv under msprobe's names, and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainermon.accuracy.judge import Judgement
from trainermon.analysis.check.checking import CallsCheck, CheckedCall
from trainermon.analysis.check.details import DECIMALS, safe_cell, write_details
from trainermon.analysis.check.page.page import write_html, write_markdown
from trainermon.core.errors import DumpError
from trainermon.core.terminal.results import write_text, writing_text
from trainermon.core.values import as_plain

SCHEMA_VERSION = 1
# The first four are msprobe's.
RESULT_COLUMNS = ("API name", "Forward Test Success", "Backward Test Success", "Message", "Origin")


def document(check: CallsCheck) -> dict[str, Any]:
    """Return the verdicts as JSON values; numbers that are not finite are texts: `NaN`, `Infinity`, `-Infinity`.

    Complex ones are lists of two.
    """
    calls = [
        {
            "key": call.key,
            "status": call.status.value,
            "reason": call.reason,
            "line": call.line,
            "outputs": [_plain(judgement) for judgement in call.judgements],
            **({"slots": list(call.slots)} if call.slots else {}),
            **({"rerun": [_plain(judgement) for judgement in call.rerun]} if call.rerun else {}),
            **({"cause": call.cause} if call.cause else {}),
        }
        for call in check.calls
    ]
    return {"schema": SCHEMA_VERSION, "source": check.source, "reference": check.reference, "calls": calls}


def failure(directory: Path, why: str) -> dict[str, Any]:
    """Return, as `document` does, what there is of a dump that could not be read."""
    return {"schema": SCHEMA_VERSION, "source": str(directory), "failure": why, "calls": []}


def write_files(
    check: CallsCheck, folder: Path, formats: Sequence[str], stamp: str, decimals: int = DECIMALS
) -> list[Path]:
    """Write the verdicts into `folder` as `csv`, `json`, `html` and `md`, and return the paths.

    `accuracy_checking_result_<stamp>.csv` has a row for each call, as msprobe's has, and `accuracy_checking_details_…`
    a row for each of its results, with measures of so many `decimals`.

    Raises:
        DumpError: The folder cannot be written.
    """
    writers = {"csv": _write_csv, "json": _write_json, "html": write_html, "md": write_markdown}
    details = folder / f"accuracy_checking_details_{stamp}.csv"
    paths = [folder / f"accuracy_checking_result_{stamp}.{name}" for name in formats]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in zip(formats, paths, strict=True):
            writers[name](check, path)
        if "csv" in formats:
            write_details(check, details, decimals)
            paths.insert(1 + formats.index("csv"), details)
    except OSError as error:
        raise DumpError(f"cannot write into {folder}: {error}") from error
    return paths


def _write_csv(check: CallsCheck, path: Path) -> None:
    with writing_text(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(RESULT_COLUMNS)
        rows.writerows([safe_cell(cell) for cell in row] for row in _rows(check))


def _rows(check: CallsCheck) -> Iterator[tuple[str, ...]]:
    """Yield a row for each call, with both directions in it; the backward's reason stands behind the forward's."""
    sides: dict[str, list[CheckedCall | None]] = {}
    for call in check.calls:
        sides.setdefault(call.stem, [None, None])[call.is_backward] = call
    for stem, (forward, backward) in sides.items():
        found = [call for call in (forward, backward) if call is not None]
        reasons = [f"backward: {call.reason}" if call is backward else call.reason for call in found if call.reason]
        verdicts = [call.status.value if call is not None else "" for call in (forward, backward)]
        yield stem, *verdicts, "; ".join(reasons), next((call.line for call in found if call.line), "")


def _write_json(check: CallsCheck, path: Path) -> None:
    """Write a line for each call: that is compact, and an encoder written in C does it."""
    head = document(check)
    calls = ",\n".join(map(json.dumps, head.pop("calls")))
    write_text(path, f'{json.dumps(head)[:-1]}, "calls": [\n{calls}\n]}}\n')


def _plain(judgement: Judgement) -> dict[str, Any]:
    values: dict[str, Any] = as_plain(judgement)
    return {name: as_plain([one.real, one.imag]) if isinstance(one, complex) else one for name, one in values.items()}
