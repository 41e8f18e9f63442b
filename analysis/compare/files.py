"""Writes comparisons as files: csv, JSON, Markdown, HTML and xlsx, one per dump."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.summary import RESULTS, headline
from trainermon.analysis.compare.tables import header, table
from trainermon.analysis.compare.verdicts import PASS, CallResult, Row
from trainermon.monitor.values import as_plain

FORMATS = ("csv", "xlsx", "json", "md", "html")
SCHEMA_VERSION = 1


def write_files(
    comparisons: Iterable[Comparison], output: Path, formats: Iterable[str], *, clock: Callable[[], float] = time.time
) -> list[Path]:
    """Write every comparison in every format into `output`, and return the files.

    They are named as msprobe names them: `compare_result[_step…][_rank…]_YYYYmmddHHMMSS.csv`.
    """
    output.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(clock()))
    written = []
    for comparison in comparisons:
        label = f"_{comparison.label.replace(' ', '_')}" if comparison.label else ""
        for name in formats:
            path = output / f"compare_result{label}_{stamp}.{name}"
            _writer(name)(comparison, path)
            written.append(path)
    return written


def write_csv(comparison: Comparison, path: Path) -> None:
    """Write the result table as csv."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header(comparison.mode))
        writer.writerows(table(comparison))


def write_json(comparison: Comparison, path: Path) -> None:
    """Write every call, and the rows of those that do not pass, as JSON; the fields are described in the README."""
    path.write_text(json.dumps(as_document(comparison), indent=1) + "\n", encoding="utf-8")


def as_document(comparison: Comparison) -> dict[str, Any]:
    """Return what the JSON file holds. Numbers that are not finite are texts."""
    counts, calls = comparison.row_counts(), comparison.call_counts()
    document: dict[str, Any] = as_plain(
        {
            "version": SCHEMA_VERSION,
            "target": str(comparison.target),
            "golden": str(comparison.golden),
            "label": comparison.label,
            "mode": comparison.mode.value,
            "headline": headline(comparison),
            "rows": {result: counts[result] for result in RESULTS},
            "calls": {result: calls[result] for result in RESULTS},
            "blamed": [call.key for call in comparison.blamed],
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


def _row(row: Row) -> dict[str, Any]:
    item = row.target or row.golden
    return {
        "place": item.place if item else None,
        "result": row.result,
        "relative": row.difference.relative,
        "messages": list(row.messages),
    }


def _writer(name: str) -> Callable[[Comparison, Path], None]:
    from trainermon.analysis.compare import pages, workbook

    writers = {
        "csv": write_csv,
        "json": write_json,
        "md": pages.write_markdown,
        "html": pages.write_html,
        "xlsx": workbook.write_xlsx,
    }
    return writers[name]
