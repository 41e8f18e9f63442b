"""The lines of the user's code that led to a module call."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import sys
from types import CodeType, FrameType

import trainermon

_OWN = tuple({os.path.dirname(os.path.abspath(trainermon.__file__)), os.path.dirname(os.path.abspath(__file__))})
# Only looked up, not imported: one of them may not be there.
_FRAMEWORKS = tuple(
    os.path.dirname(os.path.abspath(spec.origin))
    for name in ("torch", "mindspore")
    if (spec := importlib.util.find_spec(name)) is not None and spec.origin is not None
)
_OF_USER, _OF_OURS, _OF_FRAMEWORK = range(3)
MAX_FRAMES = 64
MAX_TEXTS = 8192
# By the id of a code object, which stands beside the text so that it stays the only one with that id: two of them that
# differ in their file alone are equal.
_TEXTS: dict[tuple[int, int], tuple[str, CodeType]] = {}
# The code of the framework's functions by its id, kept so that no other code gets that id.
_PASSED: dict[int, CodeType] = {}


def call_stack() -> tuple[str, ...]:
    """Return the frames of the script that led to the caller, innermost first: `File …, line 3, in f, …`.

    The wording is msprobe's. Frames of the framework and of this package are left out; one of this package behind user
    frames ends the list, because what called a replay is not what called the module. Cost: about 0.1 µs per frame.
    """
    frames: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        place = id(frame.f_code)
        if place not in _PASSED:
            known = _TEXTS.get((place, frame.f_lasti))
            origin = _origin(frame.f_code.co_filename) if known is None else _OF_USER
            if origin == _OF_USER:
                frames.append(known[0] if known else _remembered(frame))
                if len(frames) == MAX_FRAMES:
                    break
            elif origin == _OF_OURS and frames:
                break
            elif origin == _OF_FRAMEWORK and len(_PASSED) < MAX_TEXTS:
                _PASSED[place] = frame.f_code
        frame = frame.f_back
    return tuple(frames)


def innermost_line() -> str:
    """Return the line of the user's code that runs now: `File …, line 3, in f: source`; "" if there is none.

    There is none where this package itself, and no line of the user's, has called torch.
    """
    frame: FrameType | None = sys._getframe(1)
    is_outside = False
    while frame is not None:
        origin = _origin(frame.f_code.co_filename)
        if origin == _OF_USER:
            known = _TEXTS.get((id(frame.f_code), frame.f_lasti))
            return (known[0] if known else _remembered(frame)).replace(", \n ", ": ")
        if origin == _OF_OURS and is_outside:
            break
        is_outside = is_outside or origin == _OF_FRAMEWORK
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=8192)
def _origin(file: str) -> int:
    if file.startswith(_OWN):
        return _OF_OURS
    return _OF_FRAMEWORK if file.startswith(_FRAMEWORKS) else _OF_USER


def _remembered(frame: FrameType) -> str:
    """Return the text of the instruction that runs; to find its line is dear, so that is done once for each."""
    if len(_TEXTS) >= MAX_TEXTS:
        _TEXTS.clear()
    code = frame.f_code
    source = linecache.getline(code.co_filename, frame.f_lineno).strip()
    text = f"File {code.co_filename}, line {frame.f_lineno}, in {code.co_name}, \n {source}"
    _TEXTS[id(code), frame.f_lasti] = text, code
    return text
