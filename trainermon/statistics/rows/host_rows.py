"""Rows of moments in the host's memory: as columns for the journal, and whether they count only finite elements."""

from __future__ import annotations

import array
import ctypes
import functools
import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainermon.core.values import STATISTICS
from trainermon.statistics.native import ROW_BYTES, library

Rows = npt.NDArray[np.float64]

_SUM_SQ, _NANS, _INFS = map(STATISTICS.index, ("sum_sq", "nans", "infs"))


class RowPlaces(NamedTuple):
    """Which rows of a table are meant, in an order of the caller's.

    Attributes:
        numbers: Their indices, int64 `[n]`.
        address: Where that array lies in memory, which numpy takes a while to tell.
    """

    numbers: npt.NDArray[np.int64]
    address: int

    @classmethod
    def of(cls, numbers: Collection[int]) -> RowPlaces:
        """Return the places of rows by their indices."""
        found = np.array(numbers, np.int64)
        return cls(found, address_of(found))


def columns(rows: Rows, places: RowPlaces, scalars: Collection[float], address: int | None = None) -> Rows:
    """Return rows as columns, float64 `[8, places + scalars]`: those at `places`, and then those of single numbers.

    Cost: 2 µs, and a copy of the rows; 10 µs without the compiled library.

    Args:
        rows: float64 `[rows, 8]`, C-contiguous.
        places: Each in `rows`.
        scalars: Any numbers; one that is not finite is counted as an element that is not.
        address: Where `rows` lies in memory, if that is known.
    """
    num_places = len(places.numbers)
    found = np.empty((len(STATISTICS), num_places + len(scalars)))
    compiled = _library()
    if compiled is None:
        found[:, :num_places] = rows[places.numbers].T
        if scalars:
            found[:, num_places:] = np.array([_row_of(value) for value in scalars]).T
        return found
    numbers = array.array("d", scalars)
    start = address_of(rows) if address is None else address
    begin, count = numbers.buffer_info()
    compiled.trainermon_columns(start, places.address, num_places, begin, count, address_of(found))
    return found


def any_nonfinite(rows: Rows, first: int, count: int, address: int | None = None) -> bool:
    """Return whether one of `count` rows from `first` on counts a NaN or an infinity.

    `address`: where `rows` lies in memory, if that is known. Cost: 1 µs; 4 µs without the compiled library.
    """
    compiled = _library()
    if compiled is None:
        return bool(rows[first : first + count, _NANS : _INFS + 1].any())
    start = address_of(rows) if address is None else address
    return bool(compiled.trainermon_any_nonfinite(start + first * ROW_BYTES, count))


def norm(rows: Rows, places: Iterable[int]) -> float:
    """Return the L2 norm of the tensors with the rows at `places`, all together; NaN if there is a NaN in them."""
    square, item = 0.0, rows.item
    for place in places:
        square += math.nan if item(place, _NANS) else item(place, _SUM_SQ)
    return math.sqrt(square)


def address_of(numbers: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> int:
    """Return where an array lies in memory."""
    return int(numbers.__array_interface__["data"][0])  # `ctypes.data` takes five times as long


def _row_of(value: float) -> list[float]:
    finite = value - value == 0.0
    is_nan = value != value  # noqa: PLR0124  # the definition of NaN
    low, high, total, square = (
        (value, value, value, value * value) if finite else (float("inf"), -float("inf"), 0.0, 0.0)
    )
    return [1.0, low, high, total, square, float(value == 0.0), float(is_nan), float(not finite and not is_nan)]


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = library()
    if found is None or not hasattr(found, "trainermon_columns"):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.trainermon_columns.argtypes = (pointer, pointer, number, pointer, number, pointer)
    found.trainermon_columns.restype = None
    found.trainermon_any_nonfinite.argtypes = (pointer, number)
    found.trainermon_any_nonfinite.restype = ctypes.c_int
    return found
