"""How far a comparison has come, in one line of a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

Report = Callable[[int, int, str], None]
"""Is told how many of how many are done, and what they are (`dumps`, `rows`)."""

_WIDTH = 30
_INTERVAL_S = 0.2
_CLEAR = "\r\033[K"


def no_report(done: int, total: int, what: str) -> None:
    """Do nothing: the progress report of those that want none."""


class ProgressBar:
    """Draws on `stream` a bar with the estimated time left, when called as a report.

    Nothing where it is no terminal.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._drawn_at = -_INTERVAL_S + self._start

    def __call__(self, done: int, total: int, what: str) -> None:
        """Draw that `done` of `total` are done, at most five times a second."""
        now = self._clock()
        if now - self._drawn_at < _INTERVAL_S or not self._stream.isatty():
            return
        self._drawn_at = now
        filled = _WIDTH * done // max(1, total)
        left = f", {(now - self._start) / done * (total - done):.0f} s left" if done else ""
        bar = "#" * filled + "-" * (_WIDTH - filled)
        self._stream.write(f"{_CLEAR}[{bar}] {done:,} of {total:,} {what}{left}")
        self._stream.flush()

    def close(self) -> None:
        """Erase the bar from the terminal."""
        if self._stream.isatty():
            self._stream.write(_CLEAR)
            self._stream.flush()
