"""Ctrl-C where a command has worker processes: the terminal interrupts all of them, and one line is enough."""

from __future__ import annotations

import signal
from concurrent.futures import ProcessPoolExecutor


def leave_interrupts() -> None:
    """Let this worker process go on after Ctrl-C: whoever started it ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_workers(pool: ProcessPoolExecutor) -> None:
    """End the processes of `pool` at once, whatever they are at, and take no more work."""
    for process in list((pool._processes or {}).values()):  # public from Python 3.14 on
        process.terminate()
    pool.shutdown(cancel_futures=True)
