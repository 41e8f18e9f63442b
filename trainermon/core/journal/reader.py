"""The agent's side of the journal: follows one rank's files while they are written, from any cursor.

Damage is skipped and counted, never raised. A file is finished exactly when a higher number exists (or it was
removed), so an incomplete frame at its end is torn then; in the newest file it is only not there yet.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

from trainermon.core.errors import JournalError
from trainermon.core.journal import frames
from trainermon.core.journal.files import file_path, list_files, num_between, same_numbering
from trainermon.core.journal.frames import (
    HEAD_BYTES,
    START,
    BlockRecord,
    Cursor,
    FrameHead,
    Header,
    HeaderRecord,
    Record,
    SeriesRecord,
)
from trainermon.core.journal.names import FolderNames
from trainermon.core.journal.scan import FrameFile

_UNNUMBERED = (frames.HEADER, frames.END)
_LISTING_S = 10.0


class RecordSequence:
    """Checks, while a journal is read, that each record follows the one before: its writer, its number, its series."""

    def __init__(self) -> None:
        self._writer: tuple[int, int, float] | None = None
        self._next: int | None = None  # its number
        self._num_series: int | None = None  # None: this file's header is damaged

    def begin_file(self) -> None:
        """Forget the known series: a file begins, with a header of its own."""
        self._num_series = None

    def pass_by(self, head: FrameHead) -> None:
        """Note the number of a record that was returned before, and is now passed over."""
        self._next = head.sequence + (head.type not in _UNNUMBERED)

    def go_on_from(self, header: Header) -> None:
        """Set writer and series to those of `header`, as of the present position."""
        self._writer = _writer(header)
        self._num_series = len(header.series)

    def follow(self, head: FrameHead, record: Record) -> tuple[bool, int]:
        """Take the next record: return whether it can be used, and how many are lost.

        Lost are those missing before it, and itself if it cannot be used.
        """
        if isinstance(record, HeaderRecord):
            if self._writer != _writer(record.header):
                self._next = 0
            self.go_on_from(record.header)
        expected = head.sequence if self._next is None else self._next
        is_numbered = head.type not in _UNNUMBERED
        if is_numbered and self._num_series is not None and head.sequence < expected:
            return False, 0  # it was there before: a file that was copied, a block of a disk that came back
        self.pass_by(head)
        num_lost = max(0, head.sequence - expected)
        if not self._is_known(record):
            return False, num_lost + is_numbered
        if isinstance(record, SeriesRecord):
            self._num_series = record.first_id + len(record.keys)
        return True, num_lost

    def _is_known(self, record: Record) -> bool:
        """Whether it was said before who wrote the record, and what its ids are."""
        if isinstance(record, HeaderRecord):
            return True
        if self._num_series is None:
            return False
        if isinstance(record, SeriesRecord):
            return record.first_id == self._num_series
        if isinstance(record, BlockRecord):
            series = record.block.series
            return not series.size or int(series.max()) < self._num_series
        return True


class JournalReader:
    """Reads the journal of `rank`, also while it grows: each record after `cursor` once, in the order of writing.

    A HeaderRecord always comes first, and the ids in a block are in the table given so far: where the cursor stands
    inside a file, a HeaderRecord with the table as of there is made up, and a file whose own header is damaged is
    passed over. Where the cursor's file is gone, reading goes on at the oldest one left.

    Args:
        directory: The run's directory in the spool.
        rank: Whose journal.
        cursor: Where to begin.
        window_bytes: So much is read at a time.
        names: Those in `directory`, for whoever reads the journals of many ranks and looks at them before each round of
            `poll`; None: the reader looks itself.

    Attributes:
        cursor: Position after the last record returned; a reader made from it goes on from there.
        lost_files: Files that were removed before they could be read.
        lost_records: Records that the rank wrote or skipped and that are not returned, as far as later ones show it.
        corrupt: Damaged or undecodable places that were skipped.
        torn_tails: Finished files that end inside a frame.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        cursor: Cursor = START,
        *,
        window_bytes: int = 1 << 20,
        names: FolderNames | None = None,
    ) -> None:
        self.cursor = cursor
        self.lost_files = 0
        self.lost_records = 0
        self.corrupt = 0
        self.torn_tails = 0
        self._directory = directory
        self._rank = rank
        self._window_bytes = window_bytes
        self._file: FrameFile | None = None
        self._finished = False
        self._sequence = RecordSequence()
        self._names = names or FolderNames(directory)
        self._looks_itself = names is None
        self._known_names = -1
        self._next_listing_s = 0.0

    def poll(self, max_bytes: int = 32 << 20) -> list[Record]:
        """Return the records written since the last call, up to about `max_bytes` but at least one.

        [] if there are none.

        Raises:
            JournalError: The next frame was written by an incompatible release. The cursor stays before it.
        """
        if self._looks_itself:
            self._names.look()
        if self._is_quiet():
            return []
        records: list[Record] = []
        size = 0
        try:
            while size < max_bytes or not records:
                found = self._next()
                if found is None:
                    break
                records.append(found[0])
                size += found[1]
        except JournalError:
            if not records:  # otherwise the next poll raises it
                raise
        return records

    def close(self) -> None:
        """Close the file that is being read; polling again opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _is_quiet(self) -> bool:
        """Return whether nothing was written and no file has come: so most of all polls find it."""
        if self._file is None or self._finished or self._known_names != self._names.version:
            return False
        return self._file.size() <= self.cursor.offset

    def _next(self) -> tuple[Record, int] | None:
        """Return the next record and its bytes; None if there is none now."""
        while True:
            if self._file is None:
                self._file = self._enter()
                if self._file is None:
                    return None
                try:
                    header = self._header_at_cursor(self._file)
                except JournalError:
                    self.close()
                    raise
                if header is not None:
                    return HeaderRecord(cursor=self.cursor, header=header), 0
            found = self._file.find(self.cursor.offset, finished=self._finished)
            if found is not None:
                taken = self._take(*found)
                if taken is not None:
                    return taken
            elif self._finished:
                self._leave(self._file)
            elif self._is_finished(self._file):
                self._finished = True  # what came between the last look and the new file is read first
            else:
                return None

    def _enter(self) -> FrameFile | None:
        """Open the cursor's file or the first one after it, None if there is none."""
        existing = list_files(self._directory, self._rank)
        if not existing or (existing[-1] < self.cursor.file and same_numbering(existing[-1], self.cursor.file)):
            return None
        number = next((number for number in existing if number >= self.cursor.file), existing[0])
        try:
            file = FrameFile(file_path(self._directory, self._rank, number), self._window_bytes)
        except FileNotFoundError:  # removed since the listing
            return self._enter()
        if number != self.cursor.file:
            self.lost_files += num_between(self.cursor.file, number)
            self.cursor = Cursor(number, 0)
        self._finished = number < existing[-1]
        self._sequence.begin_file()
        return file

    def _header_at_cursor(self, file: FrameFile) -> Header | None:
        """Return the header as of a cursor inside the file; None at its beginning, or if the header is damaged."""
        header: Header | None = None
        offset = 0
        while offset < self.cursor.offset and (found := file.find(offset, finished=True)):
            position, head, payload = found
            offset = position + HEAD_BYTES + head.length
            if head.type in (frames.HEADER, frames.SERIES):
                record = frames.decode_record(head.type, payload, self.cursor)
                if isinstance(record, HeaderRecord):
                    header = record.header
                elif isinstance(record, SeriesRecord) and header and record.first_id == len(header.series):
                    header = _extended(header, record)
            self._sequence.pass_by(head)
        if header is not None:
            self._sequence.go_on_from(header)
        return header

    def _take(self, offset: int, head: FrameHead, payload: bytes) -> tuple[Record, int] | None:
        cursor = Cursor(self.cursor.file, offset + HEAD_BYTES + head.length)
        record = frames.decode_record(head.type, payload, cursor)
        num_bytes = cursor.offset - self.cursor.offset
        self.corrupt += offset > self.cursor.offset
        self.cursor = cursor
        is_sound, num_lost = self._sequence.follow(head, record)
        self.lost_records += num_lost
        self.corrupt += not is_sound
        return (record, num_bytes) if is_sound else None

    def _is_finished(self, file: FrameFile) -> bool:
        """Return whether nobody writes to the file any more; asked whenever there is nothing new, for every rank.

        Numbers have no gaps, so the next one is looked for. Where somebody has removed it, a listing finds those after
        it, within ten seconds: a listing costs as much as the names of all ranks.
        """
        if self._known_names == self._names.version:
            return False
        self._known_names = self._names.version
        if self._has(self.cursor.file + 1) or file.is_removed():
            return True
        now_s = time.monotonic()
        if now_s < self._next_listing_s:
            return False
        self._next_listing_s = now_s + _LISTING_S
        existing = list_files(self._directory, self._rank)
        return bool(existing and existing[-1] > self.cursor.file)

    def _has(self, number: int) -> bool:
        return os.path.lexists(file_path(self._directory, self._rank, number))

    def _leave(self, file: FrameFile) -> None:
        """Go on to the next number; a file that vanished before its first frame leaves its number to a new one."""
        self.torn_tails += self.cursor.offset < file.size()
        if self.cursor.offset or not file.is_removed():
            self.cursor = Cursor(self.cursor.file + 1, 0)
        self.close()


def _writer(header: Header) -> tuple[int, int, float]:
    return header.attempt, header.pid, header.started_s


def _extended(header: Header, record: SeriesRecord) -> Header:
    return dataclasses.replace(
        header, series=header.series + record.keys, placements=header.placements + record.placements
    )
