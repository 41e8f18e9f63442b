"""A comparison as files: JSON, csv, Markdown, and what msprobe writes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainermon.analysis.checkpoint.page import write_html
from trainermon.analysis.checkpoint.screen import describe_side, said_of
from trainermon.analysis.checkpoint.verdicts import WEIGHTS, CheckpointComparison, WeightComparison, WeightVerdict
from trainermon.core.errors import CheckpointError
from trainermon.core.terminal.results import write_text, writing_text
from trainermon.core.values import as_plain

SCHEMA = 1
"""Version of `checkpoint_compare.json`."""
_STEM = "checkpoint_compare"
_MSPROBE = "ckpt_similarity.json"
_MAX_ROWS = 200
_COLUMNS = (
    *("kind", "name", "other_name", "verdict", "rounded_to", "relative", "cosine", "distance", "largest"),
    *("largest_at", "unequal", "count", "first_at", "ulps", "nonfinite", "shapes", "dtypes", "hints", "notes"),
)


def write_files(found: CheckpointComparison, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write a comparison into a folder, which is made if need be, in each of `formats`; return the files.

    Raises:
        CheckpointError: the folder cannot be written to.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in dict.fromkeys(formats):
            path = folder / (_MSPROBE if name == "msprobe" else f"{_STEM}.{name}")
            _WRITERS[name](found, path)
            written.append(path)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written to ({error.strerror}): choose another with -o") from error
    return written


def as_document(found: CheckpointComparison) -> dict[str, Any]:
    """Return a comparison as plain values, see docs/checkpoints.md."""
    counts = found.counts()
    return {
        "schema": SCHEMA,
        "headline": found.headline,
        "counts": {verdict.value: counts[verdict] for verdict in WeightVerdict if counts[verdict]},
        **as_plain(found),
    }


def _write_json(found: CheckpointComparison, path: Path) -> None:
    write_text(path, json.dumps(as_document(found), indent=1, default=str) + "\n")


def _write_csv(found: CheckpointComparison, path: Path) -> None:
    with writing_text(path, encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for tensor in found.tensors:
            plain = as_plain(tensor)
            writer.writerow([_cell(plain[column]) for column in _COLUMNS])


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return "; ".join(map(str, value)) if isinstance(value, list | tuple) else value


def _write_markdown(found: CheckpointComparison, path: Path) -> None:
    write_text(path, "\n".join(_markdown(found)) + "\n")


def _markdown(found: CheckpointComparison) -> Iterator[str]:
    yield f"# {_plain(found.headline)}\n"
    yield f"First: {_plain(describe_side(found.ours))}  "
    yield f"Second: {_plain(describe_side(found.theirs))}\n"
    verdicts = [verdict for verdict in WeightVerdict if found.counts()[verdict]]
    yield f"| tensors | {' | '.join(verdict.value for verdict in verdicts)} |"
    yield "|---|" + "---:|" * len(verdicts)
    for group, counts in found.counts_by_group().items():
        yield f"| {group} | {' | '.join(f'{counts[verdict]:,}' for verdict in verdicts)} |"
    odd = found.ranked()
    if odd:
        yield "\n| tensor | verdict | ΔW/W | cosine | what may be the matter |\n|---|---|---:|---:|---|"
    for tensor in odd[:_MAX_ROWS]:
        cells = (_label(tensor), said_of(tensor), _short(tensor.relative), _short(tensor.cosine))
        yield f"| {' | '.join(map(_plain, cells))} | {_plain('; '.join((*tensor.hints, *tensor.notes)))} |"
    if len(odd) > _MAX_ROWS:
        yield f"\nand {len(odd) - _MAX_ROWS:,} more"
    if found.values:
        yield "\n| value | first | second |\n|---|---|---|"
        for value in found.values[:_MAX_ROWS]:
            yield f"| {_plain(value.label)} | {_plain(value.ours or '–')} | {_plain(value.theirs or '–')} |"


def _label(tensor: WeightComparison) -> str:
    return tensor.name if tensor.kind == WEIGHTS else f"{tensor.kind}: {tensor.name}"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _plain(text: str) -> str:
    """Return text that neither ends a cell of a table nor is markup."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _write_msprobe(found: CheckpointComparison, path: Path) -> None:
    rows = {
        tensor.name: {
            "l2": tensor.distance,
            "cos": tensor.cosine,
            "numel": tensor.count,
            "shape": list(tensor.shapes[0] or ()),
        }
        for tensor in found.tensors
        if tensor.kind == WEIGHTS and tensor.unequal is not None
    }
    write_text(path, json.dumps(rows, indent=4) + "\n")


_WRITERS: dict[str, Callable[[CheckpointComparison, Path], None]] = {
    "json": _write_json,
    "csv": _write_csv,
    "md": _write_markdown,
    "html": write_html,
    "msprobe": _write_msprobe,
}
FORMATS = tuple(_WRITERS)
