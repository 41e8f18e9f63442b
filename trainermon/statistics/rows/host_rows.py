"""Rows of moments in the host's memory: as columns for the journal, and whether they count only finite elements."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from trainermon.core.native.builtins import builtin
from trainermon.core.values import STATISTICS
from trainermon.statistics.native import ROW_BYTES

Rows = npt.NDArray[np.float64]

_SUM_SQ, _NANS, _INFS = map(STATISTICS.index, ("sum_sq", "nans", "infs"))


class Columns:
    """Writes rows of a table, and after them those of single numbers, as columns, step after step.

    Args:
        places: Indices of the rows, in an order of the caller's.
        num_scalars: How many single numbers there are.
        values: Where they are written to, float64 `[8, places + scalars]`, C-contiguous; by default, new memory.

    Attributes:
        values: float64 `[8, places + scalars]`: what was written last.
    """

    def __init__(self, places: Collection[int] = (), num_scalars: int = 0, values: Rows | None = None) -> None:
        self.values: Rows = np.empty((len(STATISTICS), len(places) + num_scalars)) if values is None else values
        self._places = np.array(places, np.int64)
        self._scalars = (ctypes.c_double * num_scalars)()
        self._task = (ctypes.c_int64 * 5)(
            address_of(self._places), len(places), ctypes.addressof(self._scalars), num_scalars, address_of(self.values)
        )
        self._address = ctypes.addressof(self._task)
        self._compiled = builtin("write_columns")

    def write(self, rows: Rows, address: int, scalars: Collection[float]) -> None:
        """Write rows into `values`. Cost: 1 µs, and a copy of the rows; 10 µs without the compiled library.

        Args:
            rows: float64 `[rows, 8]`, C-contiguous; each of the places is in it.
            address: Where it lies in memory.
            scalars: As many as were said; one that is not finite is counted as an element that is not.
        """
        if self._compiled is not None and self._compiled(address, self._address, [*scalars]):
            return
        num_places = len(self._places)
        self.values[:, :num_places] = rows[self._places].T
        if scalars:
            self.values[:, num_places:] = np.array([_row_of(value) for value in scalars]).T


def any_nonfinite(rows: Rows, address: int, first: int, count: int) -> bool:
    """Return whether one of `count` rows from `first` on counts a NaN or an infinity.

    `address`: where `rows` lies in memory. Cost: 0.2 µs; 4 µs without the compiled library.
    """
    if _any_nonfinite is None:
        return bool(rows[first : first + count, _NANS : _INFS + 1].any())
    return bool(_any_nonfinite(address + first * ROW_BYTES, count))


def norm(rows: Rows, address: int, places: Sequence[int]) -> float:
    """Return the L2 norm of the tensors with the rows at `places`, all together; NaN if there is a NaN in them.

    `address`: where `rows` lies in memory.
    """
    if _norm is not None:
        return float(_norm(address, places))
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


_any_nonfinite, _norm = builtin("any_nonfinite"), builtin("norm")
