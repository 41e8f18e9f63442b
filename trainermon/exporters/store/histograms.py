"""The histograms of a row of a heat map over the steps that have some, for the page and as a table.

Which rows of the store belong to it says `curves`, as for its lines.
"""

# ruff: noqa: S608  (the SQL consists of our own names and of numbers)

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.core.errors import QueryError
from trainermon.core.values import BIN_BOUNDS, NUM_BINS
from trainermon.exporters.store.curves import MAX_TABLE_ROWS, CurveQuery, again, condition_of

if TYPE_CHECKING:
    import duckdb

MAX_COLUMNS = 1000
"""A column is 1 KiB on its way to the page."""


class StepHistograms(NamedTuple):
    """The histograms of one row, the elements of all ranks together. All arrays are ascending by step.

    Attributes:
        first: int64 `[n]`, the first step of each.
        last: int64 `[n]`, the last; where there are more than were asked for, neighbours are added up.
        counts: int64 `[n, 128]`, elements by `core.values.BIN_BOUNDS`.
    """

    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


def read_histograms(run_dir: Path, query: CurveQuery, *, node: str = "*") -> StepHistograms:
    """Return the histograms of a row of a heat map; none if none was taken.

    `first`, `last` and `points` of the query count, the latter up to 1 000; `statistic` and `by_rank` do not. Of a node
    alone, or of all.

    Raises:
        QueryError: The run has no such row.
        StoreError: The run cannot be read.
    """
    return again(run_dir, node, lambda connection: _read(connection, query, max(1, min(query.points, MAX_COLUMNS))))


def read_histogram_table(run_dir: Path, query: CurveQuery, *, node: str = "*") -> bytes:
    """Return the same histograms, of each step, as CSV in UTF-8: one line for each bin that has elements.

    `low` and `high` are its bounds, both empty for elements that are not finite.

    Raises:
        QueryError: The run has no such row, or there are more than 500 000 lines.
        StoreError: The run cannot be read.
    """
    found = again(run_dir, node, lambda connection: _read(connection, query, None))
    lines = np.argwhere(found.counts)
    if len(lines) > MAX_TABLE_ROWS:
        raise QueryError(f"{len(lines)} lines are more than the {MAX_TABLE_ROWS} of one table; ask for fewer steps")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("step", "low", "high", "count"))
    for place, bin in lines.tolist():
        bounds = ("", "") if math.isnan(BIN_BOUNDS[bin][0]) else BIN_BOUNDS[bin]
        writer.writerow((found.last[place], *bounds, found.counts[place, bin]))
    return text.getvalue().encode()


def encode_histograms(found: StepHistograms, query: CurveQuery) -> bytes:
    """Return the histograms in the page's binary format.

    That is the uint32 length of a JSON header, the header, padding up to a multiple of 8 bytes; then little-endian
    float64: first steps, last steps, and the counts, step by step. The header has the bounds of the bins, null where
    they are infinite or NaN.
    """
    header = {
        "kind": query.heat_map,
        "row": query.row,
        "size": len(found.first),
        "bounds": [[bound if math.isfinite(bound) else None for bound in bounds] for bounds in BIN_BOUNDS],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    columns = [column.astype("<f8").tobytes() for column in found]
    return b"".join([len(text).to_bytes(4, "little"), text, *columns])


def _read(connection: duckdb.DuckDBPyConnection, query: CurveQuery, most: int | None) -> StepHistograms:
    """Return the histograms of all steps, or of at most so many stretches of as many steps each."""
    bins = ", ".join(f"sum(histogram[{number}])::BIGINT AS bin{number}" for number in range(1, NUM_BINS + 1))
    found = connection.execute(
        f"SELECT step, {bins} FROM stats WHERE histogram IS NOT NULL AND {condition_of(connection, query)}"
        " GROUP BY step ORDER BY step"
    ).fetchnumpy()
    columns = [column.astype(np.int64) for column in found.values()]
    steps, counts = columns[0], np.stack(columns[1:], axis=1)
    if most is None or len(steps) <= most:
        return StepHistograms(steps, steps, counts)
    starts = np.unique(np.linspace(0, len(steps), most, endpoint=False).astype(np.intp))
    ends = np.r_[starts[1:], len(steps)] - 1
    return StepHistograms(steps[starts], steps[ends], np.add.reduceat(counts, starts))
