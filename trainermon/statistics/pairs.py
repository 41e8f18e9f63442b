"""The binding of pairs.c: how the elements of two arrays in memory differ, whatever their strides. Without torch."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from trainermon.core.native.library import library

KINDS = ("float32", "bfloat16", "float16", "float64")
"""The dtypes that the library reads, in the order of pairs.c; any two can be mixed."""
MAX_DIMS = 8
BOX_WORDS = 2 + 3 * MAX_DIMS
"""Words of a box: both addresses, then sizes, our strides and their strides in elements, outermost dimension first.

Dimensions that are not needed have size 1.
"""

Boxes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PairSums:
    """Sums and counts over the elements of two arrays; sums and distances are over those finite on both sides.

    Attributes:
        product: Sum of the products.
        our_square: Sum of squares of the one side.
        their_square: Of the other.
        distance_square: Sum of squares of the differences.
        largest: Largest difference.
        count: Number of elements.
        largest_at: Where the largest difference is, counted over all boxes in C order; -1: nowhere.
        ulps: Largest difference in units in the last place; of two types, those of the coarser.
        unequal: Elements whose bits are not equal; of two types, the bits after widening.
        first_unequal: The first of them; -1: there is none.
        our_nans: NaNs on the one side.
        our_infs: Infinities on the one side.
        their_nans: NaNs on the other.
        their_infs: Infinities on the other.
    """

    product: float = 0.0
    our_square: float = 0.0
    their_square: float = 0.0
    distance_square: float = 0.0
    largest: float = 0.0
    count: int = 0
    largest_at: int = -1
    ulps: int = 0
    unequal: int = 0
    first_unequal: int = -1
    our_nans: int = 0
    our_infs: int = 0
    their_nans: int = 0
    their_infs: int = 0

    def merge(self, after: PairSums) -> PairSums:
        """Return the sums over both parts; places in `after` are counted on from ours."""
        added = {name: getattr(self, name) + getattr(after, name) for name in _ADDED}
        here = after.largest > self.largest
        return PairSums(
            **added,
            largest=max(self.largest, after.largest),
            largest_at=after.largest_at + self.count if here else self.largest_at,
            ulps=max(self.ulps, after.ulps),
            first_unequal=(
                self.first_unequal
                if self.first_unequal >= 0
                else after.first_unequal + (self.count if after.first_unequal >= 0 else 0)
            ),
        )

    @property
    def nonfinite(self) -> int:
        """Number of elements that are NaN or infinite, of both sides together."""
        return self.our_nans + self.our_infs + self.their_nans + self.their_infs

    @property
    def relative(self) -> float:
        """Norm of the difference over the larger norm; 0 for two zero arrays."""
        larger = math.sqrt(max(self.our_square, self.their_square))
        return math.sqrt(self.distance_square) / larger if larger else 0.0

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between both sides, 1 for two zero arrays; None where only one is zero.

        From the norm of the difference, which is exact to the last digits where the two are nearly equal.
        """
        ours, theirs = math.sqrt(self.our_square), math.sqrt(self.their_square)
        if not ours or not theirs:
            return 1.0 if ours == theirs else None
        apart = (self.distance_square - (ours - theirs) ** 2) / (2 * ours * theirs)
        return min(1.0, max(-1.0, 1.0 - apart))


_ADDED = (
    *("product", "our_square", "their_square", "distance_square", "count", "unequal"),
    *("our_nans", "our_infs", "their_nans", "their_infs"),
)
_NUM_SUMS = 5
_FIELDS = tuple(field.name for field in fields(PairSums))
# How many steps of the wider type one of the narrower is, where both are normal numbers.
_COARSER = {("float32", "bfloat16"): 16, ("float32", "float16"): 13, ("bfloat16", "float16"): 16}
_COARSER |= {("float64", "float32"): 29, ("float64", "bfloat16"): 45, ("float64", "float16"): 42}


def is_available() -> bool:
    """Whether the compiled library is there, and used."""
    return _kernel() is not None


def pair_sums(boxes: Boxes, ours: str, theirs: str) -> PairSums:
    """Return the sums over all boxes, int64 `[n, BOX_WORDS]`, of elements of the dtypes `ours` and `theirs`.

    Nothing is allocated that grows with the number of elements, and the interpreter lock is released meanwhile. Memory
    at the addresses must stay where it is; it is not checked.

    Raises:
        RuntimeError: the library is not there, see `is_available`.
        MemoryFaultError: a mapped file ends before what was asked for, by now.
    """
    found = np.empty(len(_FIELDS), np.int64)
    packed = np.ascontiguousarray(boxes, np.int64)
    _needed().sums(packed.ctypes.data, len(packed), KINDS.index(ours), KINDS.index(theirs), found.ctypes.data)
    _refuse_fault()
    sums = [*found[:_NUM_SUMS].view(np.float64).tolist(), *found[_NUM_SUMS:].tolist()]
    of_both = dict(zip(_FIELDS, sums, strict=True))
    steps = _COARSER.get((ours, theirs)) or _COARSER.get((theirs, ours)) or 0
    of_both["ulps"] = -(-of_both["ulps"] >> steps)
    return PairSums(**of_both)


def is_rounded(boxes: Boxes, ours: str, theirs: str, target: str) -> bool:
    """Whether every element of theirs is ours rounded to `target`, to the nearest with ties to even; NaN for NaN.

    float64 is rounded to a type of 16 bits by way of float32, as torch does. Stops at the first element that is not.

    Raises:
        RuntimeError: the library is not there, see `is_available`.
        MemoryFaultError: as `pair_sums`.
    """
    packed = np.ascontiguousarray(boxes, np.int64)
    kinds = [KINDS.index(dtype) for dtype in (ours, theirs, target)]
    is_so = bool(_needed().rounded(packed.ctypes.data, len(packed), *kinds))
    _refuse_fault()
    return is_so


def _refuse_fault() -> None:
    if _needed().has_faulted():
        raise MemoryFaultError("a file that is mapped became shorter while it was read")


class MemoryFaultError(Exception):
    """Memory was read that is not there any more: a mapped file was cut, or cannot be read from its disk."""


class _PairKernel:
    """The library's functions, with the arguments that they take."""

    def __init__(self, found: ctypes.CDLL) -> None:
        guarded = "guarded_" if hasattr(found, "trainermon_guarded_pairs") else ""  # not in a library built before
        self.sums: Any = getattr(found, f"trainermon_{guarded}pairs")
        self.sums.argtypes = (ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p)
        self.sums.restype = None
        self.rounded: Any = getattr(found, f"trainermon_{guarded}is_rounded")
        self.rounded.argtypes = (ctypes.c_void_p, *[ctypes.c_int64] * 4)
        self.rounded.restype = ctypes.c_int64
        self.has_faulted: Any = found.trainermon_has_faulted if guarded else int


@functools.cache
def _kernel() -> _PairKernel | None:
    found = library()
    return _PairKernel(found) if found is not None and hasattr(found, "trainermon_pairs") else None


def _needed() -> _PairKernel:
    kernel = _kernel()
    if kernel is None:
        raise RuntimeError("the compiled library is not there: install a C compiler and reinstall")
    return kernel
