"""The one entrance to the moments of tensors; picks the way to compute them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainermon.monitor.statistics import compiled, fallback

_compiled = compiled.load()


def kernel_name() -> str:
    """Return "c" if the compiled kernel serves CPU tensors, "torch" if torch calls do."""
    return "torch" if _compiled is None else "c"


def moments(tensors: Sequence[Tensor], out: Tensor, first_row: int = 0) -> None:
    """Write the moments of each tensor into the rows of `out`, from `first_row` on.

    Everything is read before this returns (CPU) or in the order of the current stream (accelerators); nothing is copied
    to the host, no communication takes place, and no tensor is changed.

    Args:
        tensors: real dtypes, any strides; empty and 0-d tensors too. A DTensor stands for its local shard, a complex
            tensor for its real and imaginary parts (twice as many elements), a sparse COO tensor for all its elements.
        out: float64 `[rows, 8]`, contiguous, on the tensors' device; columns as in `values.STATISTICS`. The row of a
            tensor without elements is `values.NO_ELEMENTS`. Counts, min and max are exact (for 64-bit integers: rounded
            to float64), the sum of squares to 1e-6, the sum to 1e-6 of the sum of magnitudes.
        first_row: row of the first tensor.

    Raises:
        TypeError: a tensor is quantized.
        RuntimeError: a tensor is sparse in a layout other than COO (torch's own error).
        ValueError: `out` does not fit, a tensor is on another device, or has elements but no memory (a parameter whose
            storage is freed between uses).
    """
    if out.dtype is not torch.float64 or not out.is_contiguous() or out.numel() < 8 * (first_row + len(tensors)):
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)}, expected a contiguous float64 tensor with 8 columns and at least "
            f"{first_row + len(tensors)} rows"
        )
    if _compiled is not None and out.is_cpu:
        _compiled(tensors, out, first_row)
    else:
        fallback.moments(tensors, out, first_row)
