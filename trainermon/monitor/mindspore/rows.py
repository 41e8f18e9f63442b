"""The table of a step that the rows of MindSpore's tensors go to."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from mindspore import Tensor

from trainermon.core.values import STATISTICS
from trainermon.statistics.mindspore.moments import MomentsOfTensors, Rows
from trainermon.statistics.rows import host_rows
from trainermon.statistics.rows.host_rows import Columns

_NUM_STATISTICS = len(STATISTICS)
_SUM_SQ = STATISTICS.index("sum_sq")


class HostSlab:
    """The rows of one step in the host's memory; what `statistics.slabs.Slab` is for torch, without a device.

    Attributes:
        step: The step that the rows belong to.
        num_rows: Rows taken so far.
    """

    def __init__(self, moments: MomentsOfTensors, *, capacity: int) -> None:
        self.step = -1
        self.num_rows = 0
        self._moments = moments
        self._table: Rows = np.empty((capacity, _NUM_STATISTICS))

    def take(self, tensors: Sequence[Tensor]) -> int:
        """Compute the moments of `tensors` into the next rows, and return the index of the first of them.

        They are read before this returns, and may be changed or freed right after.
        """
        first = self._extend(len(tensors))
        self._moments.write(tensors, self._table, first)
        return first

    def count(self, rows: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Take no histograms: MindSpore's configuration cannot ask for them."""

    def has_histogram(self, row: int) -> bool:
        """Whether a row was given a histogram: none was."""
        del row
        return False

    def histograms(self) -> tuple[Mapping[int, int], Rows]:
        """Return the histograms that there are: none."""
        return {}, self._table[:0]

    def copy_rows(self, first: int, count: int) -> Rows:
        """Return a copy of rows taken earlier, float64 `[count, 8]`."""
        rows: Rows = self._table[first : first + count].copy()
        return rows

    def put_rows(self, rows: Rows) -> int:
        """Append rows of moments; return the index of the first."""
        first = self._extend(len(rows))
        self._table[first : self.num_rows] = rows
        return first

    def norm(self, rows: Sequence[int]) -> float:
        """Return the norm of the tensors of `rows`, all together; NaN if there is one in them."""
        return host_rows.norm(self._table, host_rows.address_of(self._table), rows)

    def any_nonfinite(self, rows: Sequence[int]) -> bool:
        """Whether one of `rows` counts a NaN or an Inf."""
        return bool(self._table[list(rows)][:, _NUM_STATISTICS - 2 :].any())

    def any_nonzero(self, rows: Sequence[int]) -> bool:
        """Whether one of `rows` has a finite element that is not zero."""
        return bool(self._table[list(rows)][:, _SUM_SQ].any())

    def write_columns(self, columns: Columns, scalars: Collection[float]) -> None:
        """Write rows, and single numbers, into `columns`."""
        columns.write(self._table, host_rows.address_of(self._table), scalars)

    def rows(self) -> Rows:
        """Return the rows, float64 `[num_rows, 8]`; they are valid until the slab is used for another step."""
        return self._table[: self.num_rows]

    def _open(self, step: int) -> None:
        self.step = step
        self.num_rows = 0

    def _extend(self, count: int) -> int:
        first = self.num_rows
        self.num_rows = first + count
        if self.num_rows > len(self._table):
            grown = np.empty((max(self.num_rows, 2 * len(self._table)), _NUM_STATISTICS))
            grown[:first] = self._table[:first]
            self._table = grown
        return first


class HostSlabRing:
    """Slabs that are used in turn, of which each is ready as soon as it is sealed; see `statistics.slabs.SlabRing`."""

    def __init__(self, moments: MomentsOfTensors, *, capacity: int = 1024) -> None:
        self._moments = moments
        self._capacity = capacity
        self._free: list[HostSlab] = []
        self._sealed: deque[HostSlab] = deque()

    def begin(self, step: int) -> HostSlab:
        """Open a slab for `step`. Several may be open at a time."""
        slab = self._free.pop() if self._free else HostSlab(self._moments, capacity=self._capacity)
        slab._open(step)
        return slab

    def seal(self, slab: HostSlab) -> None:
        """End the step of an open slab."""
        self._sealed.append(slab)

    def ready(self) -> list[HostSlab]:
        """Return the sealed slabs, oldest first. Give each back by `put_back`."""
        slabs = list(self._sealed)
        self._sealed.clear()
        return slabs

    def flush(self) -> list[HostSlab]:
        """Return the sealed slabs, oldest first: they are ready."""
        return self.ready()

    def put_back(self, slab: HostSlab) -> None:
        """Make a slab available for another step; its rows are valid no more."""
        self._free.append(slab)
