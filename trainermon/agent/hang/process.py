"""What /proc tells of a rank: whether it runs, waits or is stopped, where in the kernel, and what it has started.

Nothing here reads a file that waits for the process itself, as its command line or memory map would.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

MAX_CHILDREN = 64


class ProcessState(NamedTuple):
    """A process as the Linux kernel shows it in /proc.

    Attributes:
        name: Its name.
        state: A letter: R running, S sleeping, D uninterruptible, T stopped, Z ended.
        wchan: The kernel function in which its main thread waits; "" if it does not.
    """

    name: str
    state: str
    wchan: str


def read_process(pid: int) -> ProcessState | None:
    """Return the state of a process, None if it cannot be seen; a thread that cannot be interrupted decides.

    `wchan` is that of the same thread; which kernel functions there are depends on the kernel.
    """
    main = _read_task(Path(f"/proc/{pid}"))
    if main is None or main.state != "S":
        return main
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return main
    tasks = (_read_task(Path(f"/proc/{pid}/task/{thread}")) for thread in threads)
    return next((task for task in tasks if task and task.state == "D"), main)


def child_pids(pid: int) -> list[int]:
    """Return the ids of the processes that `pid` has started and that have not ended, at most 64."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii")
            found += map(int, text.split())
    except OSError:
        pass
    return sorted(found)[:MAX_CHILDREN]


def handles_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)
    except (OSError, ValueError, IndexError):
        return False


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed on this node for lack of memory; None if it does not tell."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
        return int(text.partition("\noom_kill ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _read_task(folder: Path) -> ProcessState | None:
    try:
        head, _, tail = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        state = tail.split()[0]
    except (OSError, IndexError):
        return None
    try:
        wchan = (folder / "wchan").read_text(encoding="ascii", errors="replace")
    except OSError:
        wchan = ""
    return ProcessState(head.partition("(")[2], state, "" if wchan == "0" else wchan)
