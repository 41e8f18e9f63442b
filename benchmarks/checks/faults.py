"""What a broken device may do to a result: each fault has a size and a place, and changes at least one element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from trainermon.accuracy.reference import unit_roundoff

ROUNDOFFS = (1, 2, 4, 8, 16, 64, 256, 1024)
_TAIL = 0.02


class ResultFault(NamedTuple):
    """A change of a result.

    Attributes:
        name: What is wrong, in a few words.
        kind: `gross`, `scale` or `noise`.
        roundoffs: Its size in roundoffs of the result's type, of the last two kinds.
        change: Returns the changed result; the same if the fault means nothing for it.
    """

    name: str
    kind: str
    change: Callable[[Tensor, Generator], Tensor]
    roundoffs: int = 0


def result_faults() -> Iterator[ResultFault]:
    """Yield all faults."""
    yield ResultFault("one NaN", "gross", lambda given, draws: _one(given, draws, lambda _: math.nan))
    yield ResultFault("one infinite", "gross", lambda given, draws: _one(given, draws, lambda _: math.inf))
    yield ResultFault("one a tenth larger", "gross", lambda given, draws: _one(given, draws, lambda one: 1.1 * one))
    yield ResultFault("one ten times larger", "gross", lambda given, draws: _one(given, draws, lambda one: 10 * one))
    yield ResultFault("one with the other sign", "gross", lambda given, draws: _one(given, draws, lambda one: -one))
    yield ResultFault("the tail is zero", "gross", _without_tail)
    yield ResultFault("two rows exchanged", "gross", _exchanged)
    yield ResultFault("off by one element", "gross", lambda given, _: given.flatten().roll(1).view(given.shape))
    yield ResultFault("twice as large", "gross", lambda given, _: given * 2)
    yield ResultFault("all zero", "gross", lambda given, _: torch.zeros_like(given))
    for number in ROUNDOFFS:
        yield ResultFault("scaled", "scale", _scaled(number), number)
        yield ResultFault("noise", "noise", _noisy(number), number)


def _one(given: Tensor, draws: Generator, change: Callable[[complex | float], complex | float]) -> Tensor:
    flat = given.flatten().clone()
    places = (flat.isfinite() & (flat != 0)).nonzero()[:, 0]
    if len(places):
        at = int(places[int(torch.randint(len(places), (), generator=draws))])
        flat[at] = change(flat[at].item())
    return flat.view(given.shape)


def _without_tail(given: Tensor, _: Generator) -> Tensor:
    flat = given.flatten().clone()
    flat[-max(1, int(_TAIL * flat.numel())) :] = 0
    return flat.view(given.shape)


def _exchanged(given: Tensor, _: Generator) -> Tensor:
    if not given.dim() or given.shape[0] < 2:
        return given
    order = torch.arange(given.shape[0])
    order[0], order[-1] = order[-1].item(), order[0].item()
    return given[order]


def _scaled(roundoffs: int) -> Callable[[Tensor, Generator], Tensor]:
    return lambda given, _: _as(given, 1 + roundoffs * unit_roundoff(given.dtype))


def _noisy(roundoffs: int) -> Callable[[Tensor, Generator], Tensor]:
    def change(given: Tensor, draws: Generator) -> Tensor:
        noise = 2.0 * torch.randint(2, given.shape, generator=draws) - 1
        return _as(given, 1 + roundoffs * unit_roundoff(given.dtype) * noise)

    return change


def _as(given: Tensor, factor: Tensor | float) -> Tensor:
    wide = given.to(torch.complex128 if given.is_complex() else torch.float64)
    return (wide * factor).to(given.dtype)
