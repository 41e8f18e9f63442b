"""Errors of a gradient as a whole: how large they may be together, and whether they all are one factor.

Rounding is up at one element and down at the next, so the errors of many elements have no direction in common, and
come to much less than what each of them is allowed. A term that is scaled wrongly is off by the same factor everywhere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_SHARE = 0.25
_FACTOR = 12.0
_CERTAIN = 8.0
_ENOUGH = 8.0
_SWAMPED = 0.125
_MOSTLY, _LEFT = 0.5, 0.25


class CommonFactor(NamedTuple):
    """How much of an error is a multiple of one part of a result.

    Attributes:
        factor: The multiple.
        share: Which share of the error's square it is, from 0 to 1.
        number: How many elements say so: of equal size it would be that many.
    """

    factor: float
    share: float
    number: float

    def is_systematic(self, unit: float, most: float = _FACTOR) -> bool:
        """Return whether rounding to `unit` cannot be why: it is too large, and no accident of so many elements.

        `most` is how many roundoffs it may be.
        """
        if self.number < _ENOUGH or abs(self.factor) <= most * unit:
            return False
        rest = max(1 - self.share, 1e-300)
        return math.sqrt(self.share * (self.number - 1) / rest) > _CERTAIN


def common_factor(error: Tensor, part: Tensor) -> CommonFactor:
    """Return how much of `error` is a multiple of `part`; nothing of errors that are not finite."""
    error, part = _real(error), _real(part)
    both, square = float((error * part).sum()), float(part.square().sum())
    total = float(error.square().sum())
    if not (math.isfinite(total * square) and total * square > 0):
        return CommonFactor(0.0, 0.0, 0.0)
    return CommonFactor(both / square, both * both / (square * total), num_alike(part))


def num_alike(sizes: Tensor) -> float:
    """Return how many elements of one size have the same squares together, and the same sum of their fourth powers."""
    squares = sizes.abs().square()
    fourth = float(squares.square().sum())
    return float(squares.sum()) ** 2 / fourth if fourth > 0 and math.isfinite(fourth) else 0.0


def allowed_norm(allowed: Tensor) -> float:
    """Return the norm that errors may have together, each within what is `allowed` to it.

    A quarter of the norm of that where there are many: most are far below, as it is made for the worst of them.
    """
    number = num_alike(allowed)
    if not number:
        return math.inf
    return min(1.0, _SHARE + 1 / math.sqrt(number)) * float(allowed.norm())


def is_swamped(total: Tensor, turned: Tensor, unit: float) -> bool:
    """Return whether a sum rounded to `unit` after each term may lose the last of them, all of one sign.

    `turned` is about the sum with signs drawn at random, `total` the sum itself: with as many terms of one sign as
    the square of the quotient says, the last are so many roundoffs of the sum.
    """
    one, other = float(total.norm()), float(turned.norm())
    return other > 0 and (one / other) ** 2 * unit > _SWAMPED


def most_likely(error: Tensor, parts: list[Tensor]) -> int | None:
    """Return the number of the part that the error is mostly a multiple of; None if there is none, or several are."""
    shares = sorted(((common_factor(error, part).share, number) for number, part in enumerate(parts)), reverse=True)
    best, number = shares[0]
    left = [1 - share for share, _ in shares]
    is_alone = len(shares) == 1 or left[0] < _LEFT * left[1]
    return number if best > _MOSTLY and is_alone else None


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
