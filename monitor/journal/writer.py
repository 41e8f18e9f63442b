"""The rank's side of the journal: one system call per record, and never an exception into the training step.

There is no thread, no fsync and no lock. What cannot be written is skipped and counted.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.monitor.journal import frames
from trainermon.monitor.journal.files import file_path, list_files, next_number
from trainermon.monitor.journal.frames import Cursor, Header
from trainermon.monitor.spool import unusable
from trainermon.monitor.values import Placement, SeriesKey, StatBlock

logger = logging.getLogger(__name__)

# After a write that took t seconds nothing is written for 20 t, so a disk that stays slow costs at most 5 % of the
# time.
_PAUSE_RATIO = 20


class JournalWriter:
    """Appends records to the journal of the rank named in `header`; begins a new file, numbered above all others.

    A record that meets an error (full disk, short write, ...) is skipped and counted, and the next one goes to a new
    file. After a write that took longer than `slow_write_s`, records are skipped for 20 times as long as it took. A
    forked child writes nothing. Files are 0600; a file ends at `file_bytes`, and the oldest ones are removed where all
    would exceed `budget_bytes`.

    Attributes:
        skipped: Records that were not written.
        dropped_files: Files removed for the budget, read or not.
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
    ) -> None:
        self.skipped = 0
        self.dropped_files = 0
        self.bytes_written = 0
        self._directory = directory
        self._rank = header.coordinates.rank
        self._file_bytes = min(file_bytes, budget_bytes // 2)
        self._budget_bytes = budget_bytes
        self._slow_write_s = slow_write_s
        self._clock = clock
        self._pid = os.getpid()
        self._header_start = frames.encode_header_start(header)
        self._table = bytearray(frames.encode_series(header.series, header.placements))
        self._num_series = len(header.series)
        self._sequence = 0
        self._resume_s = -float("inf")
        self._descriptor = -1
        self._size = self._num_records = 0
        self._number = next_number(list_files(directory, self._rank)) - 1
        try:
            self._open_next()
        except OSError as error:
            raise unusable(file_path(directory, self._rank, self._number), error) from error

    @property
    def cursor(self) -> Cursor:
        """Position after the last record that was written."""
        return Cursor(self._number, self._size)

    def add_series(self, keys: Sequence[SeriesKey], placements: Sequence[Placement | None]) -> int:
        """The series are in the table of this and of every later file; return the id of the first one."""
        first_id = self._num_series
        rows = frames.encode_series(keys, placements)
        self._table += b"," + rows if self._table and rows else rows
        self._num_series += len(keys)
        if not self._append(frames.SERIES, [b'{"first_id": %d, "series": [' % first_id, rows, b"]}"]):
            self._abandon()  # blocks with the new ids may only follow in a file whose header has them
        return first_id

    def append_block(self, block: StatBlock) -> bool:
        """Write the rows of one step; return False if they were skipped.

        Raises:
            ValueError: The block's arrays are not contiguous or do not belong together.
        """
        return self._append(frames.BLOCK, frames.encode_block(block))

    def append_event(self, event: Mapping[str, Any]) -> bool:
        """Write an event as JSON, where non-finite numbers are text; return False if it was skipped."""
        return self._append(frames.EVENT, [frames.encode_event(event)])

    def close(self) -> None:
        """Write the end and close the file; without effect in a forked child, and when called again."""
        if self._pid != os.getpid():
            return
        self._append(frames.END, [])
        self._abandon()
        self._pid = -1

    def _append(self, frame_type: int, buffers: list[Any]) -> bool:
        if self._pid != os.getpid():
            return False
        head = frames.encode_head(frame_type, self._sequence, buffers)
        self._sequence += frame_type != frames.END
        try:
            written = self._clock() >= self._resume_s and self._write_record([head, *buffers])
        except OSError as error:
            written = False
            reason = str(error)
            self._abandon()
        else:
            reason = f"the spool was slow; nothing is written for {self._resume_s - self._clock():.1f} s"
        if not written:
            self.skipped += 1
            if self.skipped.bit_count() == 1:  # 1st, 2nd, 4th, 8th ... so that a long trouble does not fill the log
                logger.warning("journal of rank %d: %d records skipped: %s", self._rank, self.skipped, reason)
        return written

    def _write_record(self, buffers: list[Any]) -> bool:
        length = sum(memoryview(buffer).nbytes for buffer in buffers)
        if self._descriptor < 0 or (self._size + length > self._file_bytes and self._num_records):
            self._open_next()
            if self._clock() < self._resume_s:
                return False
        self._write(buffers, length)
        self._num_records += 1
        return True

    def _write(self, buffers: list[Any], length: int) -> None:
        begin_s = self._clock()
        try:
            written = os.writev(self._descriptor, buffers)
        finally:
            end_s = self._clock()
            if end_s - begin_s > self._slow_write_s:
                self._resume_s = end_s + _PAUSE_RATIO * (end_s - begin_s)
        if written != length:
            raise OSError(errno.ENOSPC, f"{written} of {length} bytes written")
        self._size += length
        self.bytes_written += length

    def _open_next(self) -> None:
        """A new file with a header is open; the one before it is finished for ever."""
        self._abandon()
        self._number += 1
        path = file_path(self._directory, self._rank, self._number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._size = self._num_records = 0
        payload = [self._header_start, self._table, b"]}"]
        head = frames.encode_head(frames.HEADER, self._sequence, payload)
        try:
            self._write([head, *payload], sum(map(len, payload)) + len(head))
        except OSError:
            self._abandon()
            path.unlink(missing_ok=True)  # without a header nothing can follow in it
            raise
        self._keep_budget()

    def _keep_budget(self) -> None:
        sizes: dict[Path, int] = {}
        for number in list_files(self._directory, self._rank)[:-1]:
            path = file_path(self._directory, self._rank, number)
            try:
                sizes[path] = path.stat().st_size
            except FileNotFoundError:  # the agent has just removed it
                continue
        total = sum(sizes.values()) + self._file_bytes
        for path, size in sizes.items():
            if total <= self._budget_bytes:
                break
            path.unlink(missing_ok=True)
            self.dropped_files += 1
            total -= size

    def _abandon(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
