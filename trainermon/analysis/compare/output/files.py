"""Writes comparisons as files: csv, JSON, Markdown, HTML and xlsx, one per dump."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainermon.analysis.compare.answer.summary import RESULTS, causes_of, headline
from trainermon.analysis.compare.comparison import Comparison, collector_off
from trainermon.analysis.compare.output.advisor import advisor_text
from trainermon.analysis.compare.output.lines import CellSyntax, lines
from trainermon.analysis.compare.output.tables import header
from trainermon.analysis.compare.verdicts import PASS, CallResult, ResultRow
from trainermon.core.errors import DumpError
from trainermon.core.terminal.progress import stage
from trainermon.core.terminal.results import write_text, writing_text
from trainermon.core.values import as_plain

FORMATS = ("csv", "xlsx", "json", "md", "html")
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDestination:
    """Where and how the files of comparisons are written.

    Attributes:
        folder: The folder.
        formats: `csv`, `json`, `md`, `html`, `xlsx`.
        stamp: Time stamp in the files' names, `YYYYmmddHHMMSS`.
        advisor: Whether advisor_*.txt is written too.
    """

    folder: Path
    formats: tuple[str, ...] = ("csv", "json")
    stamp: str = field(default_factory=lambda: time.strftime("%Y%m%d%H%M%S"))
    advisor: bool = True


def write_files(comparison: Comparison, destination: OutputDestination) -> tuple[Path, ...]:
    """Write a comparison in every format of `destination`, and return the paths of the files.

    They are named as msprobe names them: `compare_result[_step…][_rank…]_YYYYmmddHHMMSS.csv`, `advisor_….txt`.

    Raises:
        DumpError: The folder cannot be written.
    """
    try:
        return tuple(_write_files(comparison, destination))
    except OSError as error:
        raise DumpError(f"cannot write into {destination.folder}: {error}") from error


def _write_files(comparison: Comparison, destination: OutputDestination) -> Iterator[Path]:
    stage("writing files")
    destination.folder.mkdir(parents=True, exist_ok=True)
    label = f"_{comparison.label.replace(' ', '_')}" if comparison.label else ""
    for name in destination.formats:
        path = destination.folder / f"compare_result{label}_{destination.stamp}.{name}"
        with collector_off():
            _writer(name)(comparison, path)
        yield path
    if destination.advisor:
        path = destination.folder / f"advisor{label}_{destination.stamp}.txt"
        write_text(path, advisor_text(comparison))
        yield path


def write_csv(comparison: Comparison, path: Path) -> None:
    """Write the result table, one line per compared tensor or argument, to the csv file `path`."""
    with writing_text(path, encoding="utf-8", newline="") as file:
        file.write(",".join(header(comparison.mode)) + "\n")
        file.writelines(f"{line}\n" for _, line in lines(comparison, _CSV))


def _quoted(text: str) -> str:
    if text.startswith(_FORMULA) and not _is_number(text.removesuffix("%")):
        text = f"'{text}"  # a spreadsheet would run it, and names in a dump come from anywhere
    return f'"{text.replace(chr(34), chr(34) * 2)}"' if _SPECIAL.search(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_SPECIAL = re.compile('[,"\r\n]')
_CSV = CellSyntax(text=("", ""), number=("", ""), between=",", escape=_quoted)


def write_json(comparison: Comparison, path: Path) -> None:
    """Write every call, and the rows of those that do not pass, as JSON; README.md describes the fields."""
    write_text(path, json.dumps(as_document(comparison), indent=1) + "\n")


def as_document(comparison: Comparison) -> dict[str, Any]:
    """Return the content of a comparison's JSON file as dicts and lists; numbers that are not finite are texts."""
    counts, calls = comparison.row_counts(), comparison.call_counts()
    causes = causes_of(comparison)
    document: dict[str, Any] = as_plain(
        {
            "version": SCHEMA_VERSION,
            "target": str(comparison.target),
            "golden": str(comparison.golden),
            "label": comparison.label,
            "mode": comparison.mode.value,
            "headline": headline(comparison),
            "notes": list(comparison.notes),
            "whole": comparison.is_whole,
            "rows": {result: counts[result] for result in RESULTS},
            "calls": {result: calls[result] for result in RESULTS},
            "blamed": [one.call.key for one in causes],
            "origins": [one.place for one in causes],
            "results": [_call(call) for call in comparison.calls],
        }
    )
    return document


def _call(call: CallResult) -> dict[str, Any]:
    record: dict[str, Any] = {
        "target": call.target.key if call.target else None,
        "golden": call.golden.key if call.golden else None,
        "result": call.result,
    }
    if call.result != PASS:
        record |= {
            "blamed": call.blamed,
            "input_error": call.input_error,
            "output_error": call.output_error,
            "expected": call.expected,
            "rows": [_row(row) for row in call.rows],
        }
    return record


def _row(row: ResultRow) -> dict[str, Any]:
    item = row.target or row.golden
    return {
        "place": item.place if item else None,
        "result": row.result,
        "relative": row.difference.relative,
        "messages": list(row.messages),
    }


def _writer(name: str) -> Callable[[Comparison, Path], None]:
    from trainermon.analysis.compare.output import pages, workbook

    writers = {
        "csv": write_csv,
        "json": write_json,
        "md": pages.write_markdown,
        "html": pages.write_html,
        "xlsx": workbook.write_xlsx,
    }
    return writers[name]
