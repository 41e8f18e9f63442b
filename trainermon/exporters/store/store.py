"""The store of a run: what the agents write is kept here exactly once, and read back from here.

`SegmentWriter` gathers the blocks of all local ranks and makes one segment of them for all kinds, together with the
position that was reached in every journal. What has been sealed into a `SegmentBatch` may be written in another thread
while the next one is being gathered. `read_cursors` says where to go on after a restart, `open_run` is the run as SQL
tables. When a commit is due, and which journal files may go after it, is the agent's decision
(`trainermon.agent.pipeline`).
"""

# ruff: noqa: S608  (the SQL consists of our own column names)

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trainermon.core.errors import StoreError
from trainermon.core.journal import Header
from trainermon.core.values import NUM_BINS, STATISTICS, BlockHistograms, Placement, SeriesKey, StatBlock
from trainermon.exporters.store.damaged import damaged, set_aside_truncated
from trainermon.exporters.store.refused import culprits, set_aside
from trainermon.exporters.store.segments import (
    JournalPosition,
    SegmentMetadata,
    clean,
    connect,
    last_number,
    read_newest,
    segment_path,
    write_segment,
)
from trainermon.exporters.store.tables import open_run

if TYPE_CHECKING:
    import duckdb

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.uint32]

__all__ = ["SegmentBatch", "SegmentWriter", "open_run", "read_cursors"]

MAX_COUNT = 1 << 53
"""Above this not every integer is a float64."""

_COUNTS = frozenset({"count", "zeros", "nans", "infs"})

_BINS = [f"bin{number}" for number in range(NUM_BINS)]
_ROWS = "SELECT *, 1 AS num_steps, NULL::BIGINT[] AS histogram FROM moments JOIN series USING (id)"
_ROWS_AND_COUNTS = (
    "SELECT *, 1 AS num_steps FROM moments JOIN series USING (id)"
    f" LEFT JOIN (SELECT place, [{', '.join(_BINS)}] AS histogram FROM counts) USING (place)"
)


class _SeriesEntry(NamedTuple):
    """What a row says about its series; two ranks share an entry if they agree on all of it."""

    key: SeriesKey
    in_global_norm: bool
    scale: float
    dtype: str
    shape: str


class _BlockPart(NamedTuple):
    """One block, with the writer's own numbers for its series."""

    attempt: int
    rank: int
    step: int
    time_s: float
    ids: Integers
    values: Floats
    histograms: BlockHistograms | None = None


class _WriterDatabase:
    """The database that writes segments, with the series as a table; kept, as making it costs as much as 50 k rows.

    Attributes:
        left_out: Numbers of series that are no part of it.
    """

    def __init__(self, left_out: Iterable[int] = ()) -> None:
        self.left_out = set(left_out)
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._places = np.zeros(0, np.uint32)
        self._num_left_out = 0

    def write(
        self, series: Sequence[_SeriesEntry], parts: Sequence[_BlockPart], path: Path, metadata: SegmentMetadata
    ) -> None:
        """Write rows of series that are not left out; after an error the next call begins with a new database."""
        with self._rows(series, parts) as (connection, rows):
            write_segment(connection, rows, path, metadata)

    def try_out(self, series: Sequence[_SeriesEntry], parts: Sequence[_BlockPart]) -> None:
        """Do the same as `write`, without a file."""
        with self._rows(series, parts) as (connection, rows):
            connection.execute(f"COPY ({rows}) TO '/dev/null' (FORMAT parquet, USE_TMP_FILE false)")

    @contextlib.contextmanager
    def _rows(
        self, series: Sequence[_SeriesEntry], parts: Sequence[_BlockPart]
    ) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
        try:
            connection, places = self._prepare(series)
            parts = sorted(parts, key=lambda part: part[:3])
            ids = places[np.concatenate([np.zeros(0, np.uint32), *(part.ids for part in parts)])]
            order = np.argsort(ids, kind="stable")
            connection.register("moments", {"id": ids[order], **_columns(parts, order)})
            connection.register("counts", _counts(parts, order))
            has_counts = any(part.histograms is not None for part in parts)
            yield connection, _ROWS_AND_COUNTS if has_counts else _ROWS
            connection.unregister("moments")
            connection.unregister("counts")
        except BaseException:  # an interrupt too leaves the database in an unknown state; it goes on
            self._connection = None
            raise

    def _prepare(self, series: Sequence[_SeriesEntry]) -> tuple[duckdb.DuckDBPyConnection, Integers]:
        """Return the database, and by the writer's number of a series its place in sorted order."""
        is_known = len(self._places) == len(series) and self._num_left_out == len(self.left_out)
        if self._connection is None or not is_known:
            stored = (number for number in range(len(series)) if number not in self.left_out)
            order = sorted(stored, key=lambda number: _sort_key(series[number].key))
            self._places, self._num_left_out = np.zeros(len(series), np.uint32), len(self.left_out)
            self._places[order] = np.arange(len(order), dtype=np.uint32)
            self._connection = connect()
            # A join keeps the order of its left side, as long as the sides are not exchanged.
            self._connection.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
            _create_series(self._connection, [series[number] for number in order])
        return self._connection, self._places


