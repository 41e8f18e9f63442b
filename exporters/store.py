"""The store of a run: what the agents write is kept here exactly once, and read back from here.

`SegmentWriter` gathers the blocks of all local ranks and makes one segment of them for all kinds, together with the
position that was reached in every journal. What has been sealed into a `Batch` may be written in another thread while
the next one is being gathered. `read_cursors` says where to go on after a restart, `open_run` is the run as SQL
tables. When a commit is due, and which journal files may go after it, is
the agent's decision (`trainermon.agent.pipeline`).
"""

# ruff: noqa: S608  (the SQL consists of our own column names)

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trainermon.exporters.segments import (
    Metadata,
    Position,
    clean,
    connect,
    read_newest,
    segment_path,
    write_segment,
)
from trainermon.exporters.tables import open_run
from trainermon.monitor.journal import Header
from trainermon.monitor.values import STATISTICS, Placement, SeriesKey, StatBlock

if TYPE_CHECKING:
    import duckdb

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.uint32]

__all__ = ["Batch", "SegmentWriter", "open_run", "read_cursors"]

_COUNTS = frozenset({"count", "zeros", "nans", "infs"})


class _Series(NamedTuple):
    """What a row says about its series; two ranks share an entry if they agree on all of it."""

    key: SeriesKey
    in_global_norm: bool
    scale: float


class _Part(NamedTuple):
    """One block, with the writer's own numbers for its series."""

    attempt: int
    rank: int
    step: int
    time_s: float
    ids: Integers
    values: Floats


