"""Values over rows and steps in bounded memory: the older the run, the coarser the steps, and no peak is ever lost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_COLUMNS = 2048
MIN_COLUMNS = 64

_LARGEST = float(np.finfo(np.float32).max)


class PooledGrid(NamedTuple):
    """The values of a heat map at the resolution that was asked for.

    Attributes:
        first_step: The first step of the first column.
        stride: Number of steps per column; a column has the largest value of these.
        values: float32 [rows, columns]; NaN where there is no value.
    """

    first_step: int
    stride: int
    values: npt.NDArray[np.float32]


class StepGrid:
    """Keeps values by row and step in bounded memory: a column holds the largest of `stride` steps; NaN is no value.

    +inf stands for 'contains something non-finite' and, being the largest, survives every merge. As long as all steps
    fit, `stride` is 1. When they no longer do, or rows are added, neighbouring columns are merged and `stride` doubles,
    so that there are never more than `max_cells` cells (4 bytes each), nor more than `max_columns` columns.
    """

    def __init__(self, *, max_cells: int = 1 << 22, max_columns: int = MAX_COLUMNS) -> None:
        self._max_cells = max_cells
        self._max_columns = max_columns
        self._origin: int | None = None
        self._stride = 1
        self._used = 0
        self._values = np.full((0, 0), np.nan, np.float32)  # [columns, rows]: one step is written at a time

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return self._values.nbytes

    @property
    def has_values(self) -> bool:
        """Whether there is anything but NaN in it."""
        return not bool(np.isnan(self._values).all())

    def put(self, step: int, values: npt.NDArray[np.floating]) -> None:
        """Set the values of all rows, [rows], at one step; rows that are new have no earlier values.

        Finite values beyond float32 become its largest one. A step before the first one of all is ignored.
        """
        if self._origin is None:
            self._origin = step
        if step < self._origin:
            return
        if len(values) > self._values.shape[1]:
            self._add_rows(len(values))
        while (column := (step - self._origin) // self._stride) >= self._capacity(self._values.shape[1]):
            self._halve()
        self._reserve(column + 1)
        self._used = max(self._used, column + 1)
        finite = np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), values)
        cells = self._values[column, : len(values)]
        np.fmax(cells, finite.astype(np.float32), out=cells)

    def cut(self, step: int) -> None:
        """Remove `step` and everything after it, except what shares a column with an earlier step."""
        if self._origin is None:
            return
        kept = max(0, -((self._origin - step) // self._stride))
        if kept < self._used:
            self._values[kept : self._used] = np.nan
            self._used = kept
        if not kept:
            self._origin, self._stride = None, 1

    def select(self, rows: npt.NDArray[np.intp]) -> StepGrid:
        """Return a copy of some rows, in that order, to which more may be put without changing this grid."""
        copy = StepGrid(max_cells=self._max_cells, max_columns=self._max_columns)
        copy._origin, copy._stride, copy._used = self._origin, self._stride, self._used
        copy._values = np.full((self._used, len(rows)), np.nan, np.float32)
        known = rows < self._values.shape[1]
        copy._values[:, known] = self._values[: self._used, rows[known]]
        return copy

    def pool(self, max_columns: int) -> PooledGrid:
        """Return the grid in at most `max_columns` columns.

        Where data comes only every few steps, the columns are at least as wide, so that no empty ones lie between.
        """
        values = self._values[: self._used]
        filled = np.flatnonzero(~np.isnan(values).all(axis=1))
        interval = int(np.median(np.diff(filled))) if len(filled) > 1 else 1
        factor = max(1, interval, -(-self._used // max(1, max_columns)))
        num_columns = -(-self._used // factor)
        padded = np.full((num_columns * factor, values.shape[1]), np.nan, np.float32)
        padded[: self._used] = values
        pooled = np.fmax.reduce(padded.reshape(num_columns, factor, values.shape[1]), axis=1)
        return PooledGrid(self._origin or 0, self._stride * factor, np.ascontiguousarray(pooled.T))

    def _capacity(self, num_rows: int) -> int:
        return min(self._max_columns, max(MIN_COLUMNS, self._max_cells // max(1, num_rows)))

    def _add_rows(self, num_rows: int) -> None:
        while self._used > self._capacity(num_rows):
            self._halve()
        grown = np.full((self._used, num_rows), np.nan, np.float32)
        grown[:, : self._values.shape[1]] = self._values[: self._used]
        self._values = grown

    def _halve(self) -> None:
        """Merge neighbouring columns and double the stride."""
        num_columns = -(-self._used // 2)
        first = self._values[0 : self._used : 2]
        second = self._values[1 : self._used : 2]
        np.fmax(first[: len(second)], second, out=first[: len(second)])
        self._values[:num_columns] = first
        self._values[num_columns : self._used] = np.nan
        self._used = num_columns
        self._stride *= 2

    def _reserve(self, num_columns: int) -> None:
        if num_columns > len(self._values):
            size = min(self._capacity(self._values.shape[1]), max(num_columns, 2 * len(self._values)))
            grown = np.full((size, self._values.shape[1]), np.nan, np.float32)
            grown[: self._used] = self._values[: self._used]
            self._values = grown
