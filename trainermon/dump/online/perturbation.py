"""How the inputs of a call are moved: every number of a floating type, in keywords and lists too."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainermon.dump.online.options import Perturbation

# Of the inputs' size; msprobe's values. float64 is left alone: nothing finer could predict what follows.
_NOISE = {torch.bfloat16: 1e-4, torch.float16: 1e-6, torch.float32: 1e-8}
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_PERIOD = 65_521
_SEEDS = 1 << 16
_UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def mover_of(mode: Perturbation, seed: int) -> Callable[[Any], Any]:
    """Return what moves a leaf of a call's arguments in `mode`; `seed` chooses the signs of the noise.

    A leaf that is no tensor of 16 or 32 bits stays as it is. Nothing is written to. Signs differ from one tensor to the
    next: moved alike, two that are subtracted would hide that they cancel. One that is given twice is moved alike.
    """
    places: dict[int, int] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in _NOISE or not value.numel():
            return value
        match mode:
            case Perturbation.ADD_NOISE:
                place = places.setdefault(value.data_ptr(), len(places))
                return _with_noise(value, seed + _SEEDS * place)
            case Perturbation.BIT_NOISE:
                return _with_flipped_bit(value)
            case Perturbation.CHANGE_VALUE:
                return _with_ends_swapped(value)
            case _:
                return value

    return move


def _with_noise(value: Tensor, seed: int) -> Tensor:
    """Move each element by a relative noise of either sign, of two roundoffs at least: less would be rounded away."""
    size = max(_NOISE[value.dtype], 4 * _UNITS[value.dtype])
    factors = _factors(value.dtype, value.device, size, seed)
    if not value.is_contiguous():
        repeated = factors.repeat(-(-value.numel() // _PERIOD))[: value.numel()]
        return value * repeated.view(value.shape)
    moved = torch.empty_like(value, memory_format=torch.contiguous_format)
    rows, rest = divmod(value.numel(), _PERIOD)
    given, made = value.view(-1), moved.view(-1)
    end = rows * _PERIOD
    torch.mul(given[:end].view(rows, _PERIOD), factors, out=made[:end].view(rows, _PERIOD))
    torch.mul(given[end:], factors[:rest], out=made[end:])
    return moved


@functools.lru_cache(maxsize=16)
def _factors(dtype: torch.dtype, device: torch.device, size: float, seed: int) -> Tensor:
    """Return a row of factors 1 ± `size`; its length is a prime, so that rows of a tensor get different signs."""
    signs = torch.randint(0, 2, (_PERIOD,), generator=torch.Generator().manual_seed(seed))
    return (1 + (2 * signs - 1) * size).to(device, dtype)


def _with_flipped_bit(value: Tensor) -> Tensor:
    """Flip the last bit of each normal number."""
    whole = value.contiguous().view(_BITS[value.dtype])
    size = whole & torch.iinfo(whole.dtype).max  # magnitudes are in the order of their bits
    smallest, infinite = _ends(value.dtype)
    return (whole ^ ((size >= smallest) & (size < infinite))).view(value.dtype)


@functools.cache
def _ends(dtype: torch.dtype) -> tuple[int, int]:
    """Return the bits of the smallest normal number of a type, and of infinity."""
    numbers = torch.tensor([torch.finfo(dtype).tiny, math.inf], dtype=dtype)
    smallest, infinite = numbers.view(_BITS[dtype]).tolist()
    return smallest, infinite


def _with_ends_swapped(value: Tensor) -> Tensor:
    """Swap the first and the last element."""
    if value.numel() < 2:
        return value
    swapped = value.clone(memory_format=torch.contiguous_format)
    flat = swapped.view(-1)
    flat[[0, -1]] = flat[[-1, 0]]
    return swapped
