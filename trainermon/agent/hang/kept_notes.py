"""The notes that ranks keep of their collectives, held open, so that they can be read when the rank is dead.

The notes are memory that ends with the last process that has them open (`core/call_notes.py`).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from trainermon.agent.hang.recorder import read_about
from trainermon.core.call_notes import NOTES_BYTES


class KeptNotes:
    """Holds the notes of the living ranks of `spool` open: one file descriptor per rank."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._open: dict[int, tuple[int, int]] = {}  # by rank: process and descriptor

    def follow(self, rank: int, pid: int) -> None:
        """Open the notes of `rank` in process `pid`, if that has not been done and the process lets itself be read.

        To be called again and again: a rank keeps notes from its first process group on. Until then one small file is
        read.
        """
        kept = self._open.get(rank)
        if not pid or (kept is not None and kept[0] == pid):
            return
        calls = read_about(self._spool, rank).calls
        if calls < 0:
            return
        with contextlib.suppress(OSError):
            descriptor = os.open(f"/proc/{pid}/fd/{calls}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self._forget(rank)
            self._open[rank] = pid, descriptor

    def read(self, rank: int, pid: int) -> bytes:
        """Return the notes of `rank` in process `pid`, which may have ended; empty where they were never opened."""
        kept_pid, descriptor = self._open.get(rank, (0, -1))
        if not pid or kept_pid != pid:
            return b""
        try:
            return os.pread(descriptor, NOTES_BYTES, 0)
        except OSError:
            return b""

    def close(self) -> None:
        """Let go of all notes."""
        for rank in list(self._open):
            self._forget(rank)

    def _forget(self, rank: int) -> None:
        kept = self._open.pop(rank, None)
        if kept is not None:
            os.close(kept[1])
