"""How far two results of one call are apart, where neither is the better one."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainermon.accuracy.judge import Judgement, Status
from trainermon.accuracy.places import index_at, place_of

_LEAST = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-4}


class Apart(NamedTuple):
    """How far two results are apart.

    Attributes:
        max_rel: The largest ratio of two elements, less 1; NaN if one of the two alone is not finite.
        flips: Whether an element has the opposite sign.
    """

    max_rel: float = math.nan
    flips: bool = False


def repetition(one: Tensor, other: Tensor) -> Judgement:
    """Return the verdict on a call's result and on what a repetition of it gave.

    They must have the same bits; NaN is as good as any other NaN.
    """
    found = dataclasses.replace(passed(one), status=Status.ERROR, reason="nondeterministic")
    if one.shape != other.shape or one.dtype != other.dtype:
        return found
    differs = (one != other) & ~(one.isnan() & other.isnan())
    if bool(differs.any()):
        at = int(differs.flatten().to(torch.uint8).argmax())
        return dataclasses.replace(
            found,
            worst=math.inf,
            index=index_at(at, one.shape),
            device_value=other.flatten()[at].item(),
            golden_value=one.flatten()[at].item(),
            share_above=float(differs.double().mean()),
            place=place_of(differs.cpu()),
        )
    return passed(one)


def ratio_of(one: Tensor, other: Tensor) -> Apart:
    """Return how far two results are apart, by the numbers of msprobe.

    Magnitudes below the square root of the type's noise count as that. NaN on either side alone gives NaN.
    """
    if not one.is_floating_point() or not one.numel() or one.shape != other.shape:
        return Apart(0.0)
    least = _LEAST.get(one.dtype, 1e-4)
    left, right = one.float(), other.float()
    both = left.isfinite() & right.isfinite()
    if bool((left.isnan() != right.isnan()).any()):
        return Apart()
    flips = bool(((left * right < -(least**2)) & both).any())
    left, right = left.abs().clamp(min=least), right.abs().clamp(min=least)
    ratio = torch.where(both | (left != right), torch.maximum(left / right, right / left), 1.0)
    return Apart(float(ratio.nan_to_num(nan=1.0, posinf=math.inf).max()) - 1, flips)


def passed(tensor: Tensor) -> Judgement:
    """Return a pass whose error was not measured."""
    return Judgement(status=Status.PASS, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
