"""Reads the segments of one node as they are committed, and remembers durably how far an exporter has come.

    follower = SegmentFollower(segments, state_file)
    for segment in follower.waiting():
        for rank_block in follower.read(segment): ...
        follower.done(segment)                      # from now on, also after a restart, this is not read again

The store is the buffer: a server may be away for as long as the store lasts. What is read between two `done` is read
again after a crash, so whatever is sent must be the same when it is sent twice. That includes which modules a rank
shows, so the rank's series are remembered here too: an agent that was restarted may not know them from a journal.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trainermon.core.errors import StoreError
from trainermon.core.journal import Header
from trainermon.core.values import STATISTICS, Kind, Placement, SeriesKey, StatBlock
from trainermon.exporters.store.blocks import read_segment_blocks
from trainermon.exporters.store.segments import SegmentFile, cover, read_metadata

FORMAT_VERSION = 1

_log = logging.getLogger(__name__)

Integers: TypeAlias = npt.NDArray[np.int64]

_COUNT = STATISTICS.index("count")


class StoredSeries(NamedTuple):
    """One series of a rank: its key, how many elements it has, and its placement as far as the store has it."""

    key: SeriesKey
    num_elements: int
    placement: Placement


class RankBlock(NamedTuple):
    """One step of one rank: the header tells attempt and coordinates, `block.series` are places in the rank's table."""

    header: Header
    block: StatBlock


@dataclasses.dataclass(slots=True)
class _SeriesTable:
    """The series of a rank in the order in which they were first seen."""

    rows: list[StoredSeries] = dataclasses.field(default_factory=list)
    places: dict[SeriesKey, int] = dataclasses.field(default_factory=dict)

    def add(self, row: StoredSeries) -> int:
        """Return the place of a series, which is added if it is new."""
        place = self.places.setdefault(row.key, len(self.rows))
        if place == len(self.rows):
            self.rows.append(row)
        return place


class SegmentFollower:
    """Lists the segments of one directory that were not processed yet, and remembers in a file which were.

    A lock keeps other processes from using the same file.

    Args:
        directory: The segments of one node.
        state: File that holds what was done; written by rename, synced.

    Raises:
        StoreError: The state file cannot be read, is of another version, or another process uses it.
    """

    def __init__(self, directory: Path, state: Path) -> None:
        self._directory = directory
        self._state = state
        self._last = 0
        self._newest: dict[int, tuple[int, int]] = {}  # by rank, attempt and step of the last block
        self._tables: dict[int, _SeriesTable] = {}
        self._reading: dict[int, tuple[int, int]] = {}  # what `read` returned last
        self._lock = _locked(state.with_suffix(".lock"))
        try:
            self._load()
        except StoreError:
            self.close()
            raise

    @property
    def num_ranks(self) -> int:
        """Number of ranks that segments have had so far."""
        return len(self._tables)

    def waiting(self) -> list[SegmentFile]:
        """Return the committed segments that are not done yet, oldest first."""
        return [segment for segment in cover(self._directory) if segment.last > self._last]

    def waiting_bytes(self) -> int:
        """Return the size in bytes of the segments that are not done."""
        return sum(_size(segment.path) for segment in self.waiting())

    def table(self, rank: int) -> list[StoredSeries]:
        """Return the series of a rank that are known, including those of the segment that was read last."""
        return self._tables[rank].rows

    def read(self, segment: SegmentFile) -> list[RankBlock]:
        """Return the blocks (steps of ranks) in a segment that are not done, in order of attempt, step and rank.

        A merge may have put rows that are done and rows that are not into one segment: those that are done are left out
        by their step.

        Raises:
            StoreError: It cannot be read; it may have been merged into another one since it was listed.
        """
        blocks = [
            RankBlock(header, block)
            for header, block in read_segment_blocks(segment.path, read_metadata(segment.path))
            if segment.first > self._last or not self._is_done(header, block)
        ]
        places = self._enter(blocks)
        self._reading = {header.coordinates.rank: (header.attempt, block.step) for header, block in blocks}
        return [
            RankBlock(header, dataclasses.replace(block, series=places[header.coordinates.rank][block.series]))
            for header, block in blocks
        ]

    def done(self, segment: SegmentFile) -> None:
        """Mark `segment`, which was read last, as done, so that it is never returned again.

        Raises:
            StoreError: That cannot be written; after a restart the segment is read again.
        """
        self._last = segment.last
        self._newest |= self._reading
        self._save()

    def close(self) -> None:
        """Release the lock on the state file, so that other processes can use it."""
        os.close(self._lock)

    def _is_done(self, header: Header, block: StatBlock) -> bool:
        return (header.attempt, block.step) <= self._newest.get(header.coordinates.rank, (-1, -1))

    def _enter(self, blocks: Sequence[RankBlock]) -> dict[int, Integers]:
        """Enter the series of the blocks into the ranks' tables; return, by rank, the place of each series' number."""
        places: dict[int, Integers] = {}
        counts: dict[int, Integers] = {}  # elements of each series; -1: the rank does not have it
        for header, block in blocks:
            of_rank = counts.setdefault(header.coordinates.rank, np.full(len(header.series), -1))
            of_rank[block.series] = np.asarray(block.values)[_COUNT]
        headers = {header.coordinates.rank: header for header, _ in blocks}
        for rank, header in headers.items():
            numbers = np.flatnonzero(counts[rank] >= 0).tolist()
            table = self._tables.setdefault(rank, _SeriesTable())
            places[rank] = np.full(len(header.series), -1)
            for number in sorted(numbers, key=lambda number: _order(header.series[number])):
                placement = header.placements[number]
                assert placement is not None  # of a segment
                places[rank][number] = table.add(
                    StoredSeries(header.series[number], int(counts[rank][number]), placement)
                )
        return places

    def _load(self) -> None:
        try:
            plain = json.loads(self._state.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise StoreError(f"{self._state} cannot be read: {error}; remove it to send everything again") from error
        try:
            self._restore(plain)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"{self._state}: {error!r}; remove it to send everything again") from error

    def _restore(self, plain: Mapping[str, Any]) -> None:
        if plain["format"] != FORMAT_VERSION:
            raise ValueError(f"found format {plain['format']}, expected {FORMAT_VERSION}")
        self._last = int(plain["last"])
        self._newest = {int(rank): (int(attempt), int(step)) for rank, (attempt, step) in plain["newest"].items()}
        for rank, rows in plain["tables"].items():
            table = self._tables[int(rank)] = _SeriesTable()
            for row in rows:
                table.add(_row(row))

    def _save(self) -> None:
        plain: Mapping[str, Any] = {
            "format": FORMAT_VERSION,
            "last": self._last,
            "newest": self._newest,
            "tables": {rank: [_plain(row) for row in table.rows] for rank, table in self._tables.items()},
        }
        unfinished = self._state.with_name(f".{self._state.name}.tmp")
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(plain, file)
                file.flush()
                os.fsync(descriptor)
            unfinished.replace(self._state)
        except OSError as error:
            raise StoreError(f"{self._state} cannot be written: {error}") from error