@dataclasses.dataclass(slots=True)
class SetAside:
    """What a node's store has lost.

    Attributes:
        num_rows: Number of rows that could not be stored.
        reason: Why the newest of them could not.
        damaged: The segments that cannot be read any more.
    """

    num_rows: int = 0
    reason: str = ""
    damaged: Sequence[Path] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBatch:
    """The rows of a segment that is ready to be written; rows, number and metadata are fixed.

    `path` is where it will be written, `set_aside` what cannot be.
    """

    path: Path
    parts: tuple[_BlockPart, ...]
    series: tuple[_SeriesEntry, ...]
    metadata: SegmentMetadata
    database: _WriterDatabase
    set_aside: SetAside

    def write(self) -> Path:
        """Commit the segment and return its path; safe to repeat after an error.

        Rows that cannot be stored whatever the disk are set aside (see `refused`) and counted. Batches of one writer
        are written one after the other, in any thread. Costs about 0.3 µs a row of CPU time, most of it without the
        interpreter lock.

        Raises:
            StoreError: It could not be written; nothing has changed.
        """
        known = self.database.left_out
        kept, left = self._split(self.parts) if known else (self.parts, ())
        try:
            self._commit(kept, left, self.set_aside.reason)
        except StoreError:
            raise  # the disk's fault: all of it is tried again
        except Exception as error:  # noqa: BLE001 - the border: whatever a rank has written must not stop the store
            self._commit_storable(error)
        return self.path

    def _commit(self, kept: Sequence[_BlockPart], left: Sequence[_BlockPart], reason: str) -> None:
        num_left = sum(len(part.ids) for part in left)
        if num_left:  # first: killed in between, the rows are there twice and not nowhere
            set_aside(self.path, reason, (_told(part, self.series) for part in left))
        metadata = dataclasses.replace(self.metadata, num_rows=sum(len(part.ids) for part in kept))
        self.database.write(self.series, kept, self.path, metadata)
        self.set_aside.num_rows += num_left
        self.set_aside.reason = reason
        self.set_aside.damaged = damaged(self.path.parent)  # merging may have found some

    def _commit_storable(self, error: Exception) -> None:
        """Commit what can be stored after all: first without the series, then without the parts that cannot be."""
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:500]
        if not self._works((), ()):
            raise StoreError(f"{self.path}: nothing at all can be stored: {reason}") from error
        numbers = np.unique(np.concatenate([part.ids for part in self.parts])).tolist()
        self.database.left_out.update(culprits(numbers, lambda some: self._works(some, ())))
        kept, left = self._split(self.parts)
        stored = [number for number in numbers if number not in self.database.left_out]
        places = culprits(range(len(kept)), lambda some: self._works(stored, [kept[place] for place in some]))
        left += [kept[place] for place in places]
        try:
            self._commit([part for place, part in enumerate(kept) if place not in set(places)], left, reason)
        except StoreError:
            raise
        except Exception as again:  # nothing was found that is to blame
            raise StoreError(f"{self.path}: the segment could not be written: {again}") from again

    def _works(self, numbers: Sequence[int], parts: Sequence[_BlockPart]) -> bool:
        """Whether these series, and rows of them, can be stored by a new database."""
        import duckdb

        try:
            _WriterDatabase(set(range(len(self.series))).difference(numbers)).try_out(self.series, parts)
        except (MemoryError, duckdb.OutOfMemoryException) as error:
            raise StoreError(f"{self.path}: there is not enough memory: {error}") from error
        except Exception:  # noqa: BLE001 - whether it raises anything at all is what is asked
            return False
        return True

    def _split(self, parts: Sequence[_BlockPart]) -> tuple[list[_BlockPart], list[_BlockPart]]:
        """Return the rows of parts that are stored, and those of series that are left out."""
        is_left = np.zeros(len(self.series), np.bool_)
        is_left[[number for number in self.database.left_out if number < len(is_left)]] = True
        kept = [_of_rows(part, ~is_left[part.ids]) for part in parts]
        left = [_of_rows(part, is_left[part.ids]) for part in parts]
        return [part for part in kept if len(part.ids)], [part for part in left if len(part.ids)]


