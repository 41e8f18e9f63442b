"""Writes a comparison: JSON, Markdown, csv, a page and msprobe's workbook."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainermon.analysis.diagnosis.page.markup import text
from trainermon.analysis.environment.differences import DifferenceLevel, EnvironmentComparison
from trainermon.analysis.environment.output.page import render_page
from trainermon.analysis.environment.output.sheets import cell_of, result_sheets
from trainermon.analysis.environment.output.workbook import workbook_of
from trainermon.analysis.environment.screen import shown_value
from trainermon.core.errors import PackError
from trainermon.core.private_files import replace_file
from trainermon.core.values import as_plain

FORMATS = ("json", "md", "html", "xlsx", "csv")
SCHEMA_VERSION = 1
_STEM, _WORKBOOK = "environment", "result.xlsx"  # the workbook is called as msprobe calls it
_MAX_MARKDOWN = 200
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_COLUMNS = ("section", "bench_name", "cmp_name", "bench_value", "cmp_value", "level", "reason")


def write_files(
    comparison: EnvironmentComparison, folder: Path, formats: Sequence[str], *, everything: bool = False
) -> tuple[Path, ...]:
    """Write a comparison into `folder` (files 0600), and return the paths; equal settings only with `everything`.

    The page has them in any case, out of sight.

    Raises:
        PackError: The folder cannot be written.
    """
    makers = {
        "json": lambda: (json.dumps(as_document(comparison, everything=everything), indent=1) + "\n").encode(),
        "md": lambda: "\n".join(_markdown(comparison)).encode() + b"\n",
        "html": lambda: render_page(comparison).encode("utf-8", "replace"),
        "xlsx": lambda: workbook_of(result_sheets(comparison, everything=everything)),
        "csv": lambda: _csv(comparison, everything=everything).encode("utf-8", "replace"),
    }
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in dict.fromkeys(formats):
            path = folder / (_WORKBOOK if name == "xlsx" else f"{_STEM}.{name}")
            replace_file(path, makers[name]())
            paths.append(path)
    except OSError as error:
        raise PackError(f"cannot write into {folder}: {error}") from error
    return tuple(paths)


def as_document(comparison: EnvironmentComparison, *, everything: bool = False) -> dict[str, Any]:
    """Return a comparison as dicts and lists; README.md describes the fields."""
    rows = comparison.rows if everything else _differences(comparison)
    document: dict[str, Any] = as_plain(
        {
            "version": SCHEMA_VERSION,
            "first": comparison.sources[0],
            "second": comparison.sources[1],
            "headline": comparison.headline,
            "counts": {level.value: len(comparison.of(level)) for level in DifferenceLevel},
            "sections": comparison.sections,
            "notes": comparison.notes,
            "settings": [
                {
                    "section": row.section,
                    "names": row.names,
                    "values": row.values,
                    "level": row.level,
                    "reason": row.reason,
                    "matched_with": row.matched_with,
                    "details": row.details,
                }
                for row in rows
            ],
        }
    )
    return document


def _differences(comparison: EnvironmentComparison) -> tuple[Any, ...]:
    return comparison.of(DifferenceLevel.ERROR, DifferenceLevel.WARNING, DifferenceLevel.INFO)


def _markdown(comparison: EnvironmentComparison) -> Iterator[str]:
    yield f"# {_plain(comparison.headline)}"
    yield f"\nFirst `{_plain(comparison.sources[0])}`, second `{_plain(comparison.sources[1])}`.\n"
    rows = _differences(comparison)
    if rows:
        yield "| level | section | setting | first | second | why |"
        yield "|---|---|---|---|---|---|"
    for row in sorted(rows[:_MAX_MARKDOWN], key=lambda row: list(DifferenceLevel).index(row.level)):
        first, second = (_plain(shown_value(value)) for value in row.values)
        cells = (row.level.value, row.section, f"`{_plain(row.name)}`", first, second, _plain(row.reason))
        yield f"| {' | '.join(cells)} |"
    if len(rows) > _MAX_MARKDOWN:
        yield f"| | | and {len(rows) - _MAX_MARKDOWN:,} more | | | |"
    for note in comparison.notes:
        yield f"\n* {_plain(note)}"


def _plain(value: str) -> str:
    """Return text that neither ends a cell of a table nor is markup."""
    return text(value).replace("|", "\\|").replace("`", "'")


def _csv(comparison: EnvironmentComparison, *, everything: bool) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in comparison.rows if everything else _differences(comparison):
        cells = (row.section, *row.names, *map(cell_of, row.values), row.level.value, row.reason)
        writer.writerow(["" if cell is None else _harmless(cell) for cell in cells])
    return buffer.getvalue()


def _harmless(cell: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell
