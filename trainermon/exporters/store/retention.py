"""Keeps a node's segments within their budget: full detail for a while, then ever wider windows of steps.

Moments merge over steps as they merge over ranks: sums and counts add up, extrema stay, so that nothing that was not
finite is ever lost; a row then stands for `num_steps` steps and bears the number and time of the last one. So do the
histograms of those of its steps that have one. Small
neighbours are joined as they are, because every file costs every query some time.

A merge is a new segment whose range covers its inputs (see `segments`), so it may be interrupted at any point, and run
beside the commits of the directory's writer. A lock sees to it that there is one `compact` at a time. It takes about
100 MB, so the agent starts a process for it:

    python -m trainermon.exporters.store.retention DIRECTORY --max-bytes 53687091200 --full-detail-hours 24
"""

# ruff: noqa: S608  (the SQL consists of our own column names and of quoted paths)

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainermon.core.errors import StoreError
from trainermon.core.values import NUM_BINS
from trainermon.exporters.store.blocks import read_rows
from trainermon.exporters.store.damaged import set_aside_truncated, set_aside_unreadable
from trainermon.exporters.store.segments import (
    COLUMNS,
    SERIES_COLUMNS,
    SPILL_DIRECTORY,
    SegmentMetadata,
    connect,
    cover,
    merging,
    read_metadata,
    scan,
    segment_path,
    write_segment,
)
from trainermon.exporters.store.tables import superseded

if TYPE_CHECKING:
    import duckdb

logger = logging.getLogger(__name__)

FACTOR = 10
MAX_INPUTS = 32
MAX_INPUT_ROWS = 4_000_000
SMALL_ROWS = 150_000  # a little more than the agent commits at a time
MAX_JOINED_ROWS = 1_500_000
MEMORY_BYTES = 64 << 20  # what does not fit is spilled: 2.1 instead of 1.7 µs a row to sort, 200 MB less
MAX_WINDOW_STEPS = 10**9