class SegmentWriter:
    """Collects blocks (steps of ranks) and commits them as the segments of one directory, whose only writer it is.

    Whatever an interrupted predecessor left is removed at the start, and what is damaged is set aside. Memory: what was
    added since the last `seal`, see `size_bytes`.

    Attributes:
        set_aside: What is missing in the store, up to the batch that was written last.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        set_aside_truncated(directory)
        clean(directory)
        _, self.metadata = read_newest(directory)
        self.directory = directory
        self.num_rows = 0
        self.size_bytes = 0
        self._next = last_number(directory) + 1
        self.set_aside = SetAside(damaged=damaged(directory))
        self._database = _WriterDatabase()
        self._parts: list[_BlockPart] = []
        self._series: list[_SeriesEntry] = []
        self._index: dict[_SeriesEntry, int] = {}
        self._ids: dict[int, tuple[Header, Integers]] = {}

    def add(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Add one block; `keys` is the rank's whole series table so far. An empty block changes nothing."""
        series = np.asarray(block.series)
        if not len(series):
            return
        values = np.asarray(block.values, np.float64)
        rank = header.coordinates.rank
        ids = self._ids_of(header, keys)[series]
        part = _BlockPart(header.attempt, rank, block.step, block.time_s, ids, values, block.histograms)
        self._parts.append(part)
        self.num_rows += len(series)
        self.size_bytes += values.nbytes + part.ids.nbytes
        self.size_bytes += 0 if block.histograms is None else np.asarray(block.histograms.counts).nbytes

    def seal(self, positions: Mapping[int, JournalPosition]) -> SegmentBatch | None:
        """Return everything added so far as a batch that also says that the journals are stored up to `positions`.

        Positions of ranks that are not named stay what they were. None if nothing was added. The caller must see to it
        that batches are written in the order in which they were sealed, each before the next.
        """
        if not self._parts:
            return None
        self.metadata = self._next_metadata(positions)
        batch = SegmentBatch(
            path=segment_path(self.directory, self._next, self._next),
            parts=tuple(self._parts),
            series=tuple(self._series),
            metadata=self.metadata,
            database=self._database,
            set_aside=self.set_aside,
        )
        self._next += 1
        self._parts, self.num_rows, self.size_bytes = [], 0, 0
        return batch

    def commit(self, positions: Mapping[int, JournalPosition]) -> Path | None:
        """Write everything added so far as a segment, and return its path; None if there was nothing to write.

        `positions` are, by rank, how far the journals are stored with it.
        """
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

    def _id(self, series: _SeriesEntry) -> int:
        index = self._index.setdefault(series, len(self._series))
        if index == len(self._series):
            self._series.append(series)
        return index

    def _next_metadata(self, positions: Mapping[int, JournalPosition]) -> SegmentMetadata:
        attempts = dict(self.metadata.attempts)
        for part in self._parts:
            attempts[part.attempt] = min(part.step, attempts.get(part.attempt, part.step))
        coordinates = {rank: dataclasses.asdict(header.coordinates) for rank, (header, _) in self._ids.items()}
        started_s = {(rank, header.attempt): header.started_s for rank, (header, _) in self._ids.items()}
        return SegmentMetadata(
            positions={**self.metadata.positions, **positions},
            attempts=attempts,
            coordinates={**self.metadata.coordinates, **coordinates},
            started_s={**self.metadata.started_s, **started_s},
            num_rows=self.num_rows,
            last_time_s=max(part.time_s for part in self._parts),
        )


