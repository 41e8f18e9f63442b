"""Checksums of tensors: equal for replicas that are equal bit for bit, whatever the order of their elements.

Of each element the bits count, taken as a signed integer `w` of the element's size. The checksum is

    sum of w * (w + MULTIPLIER), modulo 2^64

that is, the sum of squares plus MULTIPLIER times the sum. It needs one pass and no order: shards may be added up, and
neither threads nor the device change it. What it sees, and what not:

* One element that changed, in whichever bits, is always seen; in dtypes of 64 bits unless it became the one value of
  2^64 with which it adds up to -MULTIPLIER. The difference is `d * (2 w + d + MULTIPLIER)`: for an even `d` the second
  factor is odd, for an odd one it is not zero.
* Two that changed in opposite directions by the same number of steps, as rounding errors of ranks that compute in
  different ways do, would cancel in a mere sum; they cancel here only if the two elements have swapped their values.
* Any number of arbitrary changes goes unseen with a probability of about 2^-64.
* Elements that have changed places are not seen: that is what not depending on an order means.
* +0 and -0 are different bits, so are NaNs of different payloads. A replica that is equal in value only is reported.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from trainermon.core.native.library import library
from trainermon.core.values import STATISTICS
from trainermon.statistics.layout import no_memory, plain, runs

MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, and far from the squares of 32-bit integers: 2^64 over the golden ratio, as an int64."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = 0xFFFFFFFF
# Elements that are widened to 64 bits at a time: few launches on an accelerator, the L2 cache on a CPU.
DEVICE_PIECE, CPU_PIECE = 1 << 22, 1 << 15
SHORT_ROW = 32
"""Elements of a row below which torch calls over all rows cost less than a row after the other."""


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the checksum of each tensor, int64 `[n]` on the device of the first; 0 for a tensor without elements.

    Everything is read before this returns (CPU) or in the order of the current stream (accelerators). Nothing is copied
    to the host and nothing communicated. Cost: one pass at about the read limit of a CPU with the compiled kernel; by
    torch calls about six times that, and on an accelerator 64 MiB for what is being widened.

    Raises:
        ValueError: A tensor has elements but no memory.
    """
    flats = [_integers(tensor) for tensor in tensors]
    scan = _compiled()
    if scan is not None and all(flat.is_cpu for flat in flats):
        return scan(flats)
    return torch.stack([_by_torch(flat).to(flats[0].device, non_blocking=True) for flat in flats])


@torch.no_grad()
def row_checksums(tensor: Tensor) -> Tensor:
    """Return the checksum of each part along the first dimension, int64 `[rows]` on the tensor's device.

    A scalar is one row. They add up to the checksum of the tensor, and those of parts of a row to that of the row.
    Reads, waits and costs as `checksums` does where rows have some hundred elements or more.

    Raises:
        ValueError: The tensor has elements but no memory.
    """
    flat = _integers(plain(tensor).contiguous())  # rows as they are counted, not as memory has them
    num_rows = tensor.shape[0] if tensor.dim() else 1
    rows = flat.reshape(num_rows, -1) if flat.numel() else flat.reshape(num_rows, 0)
    scan = _compiled()
    if scan is not None and flat.is_cpu and rows.shape[1] >= SHORT_ROW:
        return scan.rows(rows)
    pieces = torch.split(rows, max(1, (CPU_PIECE if flat.is_cpu else DEVICE_PIECE) // max(1, rows.shape[1])))
    return torch.cat([_of_rows(piece) for piece in pieces])


@torch.no_grad()
def rows_of(sums: Tensor) -> Tensor:
    """Pack 64-bit checksums into rows like those of moments, float64 [n, 8], so that they travel in the journal.

    A row is that of two elements, both exact in float64: the low 32 bits (column `min`), and 2^32 plus the high 32 bits
    (column `max`). No synchronisation.
    """
    low = (sums & _MASK).to(torch.float64)
    high = ((sums >> 32) & _MASK).to(torch.float64) + 2.0**32
    rows = sums.new_zeros((len(sums), len(STATISTICS)), dtype=torch.float64)
    columns = {"count": torch.full_like(low, 2.0), "min": low, "max": high, "sum": low + high}
    columns |= {"sum_sq": low * low + high * high, "zeros": (low == 0).to(torch.float64)}
    for name, column in columns.items():
        rows[:, STATISTICS.index(name)] = column
    return rows


def _integers(tensor: Tensor) -> Tensor:
    """Return the elements' bits as a flat tensor of integers; a view wherever the elements lie side by side."""
    elements = plain(tensor)
    if elements.numel() and not elements.data_ptr():
        raise no_memory(tensor)
    lies = runs(elements.shape, elements.stride())
    if lies is None or lies.num_runs > 1 or lies.repeats > 1 or elements.data_ptr() % elements.element_size():
        elements = elements.clone(memory_format=torch.contiguous_format)
    return elements.as_strided((elements.numel(),), (1,)).view(_INTEGERS[elements.element_size()])


def _by_torch(flat: Tensor) -> Tensor:
    total = flat.new_zeros((), dtype=torch.int64)
    for piece in torch.split(flat, CPU_PIECE if flat.is_cpu else DEVICE_PIECE):
        total += _of_cpu_piece(piece) if flat.is_cpu else _of_device_piece(piece)
    return total


def _of_cpu_piece(piece: Tensor) -> Tensor:
    wide = piece.to(torch.int64)  # a CPU's sum that widens by itself is three times slower
    return (wide + MULTIPLIER).mul_(wide).sum()


def _of_device_piece(piece: Tensor) -> Tensor:
    """Widen no further than squares need, and have `sum` do the rest: a third of the memory traffic for 16 bits."""
    wide = piece.to(torch.int32 if piece.element_size() <= 2 else torch.int64)
    return (wide * wide).sum(dtype=torch.int64) + piece.sum(dtype=torch.int64) * MULTIPLIER


def _of_rows(rows: Tensor) -> Tensor:
    wide = rows.to(torch.int64)
    return (wide + MULTIPLIER).mul_(wide).sum(dim=1)


class _ChecksumKernel:
    """The compiled function, see checksums.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scan = library.trainermon_checksums
        self._scan.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
        self._scan.restype = None

    def __call__(self, flats: Sequence[Tensor]) -> Tensor:
        """Return the checksums of flat CPU tensors of integers, int64 `[n]`."""
        return self._of(
            torch.tensor([(f.data_ptr(), f.numel(), f.element_size()) for f in flats], dtype=torch.int64, device="cpu")
        )

    def rows(self, rows: Tensor) -> Tensor:
        """Return the checksums of the rows of a contiguous CPU matrix of integers, int64 `[rows]`."""
        lies = torch.empty((len(rows), 3), dtype=torch.int64, device="cpu")
        size = rows.shape[1] * rows.element_size()
        torch.arange(len(rows), out=lies[:, 0]).mul_(size).add_(rows.data_ptr())
        lies[:, 1], lies[:, 2] = rows.shape[1], rows.element_size()
        return self._of(lies)

    def _of(self, lies: Tensor) -> Tensor:
        """Return the checksums of what lies at `[n, 3]` addresses, counts and sizes of elements."""
        sums = torch.empty((len(lies), 2), dtype=torch.int64, device="cpu")
        self._scan(lies.data_ptr(), len(lies), sums.data_ptr(), torch.get_num_threads())
        return sums[:, 1] + sums[:, 0] * MULTIPLIER


@functools.cache
def _compiled() -> _ChecksumKernel | None:
    found = library()
    return None if found is None or not hasattr(found, "trainermon_checksums") else _ChecksumKernel(found)
