"""The lines of the user's code that led to a module call."""

from __future__ import annotations

import functools
import linecache
import os
import sys
from types import FrameType

import torch

import trainermon

_OWN = tuple({os.path.dirname(os.path.abspath(trainermon.__file__)), os.path.dirname(os.path.abspath(__file__))})
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
MAX_FRAMES = 64


def call_stack() -> tuple[str, ...]:
    """Return the frames above the caller, innermost first, in msprobe's wording.

    Frames of torch and of this package are left out; one of this package behind user frames ends the list, because what
    called a replay is not what called the module. Cost: about 1 µs per frame.
    """
    frames: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < MAX_FRAMES:
        file_name = frame.f_code.co_filename
        if file_name.startswith(_OWN):
            if frames:
                break
        elif not file_name.startswith(_TORCH):
            frames.append(_text(file_name, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(frames)


@functools.lru_cache(maxsize=8192)
def _text(file_name: str, line: int, function: str) -> str:
    source = linecache.getline(file_name, line).strip()
    return f"File {file_name}, line {line}, in {function}, \n {source}"
