"""Names, numbers and removal of journal files.

A rank's files are numbered upwards without gaps over all attempts. The first number in an empty spool is the Unix time
in milliseconds times a million: a run that is resumed on this node after its spool was removed does not use a number
again that a stored cursor knows. (In seconds it might: an attempt is over, stored and followed by the next in one.)
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from trainermon.core.journal.frames import Cursor
from trainermon.core.spool import rank_path

NUMBERING_STEP = 1_000_000


def file_path(directory: Path, rank: int, number: int) -> Path:
    """Return the path of a rank's journal file."""
    return rank_path(directory, rank, f"{number}.jnl")


def list_files(directory: Path, rank: int) -> list[int]:
    """Return the numbers of the rank's journal files, ascending; empty if there is no directory. Cost: one listing."""
    prefix = rank_path(directory, rank, "").name
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    middles = (name[len(prefix) : -4] for name in names if name.startswith(prefix) and name.endswith(".jnl"))
    return sorted(int(middle) for middle in middles if middle.isdecimal())


def next_number(existing: list[int]) -> int:
    """Return the number of the file that follows `existing`."""
    return existing[-1] + 1 if existing else time.time_ns() // 1_000_000 * NUMBERING_STEP


def num_between(first: int, last: int) -> int:
    """Return how many journal files there were from number `first` up to, but without, `last`.

    If the spool was emptied in between, which begins a new count, only those of the new count.
    """
    return last - first if same_numbering(first, last) else last % NUMBERING_STEP


def same_numbering(first: int, second: int) -> bool:
    """Return whether two file numbers come from one count, which begins anew when the spool was emptied."""
    return first // NUMBERING_STEP == second // NUMBERING_STEP


def remove_before(directory: Path, rank: int, cursor: Cursor) -> int:
    """Remove the rank's files that end before `cursor`, whose records are stored elsewhere; return their number.

    The newest file always stays, so that numbers go on.
    """
    finished = [number for number in list_files(directory, rank)[:-1] if number < cursor.file]
    for number in finished:
        file_path(directory, rank, number).unlink(missing_ok=True)
    return len(finished)


class JournalFiles:
    """The files of one rank's journal, seen by its writer: the next one, and how many of the old ones stay.

    Args:
        directory: The run's directory in the spool.
        rank: Whose journal.
        file_bytes: A file ends before them, unless a single record is larger.
        budget_bytes: All files together stay below them.

    Attributes:
        num_dropped: Files removed for the budget, read or not.
    """

    def __init__(self, directory: Path, rank: int, *, file_bytes: int, budget_bytes: int) -> None:
        self.rank = rank
        self.file_bytes = file_bytes
        self.num_dropped = 0
        self._directory = directory
        self._budget_bytes = budget_bytes

    def next_file(self) -> tuple[int, Path]:
        """Return number and path of the file that comes after all others."""
        number = next_number(list_files(self._directory, self.rank))
        return number, file_path(self._directory, self.rank, number)

    def keep_budget(self) -> None:
        """Remove the oldest files of the rank's journal until the next one, when full, fits the budget too."""
        older = list_files(self._directory, self.rank)[:-1]
        sizes = {path: _size(path) for path in (file_path(self._directory, self.rank, number) for number in older)}
        excess = sum(sizes.values()) + self.file_bytes - self._budget_bytes
        for path, size in sizes.items():
            if excess <= 0:
                break
            with contextlib.suppress(OSError):  # the agent has just removed it
                path.unlink()
                self.num_dropped += 1
            excess -= size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # the agent has just removed it
        return 0