class _Database:
    """The database that writes segments, with the series as a table; kept, as making it costs as much as 50 k rows."""

    def __init__(self) -> None:
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._places = np.zeros(0, np.uint32)

    def write(self, batch: Batch) -> None:
        """Write the batch; after an error the next one begins with a new database."""
        try:
            connection, places = self._prepare(batch.series)
            connection.register("moments", _columns(batch.parts, places))
            rows = "SELECT *, 1 AS num_steps FROM moments JOIN series USING (id)"
            write_segment(connection, rows, batch.path, batch.metadata)
            connection.unregister("moments")
        except BaseException:  # an interrupt too leaves the database in an unknown state; it goes on
            self._connection = None
            raise

    def _prepare(self, series: Sequence[_Series]) -> tuple[duckdb.DuckDBPyConnection, Integers]:
        """Return the database, and by the writer's number of a series its place in sorted order."""
        if self._connection is None or len(self._places) != len(series):
            order = sorted(range(len(series)), key=lambda index: _sort_key(series[index].key))
            self._places = np.empty(len(series), np.uint32)
            self._places[order] = np.arange(len(series), dtype=np.uint32)
            self._connection = connect()
            # A join keeps the order of its left side, as long as the sides are not exchanged.
            self._connection.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
            _create_series(self._connection, [series[index] for index in order])
        return self._connection, self._places


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A segment to be: its rows, its number and its metadata are settled, only the file is not there yet."""

    path: Path
    parts: tuple[_Part, ...]
    series: tuple[_Series, ...]
    metadata: Metadata
    database: _Database

    def write(self) -> Path:
        """Commit the segment and return its path; safe to repeat after an error.

        Batches of one writer are written one after the other, in any thread. Costs about 0.3 µs a row of CPU time, most
        of it without the interpreter lock.

        Raises:
            StoreError: It could not be written; nothing has changed.
        """
        self.database.write(self)
        return self.path


class SegmentWriter:
    """Gathers blocks and commits them as the segments of one directory, whose only writer it is.

    Whatever an interrupted predecessor left is removed at the start. Memory: what was added since the last `seal`,
    see `size_bytes`.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        clean(directory)
        last, self.metadata = read_newest(directory)
        self.directory = directory
        self.num_rows = 0
        self.size_bytes = 0
        self._next = last + 1
        self._database = _Database()
        self._parts: list[_Part] = []
        self._series: list[_Series] = []
        self._index: dict[_Series, int] = {}
        self._ids: dict[int, tuple[Header, Integers]] = {}

    def add(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Take one block; `keys` is the rank's whole series table so far. An empty block changes nothing."""
        series = np.asarray(block.series)
        if not len(series):
            return
        values = np.asarray(block.values, np.float64)
        rank = header.coordinates.rank
        part = _Part(header.attempt, rank, block.step, block.time_s, self._ids_of(header, keys)[series], values)
        self._parts.append(part)
        self.num_rows += len(series)
        self.size_bytes += values.nbytes + part.ids.nbytes

    def seal(self, positions: Mapping[int, Position]) -> Batch | None:
        """Return everything added so far as a batch that also says that the journals are stored up to `positions`.

        Positions of ranks that are not named stay what they were. None if nothing was added. The caller must see to it
        that batches are written in the order in which they were sealed, each before the next.
        """
        if not self._parts:
            return None
        self.metadata = self._next_metadata(positions)
        batch = Batch(
            path=segment_path(self.directory, self._next, self._next),
            parts=tuple(self._parts),
            series=tuple(self._series),
            metadata=self.metadata,
            database=self._database,
        )
        self._next += 1
        self._parts, self.num_rows, self.size_bytes = [], 0, 0
        return batch

    def commit(self, positions: Mapping[int, Position]) -> Path | None:
        """Seal and write in one go; None if there was nothing to write."""
        batch = self.seal(positions)
        return batch.write() if batch else None

    def _ids_of(self, header: Header, keys: Sequence[SeriesKey]) -> Integers:
        """Return the writer's numbers for the rank's table; made once per table, as the header is a value."""
        rank = header.coordinates.rank
        known = self._ids.get(rank)
        if known and known[0] is header and len(known[1]) == len(keys):
            return known[1]
        is_first_copy = header.coordinates.dp == 0
        entries = (
            _series_of(key, placement, is_first_copy=is_first_copy)
            for key, placement in itertools.zip_longest(keys, header.placements[: len(keys)])
        )
        ids = np.fromiter(map(self._id, entries), np.uint32, len(keys))
        self._ids[rank] = (header, ids)
        return ids

    def _id(self, series: _Series) -> int:
        index = self._index.setdefault(series, len(self._series))
        if index == len(self._series):
            self._series.append(series)
        return index

    def _next_metadata(self, positions: Mapping[int, Position]) -> Metadata:
        attempts = dict(self.metadata.attempts)
        for part in self._parts:
            attempts[part.attempt] = min(part.step, attempts.get(part.attempt, part.step))
        coordinates = {rank: dataclasses.asdict(header.coordinates) for rank, (header, _) in self._ids.items()}
        return Metadata(
            positions={**self.metadata.positions, **positions},
            attempts=attempts,
            coordinates={**self.metadata.coordinates, **coordinates},
            num_rows=self.num_rows,
            last_time_s=max(part.time_s for part in self._parts),
        )


def read_cursors(directory: Path) -> dict[int, Position]:
    """Return, by rank, how far the journals are stored in the segments of `directory`; empty without any."""
    return dict(read_newest(directory)[1].positions)


def _create_series(connection: duckdb.DuckDBPyConnection, series: Sequence[_Series]) -> None:
    """Create the table that joins the rows to their series; enumerations, which Parquet writes without hashing text."""
    keys = [entry.key for entry in series]
    texts = {
        "kind": [key.kind.value for key in keys],
        "name": [key.name for key in keys],
        "slot": [key.slot for key in keys],
    }
    columns: dict[str, npt.NDArray[Any]] = {name: np.array(text, dtype=object) for name, text in texts.items()}
    columns["id"] = np.arange(len(series), dtype=np.uint32)
    columns["call"] = np.array([key.call for key in keys], np.int32)
    columns["micro_step"] = np.array([-1 if key.micro_step is None else key.micro_step for key in keys], np.int32)
    columns["stage"] = np.array([key.stage for key in keys], np.int32)
    columns["in_global_norm"] = np.array([entry.in_global_norm for entry in series], np.bool_)
    columns["scale"] = np.array([entry.scale for entry in series], np.float64)
    connection.register("plain", columns)
    for name in texts:
        connection.execute(f"CREATE TYPE {name}_text AS ENUM (SELECT DISTINCT {name} FROM plain)")
    enums = ", ".join(f"{name}::{name}_text AS {name}" for name in texts)
    connection.execute(
        f"CREATE TABLE series AS SELECT * REPLACE ({enums}, nullif(micro_step, -1) AS micro_step) FROM plain"
    )


def _columns(parts: Sequence[_Part], places: Integers) -> dict[str, npt.NDArray[Any]]:
    """Return the rows sorted by series (`id`, its place in sorted order), then by attempt, rank and step."""
    parts = sorted(parts, key=lambda part: part[:3])
    ids = places[np.concatenate([part.ids for part in parts])]
    order = np.argsort(ids, kind="stable")
    sizes = [len(part.ids) for part in parts]
    columns: dict[str, npt.NDArray[Any]] = {"id": ids[order]}
    for name, dtype in (("attempt", np.int32), ("rank", np.int32), ("step", np.int64), ("time_s", np.float64)):
        columns[name] = np.repeat(np.array([getattr(part, name) for part in parts], dtype), sizes)[order]
    for row, name in enumerate(STATISTICS):
        column = np.concatenate([part.values[row] for part in parts])[order]
        columns[name] = _as_count(column) if name in _COUNTS else column
    return columns


def _series_of(key: SeriesKey, placement: Placement | None, *, is_first_copy: bool) -> _Series:
    """Without a placement, a tensor is taken for one that all data-parallel ranks hold alike."""
    if placement is None:
        return _Series(key, is_first_copy, 1.0)
    return _Series(key, placement.in_global_norm, placement.scale)


def _sort_key(key: SeriesKey) -> tuple[Any, ...]:
    micro_step = -1 if key.micro_step is None else key.micro_step
    return (key.kind.value, key.name, key.slot, key.call, micro_step, key.stage)


def _as_count(column: Floats) -> npt.NDArray[np.int64]:
    """Return counts as integers; what is none (no rank writes that) must not stop the store for ever."""
    with np.errstate(invalid="ignore"):
        return column.astype(np.int64)
