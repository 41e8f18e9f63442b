"""A thread that writes to a spool that lies on a disk, so that a disk that hangs stops the thread, not the step.

It does not know what is written: `writer` and `trainermon.core.control` hand it their work, in order.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 16 << 20
CLOSE_S = 5.0


class SpoolThread:
    """Does in a thread, one after the other, what is handed to `take`; a fork of the process has none.

    Work that waits is lost if the process is killed: what was handed over in the last milliseconds, or, while the disk
    hangs, all since then.

    Args:
        max_waiting_bytes: Records that wait take no more memory than this; what comes then is not taken.
    """

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], object], int] | None] = queue.SimpleQueue()
        self._max_waiting_bytes = max_waiting_bytes
        # Each is written by one side only, so that no lock is needed.
        self._bytes_taken = self._bytes_done = 0
        self._thread = threading.Thread(target=self._run, name="trainermon-spool", daemon=True)
        self._thread.start()

    def take(self, work: Callable[[], object], size_bytes: int = 0) -> bool:
        """Hand over `work`, which holds `size_bytes` of memory; return False if too much of that waits already.

        Work of no size is always taken. Cost: 7 µs, whatever the disk does.
        """
        if size_bytes and self._bytes_taken - self._bytes_done + size_bytes > self._max_waiting_bytes:
            return False
        self._bytes_taken += size_bytes
        self._work.put((work, size_bytes))
        return True

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """End when all work is done, and wait for that at most `timeout_s` seconds; return whether it is done."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, size_bytes = item
            try:
                work()
            except Exception:  # the border of the thread: what comes next is written all the same
                logger.exception("the monitor could not write to the spool")
            self._bytes_done += size_bytes
            del item, work  # a record is freed when it is written, not when the next one comes
