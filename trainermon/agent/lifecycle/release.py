"""When the agent may go, and what happens to the spool then."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from trainermon.core.errors import JournalError
from trainermon.core.journal import START, BlockRecord, JournalReader
from trainermon.core.launcher import LINGER_FILE
from trainermon.core.spool import list_ranks, rank_alive, remove_spool
from trainermon.exporters.store.segments import JournalPosition

GIVE_UP_S = 900.0
"""So long after its last rank an agent goes on trying to store what is left."""


def linger_s(spool: Path, default_s: float) -> float:
    """Return for how many seconds an agent waits for a restarted job after the last rank has gone.

    A `trainermon run` that started this job says so itself: for ever while it lives (infinite), not at all (0) once it
    lets go. Without one, or if it was killed, it is `default_s`.
    """
    try:
        pid = json.loads((spool / LINGER_FILE).read_text(encoding="utf-8"))["hold_pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return default_s
    if pid is None:
        return 0.0
    return math.inf if _is_running(int(pid)) else default_s


def give_up_s(spool: Path, default_s: float) -> float:
    """Return after how many seconds without a rank an agent ends whatever is left; never before it has lingered."""
    return max(GIVE_UP_S, linger_s(spool, default_s))


def num_unstored(spool: Path, stored: Mapping[int, JournalPosition], *, limit_s: float) -> tuple[int, bool]:
    """Return how many steps of ranks lie in the journals behind what is `stored`, and whether all were counted.

    Counting ends after about `limit_s` seconds, and where a journal is of an incompatible release.
    """
    deadline, found = time.monotonic() + limit_s, 0
    for rank in list_ranks(spool):
        position = stored.get(rank)
        reader = JournalReader(spool, rank, position.cursor if position else START)
        try:
            while records := reader.poll():
                found += sum(isinstance(record, BlockRecord) for record in records)
                if time.monotonic() > deadline:
                    return found, False
        except (JournalError, OSError):
            return found, False
        finally:
            reader.close()
    return found, True


def remove_run_spool(spool: Path, stored: Mapping[int, JournalPosition]) -> bool:
    """Remove the spool of a finished run; return False if a rank is or was there again and left records.

    `stored` says, by rank, up to where the journals are stored. `remove_spool` and a starting rank keep each other out
    by a lock on the directory. It must not be renamed for that: a rank that has just begun would write the rest of its
    files into another directory.
    """
    return remove_spool(spool, partial(_is_all_stored, spool, stored))


def is_needed(spool: Path, stored: Mapping[int, JournalPosition]) -> bool:
    """Return whether the spool needs an agent: a rank lives in it, or has left more than what is `stored`.

    `stored` says, by rank, up to where the journals are stored.
    """
    return any(rank_alive(spool, rank) for rank in list_ranks(spool)) or not _is_all_stored(spool, stored)


def _is_all_stored(spool: Path, stored: Mapping[int, JournalPosition]) -> bool:
    """Whether no journal holds a record after its position; a torn frame at its end is none."""
    return not any(_has_more(spool, rank, stored.get(rank)) for rank in list_ranks(spool))


def _has_more(spool: Path, rank: int, position: JournalPosition | None) -> bool:
    start = position.cursor if position else START
    reader = JournalReader(spool, rank, start)
    try:
        # At a position inside a file the reader makes up a header, which stands at the position itself.
        return any(record.cursor != start for record in reader.poll(1))
    except JournalError:  # records of an incompatible release, which somebody else may be able to read
        return True
    finally:
        reader.close()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
