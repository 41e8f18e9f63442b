"""Keeps the process that reads the accelerators running, and takes what it says without ever waiting for it.

A driver that hangs leaves its process where no signal reaches it. So nothing here waits for that process: after a
deadline it is killed, left alone, and tried again later, a few times.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence

from trainermon.agent.accelerators.readings import AcceleratorSample, decode

MODULE = "trainermon.agent.accelerators.read_process"
DEADLINE_S = 30.0
RETRY_S = 300.0
MAX_STARTS = 5
END_LIMIT_S = 1.0
MAX_LINE_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class AcceleratorWatch:
    """Starts the process that asks one kind of driver, and collects its samples.

    Args:
        reader: Its name in `read_process.READERS`.
        every_s: Seconds between two readings.
    """

    def __init__(self, reader: str, every_s: float) -> None:
        self._command = [sys.executable, "-m", MODULE, reader, "--every", str(every_s)]
        self._limit_s = DEADLINE_S + every_s
        self._process: subprocess.Popen[bytes] | None = None
        self._left: list[subprocess.Popen[bytes]] = []
        self._rest = b""
        self._num_starts = 0
        self._has_read = False
        self._due_s = 0.0
        self._heard_s = 0.0

    @property
    def is_given_up(self) -> bool:
        """Whether no more samples will come."""
        return self._num_starts >= MAX_STARTS and self._process is None

    def poll(self, now_s: float) -> Sequence[AcceleratorSample]:
        """Return the samples that have come since the last call; never waits. `now_s` is monotonic.

        Costs a system call; the readings of eight accelerators some 0.1 ms.
        """
        self._left = [process for process in self._left if process.poll() is None]
        if self._process is None:
            if self.is_given_up or now_s < self._due_s:
                return ()
            self._start(now_s)
        samples = self._take()
        if samples:
            self._heard_s = now_s
        problem = "".join(sample.problem for sample in samples[-1:])
        self._has_read |= any(not sample.problem for sample in samples)
        if problem and not self._has_read:
            self._give_up(problem)
        elif problem:
            self._end(now_s, f"ended: {problem}")
        elif self._process is not None and self._process.poll() is not None:
            self._end(now_s, f"ended with status {self._process.returncode}")
        elif now_s - self._heard_s > self._limit_s:
            self._end(now_s, f"has said nothing for {self._limit_s:.0f} s: the driver does not answer")
        return [sample for sample in samples if not sample.problem]

    def close(self) -> None:
        """Have the process end; waits a second for it at most."""
        self._stop()
        self._num_starts = MAX_STARTS
        for process in self._left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_LIMIT_S)
        self._left.clear()

    def _start(self, now_s: float) -> None:
        self._num_starts += 1
        self._heard_s = now_s
        self._rest = b""
        try:
            self._process = subprocess.Popen(  # noqa: S603  (our own module)
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            self._end(now_s, f"could not be started: {error}")
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _take(self) -> list[AcceleratorSample]:
        if self._process is None or self._process.stdout is None:
            return []
        try:
            self._rest += os.read(self._process.stdout.fileno(), MAX_LINE_BYTES)
        except BlockingIOError:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        self._rest = self._rest[-MAX_LINE_BYTES:]
        samples = []
        for line in lines:
            with contextlib.suppress(ValueError):  # a driver's library may print what it likes
                samples.append(decode(line.decode(errors="replace")))
        return samples

    def _end(self, now_s: float, why: str) -> None:
        self._stop()
        self._due_s = now_s + RETRY_S
        after = "it is not tried again" if self.is_given_up else f"it is tried again after {RETRY_S:.0f} s"
        _log.warning("the process that reads the accelerators %s; %s", why, after)

    def _give_up(self, why: str) -> None:
        self._stop()
        self._num_starts = MAX_STARTS
        _log.info("accelerators are not read: %s", why)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(OSError):
            process.kill()
        if process.poll() is None:
            self._left.append(process)
