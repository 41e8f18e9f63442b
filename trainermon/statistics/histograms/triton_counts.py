"""The histogram of a tensor on a GPU, in Triton: one pass over memory, one program for each chunk of elements.

A program counts its chunk on chip and adds that to the row by atomic additions of integers, whose order does not
matter. Importing this module needs triton.
"""

# A kernel's arguments are pointers and scalars that Triton types at each launch; capitals are compile-time constants.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainermon.core import values
from trainermon.statistics.histograms import torch_counts
from trainermon.statistics.triton_kernel import _as_float32

DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
LANES = tl.constexpr(1024)
CHUNK = tl.constexpr(1024 * 16)  # elements of one program

BINS, ZERO, NOT_FINITE = map(tl.constexpr, (values.NUM_BINS, values.ZERO_BIN, values.NONFINITE_BIN))
OVER = tl.constexpr(values.NUM_EXPONENTS + 1)
BELOW = tl.constexpr(values.LEAST_EXPONENT - 1)


def count_chunks(flat: Tensor, row: Tensor) -> None:
    """Add the counts of a flat GPU tensor that has elements to `row`, int64 `[128]` on the same device."""
    if flat.dtype not in DTYPES:
        torch_counts.count_by_sorting(flat, row)
        return
    num_chunks = -(-flat.numel() // CHUNK.value)
    _count[(num_chunks,)](flat, flat.numel(), row)


@triton.jit(do_not_specialize=["count"])
def _count(elements, count, row):
    first = tl.program_id(0).to(tl.int64) * CHUNK
    inside = tl.minimum(count - first, CHUNK).to(tl.int32)
    counts = tl.zeros((BINS,), tl.int32)
    num_read = 0
    for start in range(0, inside, LANES):
        index = start + tl.arange(0, LANES)
        value = tl.load(elements + first + index, mask=index < inside, other=0.0)
        counts += tl.histogram(_bin_of(value), BINS)
        num_read += LANES
    bins = tl.arange(0, BINS)
    counts -= tl.where(bins == ZERO, num_read - inside, 0)  # what was read beyond the end, as zeros
    tl.atomic_add(row + bins, counts.to(tl.int64), mask=counts > 0)


@triton.jit
def _bin_of(value):
    if value.dtype == tl.float64:
        bits = value.to(tl.int64, bitcast=True)
        magnitude = bits & 0x7FFFFFFFFFFFFFFF
        exponent, bias, special = (magnitude >> 52).to(tl.int32), 1023, 2047
    else:
        bits = _as_float32(value).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        exponent, bias, special = magnitude >> 23, 127, 255
    place = tl.minimum(tl.maximum(exponent - bias - BELOW, 0), OVER)
    bin = tl.where(bits < 0, ZERO - 1 - place, ZERO + 1 + place)
    bin = tl.where(magnitude == 0, ZERO, bin)
    return tl.where(exponent == special, NOT_FINITE, bin).to(tl.int32)
