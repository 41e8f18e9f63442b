"""The histograms in torch calls: for accelerators, and for a CPU without the compiled library."""

from __future__ import annotations

import torch
from torch import Tensor

from trainermon.core.values import LEAST_EXPONENT, NONFINITE_BIN, NUM_BINS, NUM_EXPONENTS, ZERO_BIN

DEVICE_CHUNK = 1 << 20  # elements; each temporary is 8 MiB at most
CPU_CHUNK = 1 << 16
_OVER = NUM_EXPONENTS + 1
_FIRST = 127 + LEAST_EXPONENT - 1  # the biased exponent, as float32 has it, of what is below the least exponent


def count_on_cpu(flat: Tensor, row: Tensor) -> None:
    """Add the counts of a flat CPU tensor to `row`, int64 `[128]`."""
    for chunk in torch.split(flat, CPU_CHUNK):
        row += torch.bincount(_bins(chunk), minlength=NUM_BINS)


def count_by_sorting(flat: Tensor, row: Tensor) -> None:
    """Add the counts of a flat tensor on any device to `row`, int64 `[128]` there.

    By sorting: `bincount` waits for the device, `histc` counts in float32, and both add up atomically, which torch
    refuses where it was told to be deterministic.
    """
    edges = torch.arange(NUM_BINS + 1, dtype=torch.int32, device=flat.device)
    for chunk in torch.split(flat, DEVICE_CHUNK):
        row += torch.searchsorted(_bins(chunk).sort().values, edges).diff()


def _bins(chunk: Tensor) -> Tensor:
    """Return the number of each element's bin, int32 `[n]`."""
    floats = _as_float32(chunk)
    bits = floats.view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF
    exponents = magnitudes >> 23
    places = (exponents - _FIRST).clamp_(0, _OVER)
    bins = torch.where(bits < 0, ZERO_BIN - 1 - places, ZERO_BIN + 1 + places)
    bins.masked_fill_(magnitudes == 0, ZERO_BIN)
    return bins.masked_fill_(exponents == 0xFF, NONFINITE_BIN)


def _as_float32(chunk: Tensor) -> Tensor:
    """Return float32 numbers of the same bins.

    float64 is brought within float32's range first; its mantissa is cut off, since rounding may lead to the next power
    of two.
    """
    if chunk.dtype is torch.float32:
        return chunk
    if chunk.dtype is not torch.float64 and chunk.is_floating_point():
        return chunk.to(torch.float32)
    wide = (chunk.to(torch.float64).view(torch.int64) & ~0xFFFFFFFFFFFFF).view(torch.float64)
    least, most = 2.0 ** (LEAST_EXPONENT - 1), 2.0 ** (LEAST_EXPONENT + NUM_EXPONENTS)
    narrow = wide.abs().clamp_(least, most).copysign_(wide)
    narrow = torch.where(chunk == 0, 0.0, narrow)
    return torch.where(torch.isfinite(chunk), narrow, torch.inf).to(torch.float32)
