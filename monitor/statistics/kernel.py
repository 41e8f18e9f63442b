"""The one entrance to the moments of tensors: picks the way to compute them, and takes any tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainermon.monitor.statistics import fallback


def kernel_name() -> str:
    """Return "c" if the compiled kernel serves CPU tensors, "torch" if torch calls do."""
    return "torch"


def moments(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Write the moments of each tensor into the rows of `out`.

    Args:
        tensors: tensors of any real dtype and strides, all on one device. A DTensor stands for its local shard.
        out: float64 `[len(tensors), 8]`, contiguous, on the same device; columns as in `values.STATISTICS`.
    """
    fallback.moments([_local(tensor) for tensor in tensors], out)


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor.detach(), "to_local", None)
    tensor = to_local() if to_local is not None else tensor
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
