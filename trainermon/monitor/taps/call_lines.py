"""Where in the script a collective was called from, and whether the user has asked for calls from there."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import NamedTuple

from trainermon.core.errors import ConfigError
from trainermon.core.strict import shown
from trainermon.hooks import patch

# The monitor's own frames are no part of a call line.
_FOLDERS = (path.rpartition("/")[0] + "/" for path in (__file__, patch.__file__))
_OWN = ("trainermon/monitor/taps/", "trainermon/hooks/", *_FOLDERS)
# What stands between a script and the collective that it calls.
_BETWEEN = ("/torch/distributed/", "/torch/utils/_contextlib.py", "/contextlib.py")
# Stacks that are remembered: a training script has some hundred.
MAX_REMEMBERED = 10_000


class CallLine(NamedTuple):
    """A place in the script from which a collective is called.

    Attributes:
        text: Its stack: `path[line] function` of each frame, innermost first, joined by `;`.
        is_wanted: Whether the user asked for calls from there (`cc_codeline`).
    """

    text: str
    is_wanted: bool

    @property
    def place(self) -> str:
        """The innermost frame of the stack that is not in torch.distributed itself."""
        frames = self.text.split(";")
        return next((frame for frame in frames if not any(part in frame for part in _BETWEEN)), frames[0])


class CallLines:
    """Finds the place in the script from which the running call comes.

    A stack is put into words once and then known by its frames: 0.1 µs a frame and call.

    Args:
        patterns: Regular expressions; a call is wanted if one is found in its text. None of them: every call.

    Raises:
        ConfigError: A pattern is no regular expression.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = [_compiled(pattern, index) for index, pattern in enumerate(patterns)]
        self._known: dict[tuple[int, ...], tuple[CallLine, list[CodeType]]] = {}
        self.are_all_wanted = not patterns

    def here(self) -> CallLine:
        """Return the stack of the running call, as it is seen from the caller.

        Its text is `path[line] function` of each frame, innermost first, joined by `;`. A backward that torch runs in a
        thread of its own has only the frames of that thread.
        """
        frame: FrameType | None = sys._getframe(1)
        key: list[int] = []
        while frame is not None:
            key += (id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        found = self._known.get(tuple(key))
        if found is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            found = self._known[tuple(key)] = self._in_words(sys._getframe(1))
        return found[0]

    def _in_words(self, frame: FrameType | None) -> tuple[CallLine, list[CodeType]]:
        words, codes = [], []
        while frame is not None:
            code = frame.f_code
            codes.append(code)  # kept: its id stands for it
            if not code.co_filename.startswith(_OWN):
                words.append(f"{code.co_filename}[{frame.f_lineno}] {code.co_name}")
            frame = frame.f_back
        text = ";".join(words)
        is_wanted = self.are_all_wanted or any(pattern.search(text) for pattern in self._patterns)
        return CallLine(text, is_wanted), codes


def _compiled(pattern: str, index: int) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"cc_distribution.cc_codeline[{index}]: found {shown(pattern)}, expected a regular expression: {error}"
        ) from None
