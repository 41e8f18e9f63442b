"""`python -m trainermon.agent SPOOL`: the agent of one spool.

With `--detach` the process forks before it imports anything heavy and its parent ends: the agent is then a child of
init (or of a container's PID 1), out of reach of launchers that kill every descendant of a rank.
"""

from __future__ import annotations

import os
import sys


def _leave_family() -> None:
    if "--detach" not in sys.argv[1:]:
        return
    sys.argv.remove("--detach")
    if os.fork():
        os._exit(0)


if __name__ == "__main__":
    _leave_family()
    from trainermon.agent.daemon import run_command_line  # heavy, so only in the process that stays

    sys.exit(run_command_line())
