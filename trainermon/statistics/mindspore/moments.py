"""The moments of MindSpore's tensors: where their elements lie in memory, and what is read there.

`data_ptr` waits until pending work has written the tensor; after that the library reads its memory as it is, so there
is no copy, and no operation joins the training's own.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Tensor

from trainermon.statistics.native import KINDS, ROW_BYTES, Lies, native, pack, write_by_numpy

Rows = npt.NDArray[np.float64]

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

    def write_arrays(self, arrays: Sequence[npt.NDArray[Any]], out: Rows) -> None:
        """Write the eight moments of arrays of numpy into the rows of `out`.

        Args:
            arrays: C-contiguous, of dtypes in `KINDS`, empty and 0-d ones too.
            out: float64 `[arrays, 8]`, C-contiguous.
        """
        lies = ((each.ctypes.data, each.size, KINDS[each.dtype.name]) for each in arrays)
        self._write_rows(lies, len(arrays), out, 0)

    def _write_rows(self, lies: Iterable[Lies], count: int, out: Rows, first: int) -> int:
        if self._native is None:
            return write_by_numpy(lies, out[first:])
        packed = pack(itertools.chain.from_iterable(lies), count)
        return self._native.write(packed, count, out.ctypes.data + first * ROW_BYTES, self._num_threads)


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
