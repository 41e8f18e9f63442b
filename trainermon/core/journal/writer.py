"""The rank's side of the journal: one system call per record, and never an exception into the training step.

There is no fsync and no lock. What cannot be written is skipped and counted.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainermon.core.events import RankEvent
from trainermon.core.journal import frames
from trainermon.core.journal.files import JournalFiles
from trainermon.core.journal.frames import BlockFrame, Cursor, Header
from trainermon.core.journal.spool_thread import SpoolThread
from trainermon.core.spool import rank_path, unusable
from trainermon.core.values import Placement, SeriesKey, StatBlock

logger = logging.getLogger(__name__)

# After a record that took t seconds nothing is written for 20 t: a disk that stays slow costs at most 5 % of the time.
PAUSE_RATIO = 20
LOOK_S = 0.02
"""A writer looks whether its file is still there no more often than this: the call takes as long as writing does."""


class WritePause:
    """Tells the journal's writer until when to write nothing, after a record that took longer than `slow_s` seconds.

    Attributes:
        now_s: The clock.
        end_s: When the pause ends, on that clock.
    """

    def __init__(self, slow_s: float, clock: Callable[[], float]) -> None:
        self.now_s = clock
        self.end_s = -math.inf
        self._slow_s = slow_s

    def begin_if_slow(self, begin_s: float) -> None:
        """Begin a pause if the write that began at `begin_s` and ends now was slow."""
        end_s = self.now_s()
        if end_s - begin_s > self._slow_s:
            self.end_s = end_s + PAUSE_RATIO * (end_s - begin_s)


class JournalWriter:
    """Appends records to the journal of the rank named in `header`; begins a new file, numbered above all others.

    A record that meets an error (full disk, short write, ...) is skipped and counted, and the next one goes to a new
    file. That somebody has removed the file is such an error, which is looked for every 20 ms at most. After a record
    that took longer than `slow_write_s`, rotation included, records are skipped for 20 times as long as it took. A
    forked child writes nothing. Files are 0600; one ends before `file_bytes` (unless a single record is larger), and
    the oldest ones are removed where all together would exceed `budget_bytes`.

    With a `thread` all files but the first are written there: a record that it takes counts as written until it is
    skipped, a slow disk makes no pause, and what the thread cannot take is skipped.

    Attributes:
        bytes_written: Bytes of whole frames written, series tables included.

    Raises:
        SpoolError: The first file cannot be written.
    """

    def __init__(  # noqa: PLR0913  (limits of one journal, each with a default)
        self,
        directory: Path,
        header: Header,
        *,
        file_bytes: int = 64 << 20,
        budget_bytes: int = 512 << 20,
        slow_write_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        thread: SpoolThread | None = None,
    ) -> None:
        self.bytes_written = 0
        self._num_failed = self._num_not_taken = 0  # one number for each thread, so that none is lost
        self._thread = thread
        self._files = JournalFiles(
            directory, header.coordinates.rank, file_bytes=min(file_bytes, budget_bytes // 2), budget_bytes=budget_bytes
        )
        self._pause = WritePause(slow_write_s if thread is None else math.inf, clock)
        self._is_own = True
        _writers.add(self)
        self._header_start = frames.encode_header_start(header)
        self._table = bytearray(frames.encode_series(header.series, header.placements))
        self._num_series = len(header.series)
        self._sequence = 0  # number of the next record, skipped ones included: readers see every gap
        self._descriptor = -1
        self._file_number = self._offset = 0
        self._has_records = False
        self._looked_s = -math.inf
        try:
            self._open_next(self._sequence)
        except OSError as error:
            raise unusable(rank_path(directory, header.coordinates.rank, "*.jnl"), error) from error

    @property
    def cursor(self) -> Cursor:
        """Position in the journal behind the last record that was written."""
        return Cursor(self._file_number, self._offset)

    @property
    def skipped(self) -> int:
        """Records that were not written."""
        return self._num_failed + self._num_not_taken

    @property
    def dropped_files(self) -> int:
        """Files removed for the budget, read or not."""
        return self._files.num_dropped

    def add_series(self, keys: Sequence[SeriesKey], placements: Sequence[Placement | None]) -> int:
        """Add series to the table of this and of every later file; return the id of the first one."""
        first_id = self._num_series
        rows = frames.encode_series(keys, placements)
        self._append(frames.SERIES, [b'{"first_id": %d, "series": [' % first_id, rows, b"]}"], rows)
        self._num_series += len(keys)
        return first_id

    def append_block(self, block: StatBlock, frame: BlockFrame | None = None) -> bool:
        """Write the rows of one step; return False if they were skipped.

        Args:
            block: The rows.
            frame: Where they lie, ready to be written; only for a block without histograms.

        Raises:
            ValueError: The arrays of the block or of its histograms are not contiguous or do not belong together.
        """
        if frame is not None:
            frame.step, frame.time_s = block.step, block.time_s
            return self._append(frames.BLOCK, frame)
        if block.histograms is None:
            return self._append(frames.BLOCK, frames.encode_block(block))
        return self._append(
            frames.COUNTED_BLOCK, [*frames.encode_block(block), *frames.encode_histograms(block.histograms)]
        )

    def append_event(self, event: RankEvent) -> bool:
        """Write an event as JSON, where non-finite numbers are text; return False if it was skipped."""
        return self._append(frames.EVENT, [frames.encode_event(event)])

    def close(self) -> None:
        """Write the end and close the file; may be called again. A forked child only closes its own descriptor."""
        self._append(frames.END, [])
        if self._thread is None:
            self._abandon()
        else:  # it may be writing, and the number of a closed file goes to the next that is opened
            self._thread.take(self._abandon)
        self._is_own = False

    def leave_to_parent(self) -> None:
        """Write nothing any more, in a forked child."""
        self._is_own, self._thread = False, None

    def _append(self, frame_type: int, payload: list[Any] | BlockFrame, rows: bytes = b"") -> bool:
        """Write a record, or hand it over; `rows` are in the series table from then on, even if it is skipped."""
        if not self._is_own:
            return False
        number = self._sequence
        self._sequence += frame_type != frames.END
        if isinstance(payload, BlockFrame):
            frame: list[Any] = [payload.sealed(number)]
            length = len(payload.memory)
        else:
            frame, length = frames.encode_frame(frame_type, number, payload)
        if self._thread is None:
            return self._try_record(number, frame, length, rows)
        # A copy: the memory of the rows is used again. What readers need to understand others is always taken.
        work = partial(self._try_record, number, [b"".join(frame)], length, rows)
        is_taken = self._thread.take(work, 0 if frame_type in (frames.SERIES, frames.END) else length)
        if not is_taken:
            self._num_not_taken += 1
            self._tell_skipped("the disk of the spool hangs, or is slower than what is to be written")
        return is_taken

    def _try_record(self, number: int, frame: list[Any], length: int, rows: bytes) -> bool:
        begin_s = self._pause.now_s()
        trouble = ""
        if begin_s < self._pause.end_s:
            trouble = f"the spool was slow; the next record is tried in {self._pause.end_s - begin_s:.1f} s"
        else:
            try:
                self._write_record(number, frame, length, begin_s)
            except OSError as error:
                self._abandon()
                trouble = str(error)
            self._pause.begin_if_slow(begin_s)
        if trouble:
            self._num_failed += 1
            self._tell_skipped(trouble)
        if rows:
            if trouble:
                self._abandon()  # blocks with the new ids may only follow in a file whose header has them
            self._table += b"," + rows if self._table else rows
        return not trouble

    def _write_record(self, number: int, frame: list[Any], length: int, now_s: float) -> None:
        is_full = self._has_records and self._offset + length > self._files.file_bytes
        if self._descriptor < 0 or is_full:
            self._open_next(number)
        _write(self._descriptor, frame, length)
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look()
        self._offset += length
        self._has_records = True
        self.bytes_written += length

    def _look(self) -> None:
        """Raise an error if the file that was written to is gone."""
        if not os.fstat(self._descriptor).st_nlink:
            raise FileNotFoundError(
                errno.ENOENT, "somebody removed the file from the spool, with all that was not read"
            )

    def _open_next(self, number_of_record: int) -> None:
        """A new file with a header is open; the one before it is finished for ever."""
        self._abandon()
        number, path = self._files.next_file()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        content = [self._header_start, self._table, b"]}"]
        header, length = frames.encode_frame(frames.HEADER, number_of_record, content)
        try:
            _write(self._descriptor, header, length)
        except OSError:
            self._abandon()
            path.unlink(missing_ok=True)  # nothing can follow in it, and the number goes to the next try
            raise
        self._file_number, self._offset = number, length
        self._has_records = False
        self.bytes_written += length
        self._files.keep_budget()

    def _tell_skipped(self, trouble: str) -> None:
        if self.skipped.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...: a long trouble must not fill the log
            logger.warning("journal of rank %d: %d records skipped: %s", self._files.rank, self.skipped, trouble)

    def _abandon(self) -> None:
        """No record is written to the present file any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


# A child shares the descriptor, so it would write in its parent's name. To ask for the pid at each record is a call.
_writers: weakref.WeakSet[JournalWriter] = weakref.WeakSet()


def _silence_writers_in_child() -> None:
    for writer in list(_writers):
        writer.leave_to_parent()


os.register_at_fork(after_in_child=_silence_writers_in_child)


def _write(descriptor: int, frame: list[Any], length: int) -> None:
    written = os.writev(descriptor, frame)
    if written != length:
        raise OSError(errno.ENOSPC, f"only {written} of {length} bytes could be written")
