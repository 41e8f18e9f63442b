"""How the signs of two tensors differ, counted over their bitmaps. Without torch."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.core.native.library import library

Words = npt.NDArray[np.uint64]


class SignDifferences(NamedTuple):
    """In how many elements two tensors' signs differ.

    Attributes:
        positive: That are greater than zero in one of the two only.
        either: That differ in any way: positive, negative or neither.
    """

    positive: int
    either: int


def sign_differences(ours: tuple[Words, Words], theirs: tuple[Words, Words]) -> SignDifferences:
    """Count the elements whose signs differ; a side is its positive and its negative bitmap, each `[n]`.

    Cost: one pass at the read limit with the compiled library, about six times that with numpy.

    Raises:
        ValueError: The bitmaps have not one length.
    """
    maps = (ours[0], theirs[0], ours[1], theirs[1])
    if len({len(words) for words in maps}) > 1:
        raise ValueError(f"bitmaps: found {[len(words) for words in maps]} words, expected as many of each")
    compiled = _library()
    if compiled is None:
        above = maps[0] ^ maps[1]
        either = above | (maps[2] ^ maps[3])
        return SignDifferences(*(int(np.bitwise_count(words).sum()) for words in (above, either)))
    counts = (ctypes.c_int64 * 2)()
    compiled.trainermon_sign_differences(*map(_address, maps), len(maps[0]), counts)
    return SignDifferences(*counts)


def differences_of_files(ours: Words, theirs: Words, num_words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return what `sign_differences` does for each of many tensors, int64 `[num_tensors, 2]`, in one call.

    A side has all bitmaps one after another, of each tensor the positive one and the negative one.

    Raises:
        ValueError: A side has not as many words as `num_words` says.
    """
    if {len(ours), len(theirs)} != {2 * int(num_words.sum())}:
        raise ValueError(f"bitmaps: found {len(ours)} and {len(theirs)} words, expected {2 * int(num_words.sum())}")
    counts = np.empty((len(num_words), 2), np.int64)
    compiled = _library()
    if compiled is None:
        ends = np.cumsum(np.repeat(num_words, 2))[:-1]
        sides = [np.split(side, ends) for side in (ours, theirs)]
        for n, row in enumerate(counts):
            pairs = [(side[2 * n], side[2 * n + 1]) for side in sides]
            row[:] = sign_differences(*pairs)
        return counts
    lengths = np.ascontiguousarray(num_words)
    compiled.trainermon_differences_of_files(*map(_address, (ours, theirs, lengths)), len(lengths), _address(counts))
    return counts


def _address(words: npt.NDArray[Any]) -> int:
    return int(words.__array_interface__["data"][0])  # `ctypes.data` takes five times as long


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = library()
    if found is None or not hasattr(found, "trainermon_differences_of_files"):
        return None
    found.trainermon_sign_differences.argtypes = (*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_void_p)
    found.trainermon_sign_differences.restype = None
    found.trainermon_differences_of_files.argtypes = (*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_void_p)
    found.trainermon_differences_of_files.restype = None
    return found
