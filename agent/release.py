"""When the agent may go, and what happens to the spool then."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from trainermon.monitor.launcher import LINGER_FILE
from trainermon.monitor.spool import remove_spool


def linger_s(spool: Path, default_s: float) -> float:
    """Return how long to wait for a restarted job after the last rank has gone.

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


def remove_run_spool(spool: Path) -> bool:
    """Take the spool of a finished run away; return False if a rank is there again.

    `remove_spool` and a starting rank keep each other out by a lock on the directory. It must not be renamed for that:
    a rank that has just begun would write the rest of its files into another directory.
    """
    return remove_spool(spool)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
