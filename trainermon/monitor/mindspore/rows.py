"""The moments of MindSpore's tensors: where their elements lie in memory, and the table that their rows go to.

`data_ptr` waits until pending work has written the tensor; after that the library reads its memory as it is, so there
is no copy, and no operation joins the training's own.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from trainermon.core.values import STATISTICS
from trainermon.statistics.native import KINDS, ROW_BYTES, Lies, native, pack, write_by_numpy

Rows = npt.NDArray[np.float64]

_NUM_STATISTICS = len(STATISTICS)
_SUM_SQ = STATISTICS.index("sum_sq")
# The objects that stand for dtypes are one each, and their identity is found ten times as fast as their hash.
_KIND_OF = {id(getattr(mindspore, name)): kind for name, kind in KINDS.items() if hasattr(mindspore, name)}
# A complex number counts as its two parts.
_PARTS_OF = {id(mindspore.complex64): KINDS["float32"], id(mindspore.complex128): KINDS["float64"]}

_address_of, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
_size_of, _dtype_of = operator.attrgetter("size"), operator.attrgetter("dtype")


class MomentsOfTensors:
    """Computes the rows of tensors of MindSpore that lie in the host's memory: with the compiled library, else numpy.

    Args:
        num_threads: Threads of the library; of so many it makes use from a million elements on.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self._native = native()
        self._num_threads = num_threads or _threads_of_environment()

    @property
    def name(self) -> str:
        """What computes the rows, for people."""
        return "numpy" if self._native is None else "c"

    def write(self, tensors: Sequence[Tensor], out: Rows, first: int = 0) -> None:
        """Write the eight moments of each tensor into the rows of `out` from `first` on.

        Waits for operations that have not written a tensor yet; copies only what does not lie in one piece.

        Args:
            tensors: Real and complex dtypes, empty and 0-d tensors too.
            out: float64 `[rows, 8]`, C-contiguous.
            first: Row of the first tensor.

        Raises:
            TypeError: A tensor's dtype cannot be read.
            ValueError: A tensor has elements but no memory on the host.
        """
        if not all(map(_is_contiguous, tensors)):
            tensors = [each if each.is_contiguous() else each.contiguous() for each in tensors]
        addresses, counts = [*map(_address_of, tensors)], [*map(_size_of, tensors)]
        kinds: list[Any] = [*map(_KIND_OF.get, map(id, map(_dtype_of, tensors)))]
        if None in kinds:
            counts, kinds = _of_parts(tensors, counts)
        lies = zip(addresses, counts, kinds, strict=True)
        missing = self._write_rows(lies, len(tensors), out, first)
        if missing:
            tensor = tensors[missing - 1]
            raise ValueError(
                f"{getattr(tensor, 'name', '') or 'a tensor'} of shape {tuple(tensor.shape)} has no memory on the "
                "host, expected a tensor that was computed or initialised: call init_data() on lazy parameters"
            )

    def _write_rows(self, lies: zip[Lies], count: int, out: Rows, first: int) -> int:
        if self._native is None:
            return write_by_numpy(lies, out[first:])
        packed = pack(itertools.chain.from_iterable(lies), count)
        return self._native.write(packed, count, out.ctypes.data + first * ROW_BYTES, self._num_threads)


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

    def copy_rows(self, first: int, count: int) -> Rows:
        """Return a copy of rows taken earlier, float64 `[count, 8]`."""
        rows: Rows = self._table[first : first + count].copy()
        return rows

    def put_rows(self, rows: Rows) -> int:
        """Append rows of moments; return the index of the first."""
        first = self._extend(len(rows))
        self._table[first : self.num_rows] = rows
        return first

    def any_nonfinite(self, rows: Sequence[int]) -> bool:
        """Whether one of `rows` counts a NaN or an Inf."""
        return bool(self._table[list(rows)][:, _NUM_STATISTICS - 2 :].any())

    def any_nonzero(self, rows: Sequence[int]) -> bool:
        """Whether one of `rows` has a finite element that is not zero."""
        return bool(self._table[list(rows)][:, _SUM_SQ].any())

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


def is_readable(tensor: Any) -> bool:
    """Return whether this is a dense tensor of a dtype whose elements can be read."""
    return isinstance(tensor, Tensor) and (id(tensor.dtype) in _KIND_OF or id(tensor.dtype) in _PARTS_OF)


def _of_parts(tensors: Sequence[Tensor], counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return counts and kinds where some tensor is complex."""
    of_parts: list[tuple[int, int]] = []
    for tensor, count in zip(tensors, counts, strict=True):
        number = id(tensor.dtype)
        if number not in _KIND_OF and number not in _PARTS_OF:
            raise TypeError(f"a tensor is {tensor.dtype}, expected one of {', '.join(KINDS)} or a complex dtype")
        is_complex = number in _PARTS_OF
        of_parts.append((2 * count, _PARTS_OF[number]) if is_complex else (count, _KIND_OF[number]))
    return [count for count, _ in of_parts], [kind for _, kind in of_parts]


def _threads_of_environment() -> int:
    """Return how many threads the launcher allows a rank; one where it does not say."""
    allowed = os.environ.get("OMP_NUM_THREADS", "1").split(",")[0]
    return int(allowed) if allowed.isdigit() and int(allowed) else 1
