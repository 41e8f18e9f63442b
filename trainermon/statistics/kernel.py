"""The one entrance to the moments of tensors; picks the way to compute them."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainermon.statistics import compiled, fallback
from trainermon.statistics.layout import OtherDeviceError

Way = Callable[[Sequence[Tensor], Tensor, int], None]

logger = logging.getLogger("trainermon")

_compiled = compiled.load()
write_single = compiled.load_single()
"""`write_single(tensor, address)`: write the row of one tensor to `address`, 64 bytes in the memory of the host.

Returns whether it was written. It is where the elements lie on the CPU in runs at one distance, in a dtype that the
compiled library knows; in all other cases, `write` is to be asked. The numbers are those of `write`. Cost beside the
elements: 1 us, a quarter of that of `write`.

Raises:
    RuntimeError: The elements cannot be reached (within `vmap`).
"""


def kernel_name(device: torch.device | str = "cpu") -> str:
    """Return what computes moments on `device`: "c" (the compiled library), "triton", or "torch" (torch calls)."""
    way = _way_of(torch.device(device))
    return "c" if way is _compiled else "triton" if isinstance(way, _Triton) and way.is_used else "torch"


def moments(tensors: Sequence[Tensor], out: Tensor, first_row: int = 0) -> None:
    """Compute the eight moments of each tensor (count, min, max, sum …) into the rows of `out`, from `first_row` on.

    Everything is read before this returns (CPU) or in the order of the current stream (accelerators); nothing is copied
    to the host, no communication takes place, and no tensor is changed.

    Args:
        tensors: real dtypes, any strides; empty and 0-d tensors too. A DTensor stands for its local shard, a complex
            tensor for its real and imaginary parts (twice as many elements), a sparse tensor for all its elements; see
            `layout.readable` for others.
            A tensor on another device than `out` is read where it is, and its row is copied (from an accelerator to the
            host: the only case in which this waits).
        out: float64 `[rows, 8]`, contiguous; columns as in `values.STATISTICS`. The row of a tensor without elements is
            `values.NO_ELEMENTS`. Counts, min and max are exact (for 64-bit integers: rounded to float64), the sum of
            squares to 1e-6, the sum to 1e-6 of the sum of magnitudes.
        first_row: row of the first tensor.

    Raises:
        RuntimeError: torch cannot read a tensor (torch's own error).
        ValueError: `out` does not fit, or a tensor has elements but no memory (a parameter whose storage is freed
            between uses).
    """
    if out.dtype is not torch.float64 or not out.is_contiguous() or out.numel() < 8 * (first_row + len(tensors)):
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)}, expected a contiguous float64 tensor with 8 columns and at least "
            f"{first_row + len(tensors)} rows"
        )
    write(tensors, out, first_row)


def write(tensors: Sequence[Tensor], out: Tensor, first_row: int) -> None:
    """Do what `moments` does; `out` is not checked, but must be as it says."""
    way = _way_of(out.device) if _compiled is None or not out.is_cpu else _compiled
    try:
        way(tensors, out, first_row)
    except OtherDeviceError:  # nothing was written yet
        for row, tensor in enumerate(tensors, start=first_row):
            _write_row(tensor, out, row)


def _write_row(tensor: Tensor, out: Tensor, row: int) -> None:
    if tensor.device == out.device:
        write((tensor,), out, row)
        return
    there = torch.empty((1, out.shape[-1]), dtype=torch.float64, device=tensor.device)
    write((tensor,), there, 0)
    out[row : row + 1].copy_(there, non_blocking=True)


@functools.cache
def _way_of(device: torch.device) -> Way:
    if device.type == "cpu" and _compiled is not None:
        return _compiled
    if device.type == "cuda" and os.environ.get("TRAINERMON_KERNEL") != "torch":
        return _Triton(device)
    return fallback.moments


class _Triton:
    """The Triton kernels of one CUDA device, loaded at the first call; torch calls from their first failure on."""

    def __init__(self, device: torch.device) -> None:
        self.is_used = True
        self._device = device
        self._launch: Way | None = None

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, first_row: int) -> None:
        if not self.is_used:
            fallback.moments(tensors, out, first_row)
            return
        try:
            if self._launch is None:
                from trainermon.statistics.launches import KernelLauncher

                self._launch = KernelLauncher(self._device).moments
            self._launch(tensors, out, first_row)
        except Exception as error:  # noqa: BLE001  # of a compiler, a linker or a driver: there is no common type
            fallback.moments(tensors, out, first_row)  # raises by itself what is the tensors' own fault
            self.is_used = False
            logger.warning("statistics of CUDA tensors are taken by torch calls: %s: %s", type(error).__name__, error)
