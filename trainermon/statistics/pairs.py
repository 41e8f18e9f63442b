"""How the elements of two arrays in memory differ, of any strides (pairs.c), and norms of any size. Without torch."""

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

LEAST_SQUARE, MOST_SQUARE = 2.0**-900, 2.0**1000
"""Between them a sum of squares has lost nothing that counts: that of 1e-162 would be 0, of 1e154 infinite."""

Boxes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PairSums:
    """Norms and counts over the elements of two arrays; norms and distances are of those finite on both sides.

    Attributes:
        our_norm: Norm of the one side.
        their_norm: Of the other.
        distance: Norm of the difference.
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

    our_norm: float = 0.0
    their_norm: float = 0.0
    distance: float = 0.0
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
            our_norm=math.hypot(self.our_norm, after.our_norm),
            their_norm=math.hypot(self.their_norm, after.their_norm),
            distance=math.hypot(self.distance, after.distance),
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
        larger = max(self.our_norm, self.their_norm)
        return self.distance / larger if larger else 0.0

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between both sides, 1 for two zero arrays; None where only one is zero."""
        return cosine_of(self.our_norm, self.their_norm, self.distance)


def norm_of(values: npt.NDArray[np.float64]) -> float:
    """Return the root of the sum of squares of finite numbers `[n]`, 0 of none, inf where it has no place in float64.

    Cost: one pass, three more where the squares do not fit. No threads of a BLAS are used.

    >>> norm_of(np.array([3e-200, 4e-200]))
    5e-200
    """
    with np.errstate(over="ignore", under="ignore"):
        square = float(np.einsum("i,i->", values, values))
        if LEAST_SQUARE <= square <= MOST_SQUARE or not values.size:
            return math.sqrt(square)
        exponent = int(np.frexp(np.abs(values).max())[1])
        scaled = np.ldexp(values, -exponent)
        return float(np.ldexp(math.sqrt(float(np.einsum("i,i->", scaled, scaled))), exponent))


def cosine_of(norm: float, other: float, distance: float) -> float | None:
    """Return the cosine between two vectors by their norms and their distance: 1 of two zero ones, None where one is.

    It is exact to the last digits where the two are nearly equal.
    """
    if not norm or not other:
        return 1.0 if norm == other else None
    larger = max(norm, other)
    one, two, apart = norm / larger, other / larger, distance / larger
    return min(1.0, max(-1.0, 1.0 - (apart - (one - two)) * (apart + (one - two)) / (2 * one * two)))


_ADDED = ("count", "unequal", "our_nans", "our_infs", "their_nans", "their_infs")
_NUM_SUMS = 5  # in what the library returns: the product, three squares, the largest difference
_FIELDS = tuple(field.name for field in fields(PairSums))
# How many steps of the wider type one of the narrower is, where both are normal numbers.
_COARSER = {("float32", "bfloat16"): 16, ("float32", "float16"): 13, ("bfloat16", "float16"): 16}
_COARSER |= {("float64", "float32"): 29, ("float64", "bfloat16"): 45, ("float64", "float16"): 42}


def is_available() -> bool:
    """Whether the compiled library is there, and used."""
    return _kernel() is not None


def pair_sums(boxes: Boxes, ours: str, theirs: str) -> PairSums | None:
    """Return the sums over all boxes, int64 `[n, BOX_WORDS]`, of elements of the dtypes `ours` and `theirs`.

    None where a norm could be wrong, as squares of float64 numbers have no place in float64, or all are zero. Nothing
    is allocated that grows with the number of elements, and the interpreter lock is released meanwhile. Memory at the
    addresses must stay where it is; it is not checked.

    Raises:
        RuntimeError: the library is not there, see `is_available`.
        MemoryFaultError: a mapped file ends before what was asked for, by now.
    """
    found = np.empty(len(_FIELDS) + 1, np.int64)
    packed = np.ascontiguousarray(boxes, np.int64)
    _needed().sums(packed.ctypes.data, len(packed), KINDS.index(ours), KINDS.index(theirs), found.ctypes.data)
    _refuse_fault()
    _, *squares, largest = found[:_NUM_SUMS].view(np.float64).tolist()
    needed = squares if largest else squares[:2]
    if "float64" in (ours, theirs) and not all(LEAST_SQUARE <= square <= MOST_SQUARE for square in needed):
        return None
    sums = [*map(math.sqrt, squares), largest, *found[_NUM_SUMS:].tolist()]
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
