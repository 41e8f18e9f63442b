"""How many files and connections a process may have open, and what it says when they are used up."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from typing import Any

ENOUGH_FILES = 1 << 16
REPEAT_S = 60.0

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE})

_log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as allowed, at most to 65536; return the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ENOUGH_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        _log.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    return wanted


class LoopFaults:
    """An event loop's exception handler that logs once a minute, in one line, that no more files can be opened."""

    def __init__(self) -> None:
        self._told_s: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log a fault; everything else than used-up files as asyncio does."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
            loop.default_exception_handler(context)
            return
        now_s = time.monotonic()
        if self._told_s is None or now_s - self._told_s >= REPEAT_S:
            self._told_s = now_s
            _log.error("connections wait: %s; raise the limit of open files (ulimit -n)", error.strerror)
