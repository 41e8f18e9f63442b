"""The signs of tensors as bitmaps, so that two runs can be compared element by element at two bits each.

A tensor of n elements has two bitmaps of ceil(n / 64) words: which elements are greater than zero, and which are less.
Zeros of either sign and NaN are in neither. Beside them stand the moments, which the same pass over memory takes, and
how the elements are distributed over intervals.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainermon.core.native.library import library
from trainermon.core.values import STATISTICS
from trainermon.statistics.kernel import moments
from trainermon.statistics.layout import no_memory, plain

WORD_BITS = 64
# In the order of KINDS in signs.c.
_KIND_OF = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


class TensorSigns(NamedTuple):
    """The signs of one tensor, on the host.

    Attributes:
        num_elements: How many elements it has.
        positive: Which are greater than zero: uint64 `[ceil(num_elements / 64)]`, element i in bit i % 64 of word
            i // 64, unused bits 0.
        negative: Likewise, which are less than zero.
        moments: The eight moments, float64 `[8]` in the order of `STATISTICS`, as `kernel.moments` gives them.
        at_most: How many are at most each bound, int64 `[num_bounds]`; NaN is at most none.
    """

    num_elements: int
    positive: npt.NDArray[np.uint64]
    negative: npt.NDArray[np.uint64]
    moments: npt.NDArray[np.float64]
    at_most: npt.NDArray[np.int64]


@torch.no_grad()
def signs_of(tensors: Sequence[Tensor], bounds: Sequence[float] = ()) -> list[TensorSigns]:
    """Return the signs and moments of each tensor, signs in the order of its elements (`tensor.flatten()`).

    Bounds are compared in the tensor's own precision, at least float32. A tensor without elements has empty bitmaps. On
    a CPU one pass by the compiled kernel, copying only what is not contiguous; on an accelerator torch calls pack the
    bits there, and a copy of two bits an element to the host waits for the device. No collective.

    Raises:
        ValueError: A tensor has elements but no memory.
    """
    scan = _compiled()
    flats = [_flat(tensor) for tensor in tensors]
    if scan is not None and all(flat.is_cpu and flat.dtype in _KIND_OF for flat in flats):
        return scan(flats, bounds)
    rows = torch.empty((len(flats), len(STATISTICS)), dtype=torch.float64, device=flats[0].device if flats else "cpu")
    moments(flats, rows)
    return [_by_torch(flat, row, bounds) for flat, row in zip(flats, rows.cpu().numpy(), strict=True)]


def _flat(tensor: Tensor) -> Tensor:
    elements = plain(tensor)
    if elements.numel() and not elements.data_ptr():
        raise no_memory(tensor)
    return elements.contiguous().view(-1)


def _by_torch(flat: Tensor, row: npt.NDArray[np.float64], bounds: Sequence[float]) -> TensorSigns:
    values = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    counts = [(values <= bound).sum() for bound in bounds]
    at_most = torch.stack(counts).cpu().numpy() if counts else np.empty(0, np.int64)
    return TensorSigns(flat.numel(), _packed(values > 0), _packed(values < 0), row, at_most)


def _packed(mask: Tensor) -> npt.NDArray[np.uint64]:
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(mask) % WORD_BITS))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    packed = (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    return packed.cpu().numpy().view(np.uint64)


class _SignKernel:
    """The compiled function, see signs.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scan = library.trainermon_signs_and_moments
        self._scan.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        self._scan.restype = None

    def __call__(self, flats: Sequence[Tensor], bounds: Sequence[float]) -> list[TensorSigns]:
        """Return the signs and moments of flat CPU tensors of dtypes in `_KIND_OF`."""
        lengths = [-(-flat.numel() // WORD_BITS) for flat in flats]
        words = np.empty(2 * sum(lengths), np.uint64)
        counts = np.zeros((len(flats), len(bounds)), np.int64)
        rows = np.empty((len(flats), len(STATISTICS)), np.float64)
        limits = np.array(bounds, np.float64)
        table, bitmaps = [], []
        begin = 0
        for flat, length, row in zip(flats, lengths, counts, strict=True):
            pair = words[begin : begin + length], words[begin + length : begin + 2 * length]
            bitmaps.append(pair)
            table.append((flat.data_ptr(), flat.numel(), _KIND_OF[flat.dtype], *map(_address, pair), _address(row)))
            begin += 2 * length
        packed = np.array(table, np.int64).reshape(-1, 6)
        self._scan(_address(packed), len(flats), _address(limits), len(bounds), _address(rows))
        return [
            TensorSigns(flat.numel(), *pair, row, at_most)
            for flat, pair, row, at_most in zip(flats, bitmaps, rows, counts, strict=True)
        ]


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


@functools.cache
def _compiled() -> _SignKernel | None:
    found = library()
    return None if found is None or not hasattr(found, "trainermon_signs_and_moments") else _SignKernel(found)
