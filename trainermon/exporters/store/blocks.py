"""Gives the newest stored blocks back as they were, for those who lost their memory: rules and page after a restart."""

# ruff: noqa: S608  (the SQL consists of our own column names and of quoted paths)

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainermon.core.catalogue import MODULE_SETTINGS_SERIES
from trainermon.core.errors import StoreError
from trainermon.core.journal import Header
from trainermon.core.values import (
    NUM_BINS,
    STATISTICS,
    BlockHistograms,
    Coordinates,
    Kind,
    Placement,
    SeriesKey,
    StatBlock,
)
from trainermon.exporters.store.segments import (
    COLUMNS,
    SERIES_COLUMNS,
    SegmentMetadata,
    connect,
    cover,
    read_metadata,
    reader,
    scan,
    unreadable,
)

if TYPE_CHECKING:
    import duckdb

MAX_ROWS = 2_000_000


def read_blocks(directory: Path, *, max_rows: int = MAX_ROWS) -> Iterator[tuple[Header, StatBlock]]:
    """Yield the newest blocks of the segments, oldest first: by segment, then attempt, step and rank.

    Whole segments are read, the newest ones that hold `max_rows` together (at least one), one at a time in memory. The
    headers carry attempt, coordinates, the time of the start and the series table of the segment (`header.series`),
    with placements that say no more than `dtype`, `shape`, `in_global_norm` and `scale`. Rows that were merged over
    steps come back as the block of the last of them.

    Raises:
        StoreError: A segment cannot be read.
    """
    for path, metadata in reversed(newest_segments(directory, max_rows)):
        yield from read_segment_blocks(path, metadata)


def newest_segments(directory: Path, max_rows: int = MAX_ROWS) -> list[tuple[Path, SegmentMetadata]]:
    """Return the newest segments that hold `max_rows` together (at least one), newest first.

    Raises:
        StoreError: A segment cannot be read.
    """
    chosen: list[tuple[Path, SegmentMetadata]] = []
    num_rows = 0
    for segment in reversed(cover(directory)):
        metadata = read_metadata(segment.path)
        num_rows += metadata.num_rows
        if chosen and num_rows > max_rows:
            break
        chosen.append((segment.path, metadata))
    return chosen


def read_rows(path: Path) -> None:
    """Read all rows of a segment and throw them away, to find out whether it can be read.

    Raises:
        StoreError: That is not possible.
    """
    import duckdb

    try:
        with connect() as connection:
            # A smallest value would be taken from the file's statistics, without reading a row.
            connection.execute(f"SELECT bit_xor(hash({', '.join(COLUMNS)})) FROM {scan([path])}").fetchall()
    except (OSError, duckdb.Error) as error:
        raise unreadable(path, error) from error


def first_unreadable(run_dir: Path) -> StoreError | None:
    """Return what `read_rows` raises of the first segment of a run whose rows cannot be read; None if all can."""
    folders = sorted(run_dir.glob("nodes/*/segments"))
    faults = (_fault_of(segment.path) for folder in folders for segment in cover(folder))
    return next((fault for fault in faults if fault is not None), None)


def _fault_of(path: Path) -> StoreError | None:
    try:
        read_rows(path)
    except StoreError as error:
        return error if path.exists() else None  # it was merged into another one
    return None


def read_segment_blocks(
    path: Path, metadata: SegmentMetadata, *, where: str = "true"
) -> Iterator[tuple[Header, StatBlock]]:
    """Yield the blocks of one segment by attempt, step and rank; headers and errors as for `read_blocks`.

    `where` is an SQL condition on its columns: of the others, rows and series are left out.
    """
    series, columns, counts = _read_segment(path, where)
    order = _order(columns)
    places = np.stack([columns[name][order] for name in ("attempt", "step", "rank")])
    values = np.stack([columns[name][order] for name in STATISTICS])
    ids = columns["id"][order].astype(np.uint32)
    histograms = np.flatnonzero(columns["is_counted"][order])
    starts = np.flatnonzero(np.r_[len(ids) > 0, (places[:, 1:] != places[:, :-1]).any(axis=0)])
    headers: dict[tuple[int, int], Header] = {}
    for start, end in zip(starts, np.r_[starts, len(ids)][1:], strict=True):
        attempt, step, rank = (int(place) for place in places[:, start])
        header = headers.setdefault((attempt, rank), _header(attempt, rank, metadata, series))
        yield (
            header,
            StatBlock(
                step=step,
                time_s=float(columns["time_s"][order[start]]),
                series=ids[start:end],
                values=np.ascontiguousarray(values[:, start:end]),
                histograms=_histograms(histograms, counts, int(start), int(end)),
            ),
        )


def _order(columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.intp]:
    return np.lexsort((columns["id"], columns["rank"], columns["step"], columns["attempt"]))


def _histograms(
    rows: npt.NDArray[np.intp], counts: npt.NDArray[np.int64], start: int, end: int
) -> BlockHistograms | None:
    """Return the histograms of the rows from `start` to `end`; `counts` are those of `rows`, which are ascending."""
    first, last = np.searchsorted(rows, (start, end))
    if first == last:
        return None
    return BlockHistograms(places=(rows[first:last] - start).astype(np.uint32), counts=counts[first:last])


