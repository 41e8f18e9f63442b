"""Writes what was gathered as segments in the worker's thread: one commit at a time, repeated until it succeeds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path

from trainermon.core.errors import StoreError
from trainermon.core.journal import Header, remove_before
from trainermon.core.values import StatBlock
from trainermon.exporters.store.segments import JournalPosition
from trainermon.exporters.store.store import SegmentBatch, SegmentWriter, SetAside

RETRY_S = 5.0

_log = logging.getLogger(__name__)


class SegmentCommits:
    """Gathers rows of statistics, and commits them as the next segment (a Parquet file of the store).

    All methods belong to one thread; none waits for the file system.

    Args:
        spool: Whose journal files are removed once they are stored.
        directory: Folder of the segments.
        executor: Writes them; one job at a time.
        clock: Monotonic seconds.

    Attributes:
        num_done: Segments committed.
        error: Why the last commit failed, '' if it did not; it is repeated every few seconds until it succeeds.
        positions: By rank, the position up to which its journal is committed.

    Raises:
        StoreError: The directory cannot be used, or its newest segment not be read.
    """

    def __init__(self, spool: Path, directory: Path, *, executor: Executor, clock: Callable[[], float]) -> None:
        self._writer = SegmentWriter(directory)
        self.num_done = 0
        self.error = ""
        self.positions = _positions_of(self._writer)
        self._spool = spool
        self._executor = executor
        self._clock = clock
        self._batch: SegmentBatch | None = None
        self._job: Future[Path] | None = None
        self._retry_s = 0.0

    @property
    def num_rows(self) -> int:
        """Number of rows gathered for the next commit."""
        return self._writer.num_rows

    @property
    def size_bytes(self) -> int:
        """Size of the rows gathered for the next commit."""
        return self._writer.size_bytes

    @property
    def set_aside(self) -> SetAside:
        """Counts of the rows and segments missing in the store because they could not be stored or read again."""
        return self._writer.set_aside

    @property
    def is_pending(self) -> bool:
        """Whether a commit is running or waits to be repeated."""
        return self._batch is not None

    def add(self, header: Header, block: StatBlock) -> None:
        """Gather the rows of one block (one step of one rank), whose series `header` describes, for the next commit."""
        self._writer.add(header, header.series, block)

    def begin(self, positions: Mapping[int, JournalPosition]) -> None:
        """Start to write the gathered rows as a segment in the background; none may be pending.

        `positions` are, by rank, the journal positions that the rows reach; they are stored with them.
        """
        self._batch = self._writer.seal(positions)
        self._submit()

    def poll(self) -> None:
        """Note whether the running commit has ended, and repeat one that failed, after a while; never waits."""
        if self._batch and self._job is None and self._clock() >= self._retry_s:
            self._submit()
        if self._batch is None or self._job is None or not self._job.done():
            return
        finished, self._job = self._job, None
        error = finished.exception()
        if error is None:
            self.positions = _positions_of(self._batch)
            self._batch = None
            self.num_done += 1
        else:
            self._retry_s = self._clock() + RETRY_S
            if not self.error:
                unexpected = None if isinstance(error, StoreError) else error
                _log.error("%s; it is tried again every %g s", error, RETRY_S, exc_info=unexpected)
        self.error = "" if error is None else str(error) or type(error).__name__

    def _submit(self) -> None:
        if self._batch:
            self._job = self._executor.submit(commit, self._batch, self._spool)


def commit(batch: SegmentBatch, spool: Path) -> Path:
    """Write the segment (one Parquet file) and return its path.

    Then remove the journal files in `spool` that it has stored. It runs in the worker's thread.

    Raises:
        StoreError: The segment could not be written; nothing was removed.
    """
    path = batch.write()
    try:
        for rank, position in batch.metadata.positions.items():
            remove_before(spool, rank, position.cursor)
    except OSError as error:  # the next commit tries again; the records are stored, and will not be read twice
        _log.warning("finished journals could not be removed from %s: %s", spool, error)
    return path


def _positions_of(source: SegmentWriter | SegmentBatch) -> dict[int, JournalPosition]:
    return dict(source.metadata.positions)
