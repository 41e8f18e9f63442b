"""Finds intact frames in one journal file, whatever else is in it."""

from __future__ import annotations

import os
from pathlib import Path

from trainermon.core.errors import JournalError
from trainermon.core.journal.frames import FORMAT_VERSION, HEAD_BYTES, MAGIC, FrameHead, decode_head
from trainermon.core.native.checksum import crc32


class FrameFile:
    """One journal file, open for reading; it stays readable when it is removed meanwhile.

    Raises:
        FileNotFoundError: It is not there.
    """

    def __init__(self, path: Path, window_bytes: int) -> None:
        self._path = path
        self._window_bytes = max(window_bytes, HEAD_BYTES)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._buffer = b""
        self._begin = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def size(self) -> int:
        """Return the present size in bytes."""
        return os.fstat(self._descriptor).st_size

    def is_removed(self) -> bool:
        """Whether the file was removed, so that nobody writes to it any more."""
        return os.fstat(self._descriptor).st_nlink == 0

    def find(self, offset: int, *, finished: bool) -> tuple[int, FrameHead, bytes] | None:
        """Return position, head and payload of the first intact frame at or after `offset`, None if there is none yet.

        In a file that is not finished a frame that reaches beyond the end is waited for; in a finished one it is
        damage, and the search goes on inside it.

        Raises:
            JournalError: The frame has another format version.
        """
        if offset >= self._begin + len(self._buffer) and offset >= self.size():
            return None  # the common case while a file grows
        while (position := self._find_magic(offset)) is not None:
            head_bytes = self._load(position, HEAD_BYTES)
            head = decode_head(head_bytes)
            if head is not None:
                self._check_version(head, position)
                payload = bytes(self._load(position + HEAD_BYTES, head.length))
                if len(payload) == head.length and crc32(payload) == head.crc:
                    return position, head, payload
            # Looking further would be wrong here: by then the frame may be whole, and others behind it.
            if not finished and (len(head_bytes) < HEAD_BYTES or (head is not None and len(payload) < head.length)):
                return None
            offset = position + 1
        return None

    def _find_magic(self, position: int) -> int | None:
        while True:
            # The common case first: without it, a window would be read for every frame.
            if self._load(position, len(MAGIC)) == MAGIC:
                return position
            window = self._load(position, self._window_bytes)
            index = bytes(window).find(MAGIC)
            if index >= 0:
                return position + index
            if len(window) < self._window_bytes:
                return None
            position += len(window) - len(MAGIC) + 1

    def _load(self, position: int, count: int) -> memoryview:
        """Return `count` bytes at `position`, fewer only where the file ends now."""
        begin = position - self._begin
        if begin < 0 or begin + count > len(self._buffer):
            # A frame may claim 4 GB and be torn after its head: ask for what is there, the buffer is made beforehand.
            wanted = min(max(count, self._window_bytes), max(self.size() - position, 0))
            self._buffer = os.pread(self._descriptor, wanted, position)
            self._begin = position
            begin = 0
        return memoryview(self._buffer)[begin : begin + count]

    def _check_version(self, head: FrameHead, position: int) -> None:
        if head.version != FORMAT_VERSION:
            raise JournalError(
                f"{self._path} has journal format version {head.version} at byte {position}, expected {FORMAT_VERSION}"
                ": the training and the agent run different trainermon releases. Install the same release for both, or "
                "end the old run's processes"
            )
