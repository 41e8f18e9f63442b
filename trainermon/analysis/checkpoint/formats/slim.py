"""What a pickle would make, counted, and what it memorises in vain taken out of it; by the compiled library."""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
from typing import Any, NamedTuple

from trainermon.core.native.library import library

_READ_AHEAD = 1 << 17  # bytes


class PickleCounts(NamedTuple):
    """What a pickle has.

    Attributes:
        codes: Bytes of codes and numbers; texts, and other values that say how long they are, left out.
        objects: Containers, and results of calls.
        sets: How many of these are sets.
        tuples: And tuples.
    """

    codes: int
    objects: int
    sets: int
    tuples: int


class _Reader(io.RawIOBase):
    """Reads from memory without copying all of it."""

    def __init__(self, content: memoryview) -> None:
        self._left = content

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        size = min(len(into), len(self._left))
        into[:size], self._left = self._left[:size], self._left[size:]
        return size


def slimmed(data: bytes) -> tuple[io.BufferedReader, PickleCounts] | None:
    """Return a pickle of the same value that memorises only what it asks for again, to be read, and what it has.

    None: it is damaged, or has codes that only Python judges; or the library is not there. Cost: 1 ns a byte.
    """
    slim = _compiled()
    if slim is None or not data:
        return None
    buffer = mmap.mmap(-1, len(data))  # of its own, so that it goes away as a whole
    buffer[:] = data
    counts = (ctypes.c_int64 * 4)()
    size = slim((ctypes.c_char * len(buffer)).from_buffer(buffer), len(buffer), counts)
    if not size:
        return None
    return io.BufferedReader(_Reader(memoryview(buffer)[:size]), min(size, _READ_AHEAD)), PickleCounts(*counts)


@functools.cache
def _compiled() -> Any:
    found = library()
    if found is None or not hasattr(found, "trainermon_slim_pickle"):  # not in a library built before
        return None
    function = found.trainermon_slim_pickle
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    function.restype = ctypes.c_int64
    return function