def state_file(node_dir: Path, name: str) -> Path:
    """Return the path of the file in which the exporter `name` notes how far it has come."""
    return node_dir / f"{name}.state.json"


def forget(node_dir: Path, name: str) -> None:
    """Delete the notes of the exporter `name` on how far it has come, so that it begins again with the first segment.

    Raises:
        StoreError: Another process is at it.
    """
    state = state_file(node_dir, name)
    lock = _locked(state.with_suffix(".lock"))
    state.unlink(missing_ok=True)
    os.close(lock)


def _order(key: SeriesKey) -> tuple[Any, ...]:
    """Sort key: the order in a segment is nobody's choice, and the same table must come of reading it again."""
    micro_step = -1 if key.micro_step is None else key.micro_step
    return key.kind.value, key.name, key.slot, key.call, micro_step, key.stage


def _locked(path: Path) -> int:
    """Return a descriptor of the file, locked until it is closed. POSIX locks work on most cluster file systems."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}") from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:  # which of them is the system's choice
        os.close(descriptor)
        raise StoreError(f"{path} is locked: another process, probably the run's agent, is sending this run") from error
    except OSError as error:  # a file system without locks
        _log.warning("%s cannot be locked (%s): do not send this run by hand while its agent is at it", path, error)
    return descriptor


def _plain(row: StoredSeries) -> list[Any]:
    key = row.key
    identity = [key.kind.value, key.name, key.slot, key.call, key.micro_step, key.stage]
    at = row.placement
    return [*identity, row.num_elements, at.in_global_norm, at.dtype, at.shape, at.scale]


def _row(plain: list[Any]) -> StoredSeries:
    kind, name, slot, call, micro_step, stage, num_elements, in_global_norm, *rest = plain
    dtype, shape, scale = rest or ("", (), 1.0)  # earlier versions did not say
    placement = Placement(dtype=dtype, shape=tuple(shape), in_global_norm=in_global_norm, scale=scale)
    return StoredSeries(SeriesKey(Kind(kind), name, slot, call, micro_step, stage), num_elements, placement)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # merged into another one since it was listed
        return 0
