"""How far a command has come: one line of a terminal, there after a second, and gone at the end.

A command opens a `ProgressBar` around its work. What it calls tells the open bar how far it is, by a report that it
was given, or by `stage` and `counted`; without an open bar these do nothing. A thread draws, so that the seconds go on
where one file takes long, and so that telling costs an assignment.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from trainermon.core.terminal.manners import shows_progress

if TYPE_CHECKING:
    from tqdm import tqdm

Report = Callable[[int, int, str], None]
"""Is told how many of how many are done, and what they are (`dumps`, `rows`)."""

DELAY_S = 1.0
"""What takes less time than this shows no bar."""
_INTERVAL_S = 0.2
_COUNTED = "{n_fmt} of {total_fmt} {desc} |{bar}| {elapsed}<{remaining}"
_STAGE = "{desc} … {elapsed}"
_T = TypeVar("_T")

_open: list[ProgressBar] = []


def no_report(done: int, total: int, what: str) -> None:
    """Do nothing: the progress report of those that want none."""


def tell(done: int, total: int, what: str) -> None:
    """Tell the open bar how many of how many are done: the progress report of those that were given none."""
    if _open:
        _open[-1](done, total, what)


def stage(what: str) -> None:
    """Tell the open bar what is being done now, where nobody knows how much of it there is."""
    if _open:
        _open[-1].stage(what)


def counted(items: Iterable[_T], total: int, what: str) -> Iterator[_T]:
    """Yield the `items`, and tell the open bar how many of the `total` are done; `what` they are, in the plural."""
    for done, item in enumerate(items):
        tell(done, total, what)
        yield item


class ProgressBar:
    """Draws on `stream` (None: standard error) what is being done, how far it has come and how long it will take.

    A context: the line is erased at its end, and at `close`. Nothing is drawn where it is no terminal, with `--quiet`,
    or in the first second. It is a `Report`.
    """

    def __init__(self, what: str = "working", stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._now: tuple[int, int, str] = (0, 0, what)
        self._began_s = time.monotonic()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._drawing = threading.Lock()
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> ProgressBar:
        """Begin to watch the time."""
        self._closing.clear()
        if shows_progress(self._stream):
            self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
            self._thread.start()
        _open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Erase the line."""
        self.close()

    def __call__(self, done: int, total: int, what: str) -> None:
        """Take note that `done` of `total` are done."""
        self._now = (done, total, what)

    def stage(self, what: str) -> None:
        """Take note of what is being done, of which nobody knows how much there is."""
        self._now = (0, 0, what)

    def say(self, text: str) -> None:
        """Write a line where the bar is now; the bar goes on below it."""
        self._write(text, self._stream)

    def result(self, text: str) -> None:
        """Write a line to standard output; the bar goes on below it."""
        self._write(text, sys.stdout)

    def _write(self, text: str, stream: TextIO) -> None:
        with self._drawing:
            if self._bar is not None:
                self._bar.clear()
            stream.write(f"{text}\n")
            stream.flush()

    def close(self) -> None:
        """Erase the line; what is told afterwards is not shown."""
        if self in _open:
            _open.remove(self)
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _draw(self) -> None:
        self._began_s = time.monotonic()
        if self._closing.wait(DELAY_S):
            return
        shown = None
        while not self._closing.wait(_INTERVAL_S):
            done, total, what = self._now
            with self._drawing:
                if self._bar is None or (what, total) != shown:
                    self._replace_bar(total, what)
                    shown = (what, total)
                    self._began_s = time.monotonic()  # of what comes next
                if self._bar is not None:
                    self._bar.n = done
                    self._bar.refresh()
        self._replace_bar(None, "")

    def _replace_bar(self, total: int | None, what: str) -> None:
        """Erase the bar that is shown; draw one for `total` (0: nobody knows how many; None: none)."""
        from tqdm import tqdm

        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if total is not None:
            tqdm.monitor_interval = 0  # no further thread, and no lock between processes
            tqdm.set_lock(threading.RLock())
            form = _COUNTED if total else _STAGE
            settings: dict[str, Any] = {"bar_format": form, "leave": False, "dynamic_ncols": True}
            self._bar = tqdm(total=total or None, desc=what, file=self._stream, **settings)
            self._bar.start_t -= time.monotonic() - self._began_s
