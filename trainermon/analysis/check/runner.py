"""The calls of a dump, judged by worker processes: what ends or holds up one of them costs a row, and no other call."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, Protocol

import torch

from trainermon.analysis.check.checking import CheckedCall
from trainermon.core.errors import DumpError

CRASH, TIMEOUT = "crash", "timeout"
"""What the reason of a call begins with that ended its process, or took too long."""
# spawned: a forked process would inherit threads and accelerators
_PROCESSES = multiprocessing.get_context("spawn")


class CallChecker(Protocol):
    """Interface of what judges calls one at a time, in any order."""

    def check(self, number: int) -> CheckedCall:
        """Return the verdict on the call `number`."""


Opener = Callable[[], CallChecker]
"""Makes what judges; is called in each worker, so it can be pickled."""


class Workers(NamedTuple):
    """The worker processes of a check.

    Attributes:
        number: How many.
        timeout_s: How long a call may take; None: as long as it takes.
    """

    number: int = 1
    timeout_s: float | None = None


def run_calls(
    openers: Sequence[Opener], numbers: Sequence[int], workers: Workers
) -> Generator[tuple[int, CheckedCall | str]]:
    """Yield the number and the verdict of each of the calls `numbers`, in the order in which they are done.

    There is an opener for each device, and a worker at least for each. The calls go to them in turn by number, so that
    which device a call is given does not depend on the workers. A call that ends its process, or takes too long, yields
    a text instead, its reason, and another process takes the place of its own.

    Raises:
        DumpError: A worker cannot start.
    """
    queues = [
        _Queue(opener, deque(number for number in numbers if number % len(openers) == place))
        for place, opener in enumerate(openers)
    ]
    number_of_workers = max(len(openers), min(workers.number, len(numbers)))
    pool = [_Worker(queue) for _, queue in zip(range(number_of_workers), itertools.cycle(queues)) if queue.waiting]
    try:
        while pool:
            for worker in _heard(pool, workers.timeout_s):
                number, found = worker.number, worker.answer(workers.timeout_s)
                if number is not None and found is not None:
                    yield number, found
                queue = worker.queue
                if queue.waiting and not worker.is_lost:
                    worker.give(queue.waiting.popleft())
                    continue
                worker.end()
                pool.remove(worker)
                if queue.waiting:
                    pool.append(_Worker(queue))
    finally:
        for worker in pool:
            worker.end()


def _heard(pool: Sequence[_Worker], timeout_s: float | None) -> list[_Worker]:
    """Wait for workers; return those that have said something, have ended, or are out of time."""
    begun = [worker.since for worker in pool if worker.number is not None]
    left = max(0.0, min(begun) + timeout_s - time.monotonic()) if begun and timeout_s is not None else None
    said = wait([worker.connection for worker in pool], left)
    return [worker for worker in pool if worker.connection in said or worker.is_late(timeout_s)]


class _Queue(NamedTuple):
    """Calls that are not judged yet, and what opens their judge."""

    opener: Opener
    waiting: deque[int]


class _Worker:
    """A process that judges one call at a time.

    Attributes:
        queue: The calls that it takes from.
        connection: To the process.
        number: The call that it was given; None: none yet.
        since: When it was given that, by the monotonic clock.
        is_lost: It has ended, or must be.
    """

    def __init__(self, queue: _Queue) -> None:
        self.queue = queue
        self.connection, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=_serve, args=(theirs, queue.opener), daemon=True)
        self._process.start()
        theirs.close()
        self.number: int | None = None
        self.since = 0.0
        self.is_lost = False

    def give(self, number: int) -> None:
        """Have it judge this call."""
        self.number, self.since = number, time.monotonic()
        with contextlib.suppress(OSError):  # it has ended: that is heard of next
            self.connection.send(number)

    def is_late(self, timeout_s: float | None) -> bool:
        """Return whether its call has taken longer than it may."""
        return timeout_s is not None and self.number is not None and time.monotonic() - self.since > timeout_s

    def answer(self, timeout_s: float | None) -> CheckedCall | str | None:
        """Return its verdict, or why there is none; None: it is ready for its first call.

        Raises:
            DumpError: It has ended before it was ready.
        """
        self.is_lost = True
        if not self.connection.poll():
            return f"{TIMEOUT}: it took longer than {timeout_s:g} s"
        try:
            found: CheckedCall | None = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            how = _ending(self._process.exitcode)
            if self.number is None:
                raise DumpError(f"a worker cannot start: {how}; without --jobs and --timeout none is needed") from None
            return f"{CRASH}: {how}"
        self.is_lost = False
        return found

    def end(self) -> None:
        """End the process, whatever it does: it holds nothing."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _ending(status: int | None) -> str:
    """Return in words how a process ended: `SIGSEGV ended its process`."""
    if status is None or status >= 0:
        return f"its process ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = ", as the kernel does where memory runs out" if name == "SIGKILL" else ""
    return f"{name} ended its process{hint}"


def _serve(connection: Connection, opener: Opener) -> None:
    """Judge the calls that `connection` names until it is closed; what runs in a worker."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends it to every process: whoever started this one ends it
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, name="ends with its parent", daemon=True).start()
    checker = opener()
    connection.send(None)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(checker.check(connection.recv()))


def _end_with_parent() -> None:
    """End this process as soon as the one that started it has ended: a call that hangs would keep it forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