_ORDER = (*SERIES_COLUMNS, "attempt", "rank", "step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """How much of a run is kept on each node.

    What is older than `full_detail_s` seconds is merged over `FACTOR` steps. Where all segments together exceed
    `max_bytes`, they are merged further until they do not, so that the resolution falls in proportion to the age;
    nothing is ever dropped.
    """

    max_bytes: int = 50 << 30
    full_detail_s: float = 24 * 3600.0


class _OldSegment(NamedTuple):
    first: int
    last: int
    path: Path
    size: int
    metadata: SegmentMetadata


def compact(directory: Path, retention: RetentionPolicy, *, now_s: float) -> int:
    """Merge segments of `directory` until it meets `retention`; return the number of merges.

    `now_s` is Unix time. Costs about 0.6 µs of CPU time a row that is merged over steps, and 2 µs one that is sorted
    among its neighbours. Nothing is done where another process is at it.

    Raises:
        StoreError: A segment cannot be read or written; what was merged until then stays.
    """
    with merging(directory) as is_alone:
        return _compact(directory, retention, now_s) if is_alone else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge old segments of one directory, as a process that the agent starts; returns 0, or 1 if that failed."""
    parser = argparse.ArgumentParser(description="Merge the segments of a node until they keep to their budget.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--max-bytes", type=int, default=RetentionPolicy.max_bytes)
    parser.add_argument("--full-detail-hours", type=float, default=RetentionPolicy.full_detail_s / 3600)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        retention = RetentionPolicy(max_bytes=given.max_bytes, full_detail_s=3600 * given.full_detail_hours)
        compact(given.directory, retention, now_s=time.time())
    except (StoreError, OSError) as error:
        logger.error("%s", error)  # noqa: TRY400  (the message says it all)
        return 1
    return 0


def _compact(directory: Path, retention: RetentionPolicy, now_s: float) -> int:
    import duckdb

    known: dict[Path, SegmentMetadata] = {}
    count = 0
    set_aside_truncated(directory)
    while True:
        files = cover(directory)
        known = {file.path: known.get(file.path) or read_metadata(file.path) for file in files}
        live = [_OldSegment(*file, file.path.stat().st_size, known[file.path]) for file in files]
        run, factor = _choose(live, retention, now_s)
        if not run:
            return count
        try:
            path = _merge(directory, run, factor, superseded(live[-1].metadata.attempts))
        except duckdb.Error as error:
            if not set_aside_unreadable((segment.path for segment in run), read_rows):
                raise StoreError(f"{directory}: segments cannot be merged: {error}") from error
            continue
        known.pop(path, None)  # it may have replaced a file of that name
        count += 1


def _choose(live: Sequence[_OldSegment], retention: RetentionPolicy, now_s: float) -> tuple[Sequence[_OldSegment], int]:
    """Return the neighbours to merge next, and over how many of their windows; none if all is well."""
    old_s = now_s - retention.full_detail_s
    is_old = [segment.metadata.window_steps == 1 and segment.metadata.last_time_s < old_s for segment in live]
    if any(is_old):
        first = is_old.index(True)
        num_old = (*is_old, False).index(False, first) - first
        return _run(live[first : first + num_old], MAX_INPUT_ROWS), FACTOR
    excess = sum(segment.size for segment in live) - retention.max_bytes
    if excess > 0:
        ages = [
            (now_s - segment.metadata.last_time_s) / segment.metadata.window_steps
            if segment.metadata.window_steps < MAX_WINDOW_STEPS
            else -math.inf
            for segment in live
        ]
        first = ages.index(max(ages))
        if ages[first] > -math.inf:
            return _run(live[first:], MAX_INPUT_ROWS, excess), FACTOR
    for first in range(len(live)):
        small = itertools.takewhile(lambda segment: segment.metadata.num_rows < SMALL_ROWS, live[first:])
        run = _run(list(small), MAX_JOINED_ROWS)
        rows = [segment.metadata.num_rows for segment in run]
        if len(run) >= FACTOR and 2 * max(rows) <= sum(rows):  # else the same rows would be copied again and again
            return run, 1
    return (), 1


def _run(live: Sequence[_OldSegment], max_rows: int, excess: float = math.inf) -> Sequence[_OldSegment]:
    """Return the first segment and neighbours of its window, until `max_rows` or the saving of `excess` bytes."""
    run: list[_OldSegment] = []
    num_rows = 0
    for segment in live[:MAX_INPUTS]:
        num_rows += segment.metadata.num_rows
        is_alike = not run or segment.metadata.window_steps == run[0].metadata.window_steps
        if run and (not is_alike or num_rows > max_rows or excess <= 0):
            break
        run.append(segment)
        excess -= segment.size * (1 - 1 / FACTOR)
    return run


def _merge(directory: Path, run: Sequence[_OldSegment], factor: int, superseded_from: Mapping[int, int]) -> Path:
    """Replace the segments by one and return its path."""
    path = segment_path(directory, run[0].first, run[-1].last)
    with connect(memory_bytes=MEMORY_BYTES, spill=directory / SPILL_DIRECTORY) as connection:
        rows = scan(segment.path for segment in run)
        window_steps = run[-1].metadata.window_steps
        if factor > 1:
            window_steps *= factor * (_interval(connection, rows) if window_steps == 1 else 1)
            rows = f"({_merged_over_steps(rows, window_steps, superseded_from)})"
        connection.execute(
            f"CREATE TABLE merged AS SELECT {', '.join(COLUMNS)} FROM {rows} ORDER BY {', '.join(_ORDER)}"
        )
        ((num_rows,),) = connection.execute("SELECT count(*) FROM merged").fetchall()
        metadata = dataclasses.replace(
            run[-1].metadata,
            window_steps=window_steps,
            num_rows=num_rows,
            last_time_s=max(segment.metadata.last_time_s for segment in run),
        )
        write_segment(connection, "FROM merged", path, metadata)
    for segment in run:
        if segment.path != path:
            segment.path.unlink(missing_ok=True)
    logger.info("merged %d segments, %d steps to a row, into %s", len(run), window_steps, path.name)
    return path


def _interval(connection: duckdb.DuckDBPyConnection, rows: str) -> int:
    """Return how many steps lie from one collected step to the next, on average; at least 1."""
    ((interval,),) = connection.execute(
        f"SELECT (max(step) - min(step)) / greatest(1, count(DISTINCT step) - 1) FROM {rows}"
    ).fetchall()
    return max(1, round(float(interval)))


def _merged_over_steps(rows: str, window_steps: int, superseded_from: Mapping[int, int]) -> str:
    """Return the SQL of one row per series, rank, attempt and window; a window ends where a later attempt begins."""
    whens = " ".join(f"WHEN {attempt:d} THEN step >= {step:d}" for attempt, step in superseded_from.items())
    is_repeated = f"CASE attempt {whens} ELSE false END" if whens else "false"
    merged = {"min": "min(min)", "max": "max(max)", "step": "max(step)", "time_s": "max(time_s)"}
    added = ("count", "sum", "sum_sq", "zeros", "nans", "infs", "num_steps")
    merged |= {name: f"sum({name})::{COLUMNS[name]}" for name in added}
    same = (*SERIES_COLUMNS, "attempt", "rank", "time_window", "is_repeated")
    columns = ", ".join(f"{merged[name]} AS {name}" if name in merged else name for name in (*same, *merged))
    bins = ", ".join(f"sum(histogram[{number}])::BIGINT" for number in range(1, NUM_BINS + 1))
    keys = " AND ".join(f"merged.{name} IS NOT DISTINCT FROM counted.{name}" for name in same)
    # Few rows have a histogram: 128 sums for each group of all rows would be far more than the memory that there is.
    return (
        f"WITH windowed AS (SELECT *, step // {window_steps:d} AS time_window, {is_repeated} AS is_repeated"
        f" FROM {rows}),"
        f" merged AS (SELECT {columns} FROM windowed GROUP BY {', '.join(same)}),"
        f" counted AS (SELECT {', '.join(same)}, [{bins}] AS histogram FROM windowed WHERE histogram IS NOT NULL"
        f" GROUP BY {', '.join(same)})"
        f" SELECT merged.*, counted.histogram FROM merged LEFT JOIN counted ON {keys}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