def read_cursors(directory: Path) -> dict[int, JournalPosition]:
    """Return, by rank, how far the journals are stored in the segments of `directory`; empty without any."""
    return dict(read_newest(directory)[1].positions)


def _of_rows(part: _BlockPart, chosen: npt.NDArray[np.bool_]) -> _BlockPart:
    histograms = part.histograms
    if histograms is not None:
        places = np.asarray(histograms.places)
        kept = chosen[places]
        places = (np.cumsum(chosen) - 1)[places[kept]]
        histograms = BlockHistograms(places=places, counts=np.asarray(histograms.counts)[kept])
    return part._replace(ids=part.ids[chosen], values=part.values[:, chosen], histograms=histograms)


def _told(part: _BlockPart, series: Sequence[_SeriesEntry]) -> dict[str, Any]:
    """Return the rows of a block by field, for the quarantine, with whatever is wrong with them."""
    return {
        **{name: getattr(part, name) for name in ("attempt", "rank", "step", "time_s")},
        "statistics": STATISTICS,
        "rows": [
            {"series": series[number].key, "values": values}
            for number, values in zip(part.ids.tolist(), part.values.T.tolist(), strict=True)
        ],
    }


def _create_series(connection: duckdb.DuckDBPyConnection, series: Sequence[_SeriesEntry]) -> None:
    """Create the table that joins the rows to their series; enumerations, which Parquet writes without hashing text."""
    keys = [entry.key for entry in series]
    texts = {
        "kind": [key.kind.value for key in keys],
        "name": [key.name for key in keys],
        "slot": [key.slot for key in keys],
        "dtype": [entry.dtype for entry in series],
        "shape": [entry.shape for entry in series],
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


def _columns(parts: Sequence[_BlockPart], order: npt.NDArray[np.intp]) -> dict[str, npt.NDArray[Any]]:
    """Return the rows of the parts in `order`, and the place of each in it."""
    sizes = [len(part.ids) for part in parts]
    columns: dict[str, npt.NDArray[Any]] = {"place": np.arange(len(order))}
    for name, dtype in (("attempt", np.int32), ("rank", np.int32), ("step", np.int64), ("time_s", np.float64)):
        columns[name] = np.repeat(np.array([getattr(part, name) for part in parts], dtype), sizes)[order]
    for row, name in enumerate(STATISTICS):
        column = np.concatenate([np.zeros(0), *(part.values[row] for part in parts)])[order]
        columns[name] = _as_count(column) if name in _COUNTS else column
    return columns


def _counts(parts: Sequence[_BlockPart], order: npt.NDArray[np.intp]) -> dict[str, npt.NDArray[Any]]:
    """Return the histograms of the parts, one column for each bin, with the place of their row in `order`."""
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    places, counts = [np.zeros(0, np.int64)], [np.zeros((0, NUM_BINS), np.int64)]
    begin = 0
    for part in parts:
        if part.histograms is not None:
            places.append(place_of[begin + np.asarray(part.histograms.places, np.int64)])
            counts.append(np.asarray(part.histograms.counts).astype(np.int64))
        begin += len(part.ids)
    columns = np.ascontiguousarray(np.concatenate(counts).T)
    return {"place": np.concatenate(places), **dict(zip(_BINS, columns, strict=True))}


def _series_of(key: SeriesKey, placement: Placement | None, *, is_first_copy: bool) -> _SeriesEntry:
    """Return what a row says about its series.

    Without a placement, a tensor is taken for one that all data-parallel ranks hold alike.
    """
    if placement is None:
        return _SeriesEntry(key, is_first_copy, 1.0, "", "")
    return _SeriesEntry(
        key,
        placement.in_global_norm,
        placement.scale,
        placement.dtype,
        json.dumps(placement.shape) if placement.dtype else "",
    )


def _sort_key(key: SeriesKey) -> tuple[Any, ...]:
    micro_step = -1 if key.micro_step is None else key.micro_step
    return (key.kind.value, key.name, key.slot, key.call, micro_step, key.stage)


def _as_count(column: Floats) -> npt.NDArray[np.int64]:
    """Return counts as integers; what is none (no rank writes that) is 0, and stops neither the store nor a sum."""
    return np.where((column >= 0) & (column <= MAX_COUNT), column, 0).astype(np.int64)
