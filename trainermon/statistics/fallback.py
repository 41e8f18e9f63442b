"""The moments in torch calls: for accelerators, and for a CPU without the compiled kernel.

There are two ways to a row: in float64, for any dtype on any device, without a copy to the host; and in float32, for
floats of at most 32 bits on a CPU, in chunks that stay in the cache, at a tenth of the cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainermon.core.values import NO_ELEMENTS, Moments
from trainermon.statistics.layout import OtherDeviceError, no_memory, outside_transforms, plain, runs, stored_elements
from trainermon.statistics.merge import NUM_STATISTICS, merge_rows

# Elements per chunk. An accelerator wants few launches, and each temporary is 8 MiB then; a CPU makes several passes
# over a chunk, which should find it in the L2 cache.
DEVICE_CHUNK = 1 << 20
CPU_CHUNK = 1 << 16

# Magnitudes whose squares float32 can add up.
LEAST, MOST = 2.0**-40, 2.0**40


@torch.no_grad()
def moments(tensors: Sequence[Tensor], out: Tensor, first_row: int = 0) -> None:
    """Compute the eight moments of each tensor by torch calls, into the rows of `out` from `first_row` on.

    See `kernel.moments` for the contract.
    """
    for tensor in tensors:
        if tensor.device != out.device:
            raise OtherDeviceError(tensor.device, out.device)
    for row, tensor in enumerate(map(plain, tensors), start=first_row):
        with outside_transforms():
            out[row] = row_of(tensor)


def row_of(elements: Tensor) -> Tensor:
    """Return the eight moments of a tensor that `layout.plain` returned, as float64 `[8]` on its device."""
    if elements.layout is not torch.strided:
        stored = plain(stored_elements(elements))
        return _with_zeros(row_of(stored), elements.numel() * (2 if elements.is_complex() else 1) - stored.numel())
    if elements.numel() and not elements.data_ptr():
        raise no_memory(elements)
    lies = runs(elements.shape, elements.stride())
    if lies is not None and lies.num_runs == 1:
        row = _row_of_flat(elements.as_strided((lies.length,), (1,)))
        if lies.repeats > 1:
            repeat_row(row, lies.repeats)
        return row
    return _row_of_flat(elements.reshape(-1))


def repeat_row(row: Tensor, times: int) -> None:
    """Change `row`, the moments of some elements, into those of `times` copies of them, in place."""
    row[0].mul_(times)
    row[3:].mul_(times)


def _row_of_flat(flat: Tensor) -> Tensor:
    if not flat.numel():
        return merge_rows(flat.new_empty((0, NUM_STATISTICS), dtype=torch.float64))
    if flat.is_cpu and flat.is_floating_point() and flat.dtype is not torch.float64:
        return _float32_row(flat)
    rows = [_float64_row(chunk) for chunk in torch.split(flat, CPU_CHUNK if flat.is_cpu else DEVICE_CHUNK)]
    return merge_rows(torch.stack(rows)) if len(rows) > 1 else rows[0]


def _float64_row(chunk: Tensor) -> Tensor:
    """Return the moments of a chunk, summed in float64. Copies nothing to the host and does not branch on values."""
    values = chunk.to(torch.float64)
    nans, infs = values.isnan(), values.isinf()
    nonfinite = nans | infs
    finite = values.masked_fill(nonfinite, 0.0)
    return torch.stack(
        (
            torch.full((), chunk.numel(), dtype=torch.float64, device=chunk.device),
            values.masked_fill(nonfinite, torch.inf).amin(),
            values.masked_fill(nonfinite, -torch.inf).amax(),
            finite.sum(),
            finite.square_().sum(),
            *(mask.sum().to(torch.float64) for mask in (values == 0, nans, infs)),
        )
    )


def _float32_row(flat: Tensor) -> Tensor:
    """Return the moments of a CPU tensor of floats of at most 32 bits.

    Sums within a chunk are torch's, which add pairwise; its dot product and its norm do not, and are 1e-5 off for equal
    elements. A chunk's numbers are read back at once: on a CPU that waits for nothing.
    """
    length = min(CPU_CHUNK, flat.numel())
    values, squares = flat.new_empty((2, length), dtype=torch.float32)
    nonzero = flat.new_empty(length, dtype=torch.bool)
    row = NO_ELEMENTS
    for chunk in torch.split(flat, CPU_CHUNK):
        count = chunk.numel()
        if count < length:
            values, squares, nonzero = values[:count], squares[:count], nonzero[:count]
        floats = chunk if chunk.dtype is torch.float32 else values.copy_(chunk)
        zeros = count - _num_true(nonzero.copy_(floats))
        low, high = floats.amin().item(), floats.amax().item()
        nans = infs = 0
        if not (math.isfinite(low) and math.isfinite(high)):
            infinite_or_nan = _num_true(nonzero.copy_(torch.sub(floats, floats, out=squares)))
            nans = _num_true(nonzero.copy_(torch.clamp(floats, -1.0, 1.0, out=squares).sub_(squares)))
            infs = infinite_or_nan - nans
            low = torch.nan_to_num(floats, math.inf, math.inf, math.inf, out=squares).amin().item()
            high = torch.nan_to_num(floats, -math.inf, -math.inf, -math.inf, out=squares).amax().item()
            floats = torch.nan_to_num(floats, 0.0, 0.0, 0.0, out=values)
        scale = _scale(max(-low, high))
        if scale != 1.0:
            floats = torch.mul(floats, scale, out=values)
        total, total_sq = floats.sum().item() / scale, torch.mul(floats, floats, out=squares).sum().item() / scale**2
        row = row.merge(Moments(count, low, high, total, total_sq, zeros, nans, infs))
    return torch.tensor(dataclasses.astuple(row), dtype=torch.float64, device="cpu")


def _scale(magnitude: float) -> float:
    """Return the power of two that brings elements of at most `magnitude` to where float32 can add their squares."""
    if magnitude <= 0 or LEAST <= magnitude <= MOST:
        return 1.0
    return 2.0 ** min(-math.frexp(magnitude)[1], 126)


def _num_true(mask: Tensor) -> int:
    """Count the true elements, 64 at a time where they are many: 64 rows of bytes fit a byte when they are added."""
    if mask.numel() < CPU_CHUNK:
        return int(mask.count_nonzero())
    return int(mask.view(torch.int64).view(64, -1).sum(dim=0).view(torch.uint8).sum())


def _with_zeros(row: Tensor, count: int) -> Tensor:
    zeros = torch.zeros_like(row)
    zeros[0] = zeros[5] = count
    return merge_rows(torch.stack((row, zeros))) if count else row
