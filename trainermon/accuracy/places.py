"""Where in a tensor its wrong elements are: one element, a row, a column, a tile, the tail, or all over."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_EDGE_SHARE = 0.9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the wrong elements of a tensor are.

    Attributes:
        kind: `element`, `row`, `column`, `tail`, `tile`, `scattered` or `everywhere`.
        begin: The least index of a wrong element along each dimension.
        end: One more than the largest.
        number: How many elements are wrong.
    """

    kind: str
    begin: tuple[int, ...]
    end: tuple[int, ...]
    number: int

    def text(self) -> str:
        """Return the place in words: `tile [0:16, 32:48], 256 elements`."""
        spans = ", ".join(
            f"{low}" if high == low + 1 else f"{low}:{high}" for low, high in zip(self.begin, self.end, strict=True)
        )
        return f"{self.kind} [{spans}], {self.number} element{'s' * (self.number != 1)}"


def index_at(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element by its number in memory order; torch's own loads a library for algebra.

    >>> index_at(7, (2, 3, 2))
    (1, 0, 1)
    """
    found = []
    for size in reversed(shape):
        number, place = divmod(number, size)
        found.append(place)
    return tuple(reversed(found))


def place_of(wrong: Tensor) -> Place:
    """Return the place of the true elements of a boolean tensor, which has at least one.

    >>> wrong = torch.zeros(8, 8, dtype=torch.bool)
    >>> wrong[3] = True
    >>> place_of(wrong).text()
    'row [3, 0:8], 8 elements'
    """
    number = int(wrong.sum())
    found = wrong.nonzero()
    if not wrong.dim():
        return Place(kind="element", begin=(), end=(), number=1)
    begin = tuple(found.amin(0).tolist())
    end = tuple((found.amax(0) + 1).tolist())
    return Place(kind=_kind(wrong, begin, end, number), begin=begin, end=end, number=number)


def _kind(wrong: Tensor, begin: tuple[int, ...], end: tuple[int, ...], number: int) -> str:
    if number == 1 or number > wrong.numel() / 2:
        return "element" if number == 1 else "everywhere"
    box = math.prod(high - low for low, high in zip(begin, end, strict=True))
    full = [low == 0 and high == size for low, high, size in zip(begin, end, wrong.shape, strict=True)]
    thin = [high == low + 1 for low, high in zip(begin, end, strict=True)]
    if _is_tail(wrong, number):
        return "tail"
    if number < _EDGE_SHARE * box:
        return "scattered"
    straight = all(one or whole for one, whole in zip(thin[:-1], full[:-1], strict=True))
    if straight and full[-1] and wrong.dim() > 1:
        return "row"
    return "column" if straight and thin[-1] else "tile"


def _is_tail(wrong: Tensor, number: int) -> bool:
    """Return whether the wrong elements are the last ones in memory order, but for a few that came out right."""
    first = int(wrong.flatten().to(torch.uint8).argmax())
    behind = wrong.numel() - first
    return first > 0 and number >= _EDGE_SHARE * behind
