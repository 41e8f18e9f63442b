"""How a process that is not our child ended: asked of the kernel, in the moment in which it ends.

A pidfd becomes readable when the process ends. Linux 6.15 then tells the exit status through it (PIDFD_GET_INFO);
before that, /proc tells it as long as the parent has not collected it, which launchers do every 100 ms or so.
epoll hands out what became readable in the order in which it did, so that of several ends the first is known.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
from collections.abc import Iterable
from pathlib import Path

from trainermon.agent.hang.evidence import ProcessExit

# struct pidfd_info, version 0: mask, cgroup id, eleven ids, exit code. Source: linux/include/uapi/linux/pidfd.h.
_INFO = struct.Struct("@QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_HAS_EXIT = 1 << 3


class ExitWatch:
    """Watches the processes of ranks until they end; knows how and in which order they ended."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._open: dict[int, tuple[int, int]] = {}  # by descriptor: rank and pid
        self._exits: dict[int, ProcessExit] = {}  # in the order in which they ended
        self._poller = select.epoll()

    def follow(self, rank: int, pid: int) -> None:
        """Watch the process `pid` as that of `rank` from now on; a pid of 0 is ignored."""
        if not pid or self._pids.get(rank) == pid:
            return
        self._pids[rank] = pid
        self._exits.pop(rank, None)
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
            self._open[descriptor] = rank, pid
            self._poller.register(descriptor, select.EPOLLIN)

    def pid(self, rank: int) -> int:
        """Return the process that was last watched as `rank`, 0 if none was."""
        return self._pids.get(rank, 0)

    def poll(self) -> None:
        """Record which processes have ended; one system call. Called late, it may miss an exit status."""
        if not self._open:
            return
        for descriptor, _ in self._poller.poll(0):
            rank, pid = self._open.pop(descriptor)
            self._poller.unregister(descriptor)
            if self._pids.get(rank) == pid:
                self._exits[rank] = read_exit(descriptor, pid)
            os.close(descriptor)

    def exit_of(self, rank: int) -> ProcessExit | None:
        """Return how the process of `rank` ended; None if it has not, or was never watched."""
        return self._exits.get(rank)

    def in_order(self, ranks: Iterable[int]) -> list[int]:
        """Return ranks in the order in which their processes have ended; last those of which that is not known."""
        places = {rank: place for place, rank in enumerate(self._exits)}
        return sorted(ranks, key=lambda rank: (places.get(rank, len(places)), rank))

    def close(self) -> None:
        """Stop watching all processes."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()
        self._poller.close()


def read_exit(descriptor: int, pid: int) -> ProcessExit:
    """Return by which signal or with which status the process of a pidfd (file descriptor of a process) ended.

    Both are None where that cannot be known.
    """
    code = _code_from_pidfd(descriptor)
    if code is None:
        code = _code_of_zombie(pid)
    if code is None:
        return ProcessExit()
    number = os.waitstatus_to_exitcode(code)
    return ProcessExit(signal=-number) if number < 0 else ProcessExit(status=number)


def _code_from_pidfd(descriptor: int) -> int | None:
    answer = bytearray(_INFO.pack(_HAS_EXIT, 0, *[0] * 12))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, answer)
    except OSError:
        return None
    mask, *_, code = _INFO.unpack(answer)
    return code if mask & _HAS_EXIT else None


def _code_of_zombie(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(fields[-1]) if fields[0] in ("Z", "X") else None
    except (OSError, ValueError, IndexError):
        return None
