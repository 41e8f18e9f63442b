"""How the inputs of a call are moved: every number of a floating type, in keywords and lists too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainermon.dump.online.options import Perturbation

# Of the inputs' size; msprobe's values. float64 is left alone: nothing finer could predict what follows.
_NOISE = {torch.bfloat16: 1e-4, torch.float16: 1e-6, torch.float32: 1e-8}
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def mover_of(mode: Perturbation, seed: int) -> Callable[[Any], Any]:
    """Return what moves a leaf of a call's arguments in `mode`; `seed` chooses the signs of the noise.

    A leaf that is no tensor of 16 or 32 bits stays as it is. Tensors are copies that may be written to.
    """
    generator = torch.Generator().manual_seed(seed)

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in _NOISE or not value.numel():
            return value
        match mode:
            case Perturbation.ADD_NOISE:
                return _with_noise(value, generator)
            case Perturbation.BIT_NOISE:
                return _with_flipped_bit(value)
            case Perturbation.CHANGE_VALUE:
                return _with_ends_swapped(value)
            case _:
                return value

    return move


def _with_noise(value: Tensor, generator: torch.Generator) -> Tensor:
    """Move each element by a relative noise of either sign, of two roundoffs at least: less would be rounded away."""
    size = max(_NOISE[value.dtype], 4 * _UNITS[value.dtype])
    signs = torch.randint(0, 2, (value.numel(),), generator=generator, dtype=torch.int8).view(value.shape)
    moved = value.addcmul(value, (2 * signs - 1).to(value.device, value.dtype), value=size)
    return torch.where(value.isfinite(), moved, value)


def _with_flipped_bit(value: Tensor) -> Tensor:
    """Flip the last bit of each normal number."""
    whole = value.contiguous().view(_BITS[value.dtype])
    normal = (value.abs() >= torch.finfo(value.dtype).tiny) & value.isfinite()
    return torch.where(normal, (whole ^ 1).view(value.dtype).view(value.shape), value)


def _with_ends_swapped(value: Tensor) -> Tensor:
    """Swap the first and the last element."""
    if value.numel() < 2:
        return value
    swapped = value.clone(memory_format=torch.contiguous_format)
    flat = swapped.view(-1)
    flat[[0, -1]] = flat[[-1, 0]]
    return swapped