def _read_segment(
    path: Path, where: str
) -> tuple[list[tuple[SeriesKey, Placement]], dict[str, npt.NDArray[Any]], npt.NDArray[np.int64]]:
    """Return all series of the segment, its rows as columns, and its histograms, int64 `[n, 128]`.

    Of the columns, `id` counts the series, and `is_counted` says which rows have a histogram; these are in the order of
    attempt, step, rank and series.
    """
    import duckdb

    moments = ", ".join(f"rows.{name}::DOUBLE AS {name}" for name in STATISTICS)
    same = " AND ".join(f"rows.{name} IS NOT DISTINCT FROM series.{name}" for name in SERIES_COLUMNS)
    joined = f"FROM {scan([path])} AS rows JOIN series ON {same}"
    try:
        connection = reader()
        series = _read_series(connection, path, where)
        rows = connection.execute(
            f"SELECT id, attempt, rank, step, time_s, histogram IS NOT NULL AS is_counted, {moments} {joined}"
        ).fetchnumpy()
        counts = _read_counts(connection, joined) if rows["is_counted"].any() else np.zeros((0, NUM_BINS), np.int64)
        connection.execute("DROP TABLE series")
    except (OSError, duckdb.Error) as error:
        raise unreadable(path, error) from error
    return series, rows, counts


def _read_counts(connection: duckdb.DuckDBPyConnection, joined: str) -> npt.NDArray[np.int64]:
    bins = ", ".join(f"histogram[{number}] AS bin{number}" for number in range(1, NUM_BINS + 1))
    counted = connection.execute(
        f"SELECT id, attempt, rank, step, {bins} {joined} WHERE histogram IS NOT NULL"
    ).fetchnumpy()
    return np.stack([counted[f"bin{number}"] for number in range(1, NUM_BINS + 1)], axis=1)[_order(counted)]


def _read_series(connection: duckdb.DuckDBPyConnection, path: Path, where: str) -> list[tuple[SeriesKey, Placement]]:
    """Create the table `series` of all series in the segment, and return them in order of their ids."""
    columns = ", ".join(SERIES_COLUMNS)
    connection.execute(
        "CREATE OR REPLACE TABLE series AS SELECT row_number() OVER () - 1 AS id, *"
        f" FROM (SELECT DISTINCT {columns} FROM {scan([path])} WHERE {where})"
    )
    rows = connection.execute(f"SELECT {columns} FROM series ORDER BY id").fetchall()
    return [
        (
            SeriesKey(Kind(kind), name, slot, call, micro_step, stage),
            Placement(
                dtype=dtype or "", shape=tuple(json.loads(shape or "[]")), in_global_norm=in_global_norm, scale=scale
            ),
        )
        for kind, name, slot, call, micro_step, stage, in_global_norm, scale, dtype, shape in rows
    ]


def _header(attempt: int, rank: int, metadata: SegmentMetadata, series: list[tuple[SeriesKey, Placement]]) -> Header:
    return Header(
        run_id="",
        attempt=attempt,
        coordinates=Coordinates(**metadata.coordinates[rank]),
        host="",
        pid=0,
        started_s=metadata.started_s.get((rank, attempt), 0.0),
        series=tuple(key for key, _ in series),
        placements=tuple(placement for _, placement in series),
    )


class GrowingTables:
    """One series table for each rank, which only grows, as in a journal: every segment has a table of its own.

    Args:
        begin: Returns, by rank, the series that its table begins with, with their whole placements: some may never have
            a row, and a segment tells less of a placement.
    """

    def __init__(self, begin: Callable[[int], Mapping[SeriesKey, Placement]] = lambda _: {}) -> None:
        self._begin = begin
        self._keys: dict[int, list[SeriesKey]] = {}
        self._placements: dict[int, list[Placement | None]] = {}
        self._known: dict[int, dict[SeriesKey, int]] = {}
        self._numbers: dict[int, tuple[tuple[SeriesKey, ...], npt.NDArray[np.int64]]] = {}

    def all(self) -> list[list[SeriesKey]]:
        """Return the tables of all ranks."""
        return list(self._keys.values())

    def ranks(self) -> list[int]:
        """Return the ranks that have shown anything."""
        return list(self._keys)

    def translate(self, header: Header, block: StatBlock) -> tuple[Header, list[SeriesKey], StatBlock]:
        """Return a stored block with the numbers of the rank's own table; the header has the placements of that."""
        rank = header.coordinates.rank
        if rank not in self._keys:
            first = self._begin(rank)
            self._keys[rank], self._placements[rank] = list(first), list(first.values())
            self._known[rank] = {key: number for number, key in enumerate(first)}
        keys, known, placements = self._keys[rank], self._known[rank], self._placements[rank]
        if rank not in self._numbers or self._numbers[rank][0] is not header.series:
            self._numbers[rank] = (header.series, np.full(len(header.series), -1))
        numbers = self._numbers[rank][1]
        shown = np.asarray(block.series)
        for number in shown[numbers[shown] < 0].tolist():
            key = header.series[number]
            if key not in known:
                known[key] = len(keys)
                keys.append(key)
                placements.append(None if _is_of_step(key) else header.placements[number])
            numbers[number] = known[key]
        placed = dataclasses.replace(header, series=(), placements=tuple(placements))  # its series are the segment's
        return placed, keys, dataclasses.replace(block, series=numbers[shown].astype(np.uint32))


def _is_of_step(key: SeriesKey) -> bool:
    """Return whether a series is a number of the step, which has no placement, although a segment makes one up."""
    return key.kind is Kind.STEP and key.name != MODULE_SETTINGS_SERIES
