"""The lines of the user's code that led to a module call."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import linecache
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

import trainermon
from trainermon.core.environment.literals import masked_code
from trainermon.core.native.library import library_or_none

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
# Stacks by the places of all their frames, beside the codes, which have to stay the only ones with their ids.
_STACKS: dict[bytes, tuple[tuple[str, ...], list[CodeType]]] = {}
_PLACE_BYTES = 16
# What frames.c calls of the interpreter, in its order.
_OF_PYTHON = (
    "PyThreadState_Get",
    "PyThreadState_GetFrame",
    "PyFrame_GetBack",
    "PyFrame_GetCode",
    "PyFrame_GetLasti",
    "Py_DecRef",
)
MAX_WALKED = 512  # frames, the framework's too


def call_stack() -> tuple[str, ...]:
    """Return the frames of the script that led to the caller, innermost first: `File …, line 3, in f, …`.

    The wording is msprobe's. Frames of the framework and of this package are left out; one of this package behind user
    frames ends the list, because what called a replay is not what called the module. Cost: about 0.1 µs per frame with
    the compiled library, once a call was made from there before; ten times that without.
    """
    if _PLACES is None:
        return _walked(sys._getframe(1))[0]
    places = _PLACES.of_frames()
    known = _STACKS.get(places)
    if known is None:
        known = _walked(sys._getframe(1))
        if len(_STACKS) >= MAX_TEXTS:
            _STACKS.clear()
        if places:
            _STACKS[places] = known
    return known[0]


class _FramePlaces(threading.local):
    """The compiled function that tells which codes run, see frames.c. Not every interpreter has what it calls."""

    def __init__(self, function: Any) -> None:
        addresses = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _OF_PYTHON]
        self._python = (ctypes.c_void_p * len(addresses))(*addresses)
        self._places = ctypes.create_string_buffer(_PLACE_BYTES * MAX_WALKED)
        self._view = memoryview(self._places)
        self._function = function
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        function.restype = ctypes.c_int64

    def of_frames(self) -> bytes:
        """Return codes and instructions of the frames that run, innermost first; b"": they are too many."""
        found = self._function(self._python, self._places, MAX_WALKED)
        return b"" if found == MAX_WALKED else self._view[: _PLACE_BYTES * found].tobytes()


def _frame_places() -> _FramePlaces | None:
    found = library_or_none()
    if found is None or not hasattr(found, "trainermon_frames"):
        return None
    try:
        return _FramePlaces(ctypes.PyDLL(found._name).trainermon_frames)  # which holds the lock, as CDLL does not
    except AttributeError:  # PyFrame_GetLasti is new in Python 3.11
        return None


def _walked(frame: FrameType | None) -> tuple[tuple[str, ...], list[CodeType]]:
    """Return the frames that `call_stack` does, and all codes on the way."""
    frames: list[str] = []
    codes: list[CodeType] = []
    is_inside = True
    while frame is not None:
        code = frame.f_code
        codes.append(code)
        origin = _origin(code.co_filename) if is_inside else _OF_FRAMEWORK
        if origin == _OF_USER:
            known = _TEXTS.get((id(code), frame.f_lasti))
            frames.append(known[0] if known else _remembered(frame))
        if len(frames) == MAX_FRAMES or (origin == _OF_OURS and frames):
            is_inside = False
        frame = frame.f_back
    return tuple(frames), codes


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
    source = masked_code(linecache.getline(code.co_filename, frame.f_lineno).strip())
    text = f"File {code.co_filename}, line {frame.f_lineno}, in {code.co_name}, \n {source}"
    _TEXTS[id(code), frame.f_lasti] = text, code
    return text


_PLACES = _frame_places()
