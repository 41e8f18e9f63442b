"""How much error each family of operations is allowed, in roundoffs.

The factors were chosen on the operator database of torch, in float32 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from trainermon.accuracy.families import Family


class Allowance(NamedTuple):
    """Factors of the parts of an allowance.

    Attributes:
        ulps: Of the roundoff of the computation, relative to the result.
        sums: Of the square root of the number of terms, times the sum of their magnitudes.
        probes: Of what the result changes by when every input is moved by a roundoff.
        floor: The least such change that is taken for an element, relative to the root mean square of all.
        inputs: Of the magnitude of the first input, element by element: for functions that multiply it by what cancels.
        ones: Of 1: for functions with numbers about 1 on the way to the result.
    """

    ulps: float = 0.0
    sums: float = 0.0
    probes: float = 0.0
    floor: float = 0.0
    inputs: float = 0.0
    ones: float = 0.0


ALLOWANCES: Mapping[Family, Allowance] = MappingProxyType(
    {
        Family.EXACT: Allowance(),
        Family.ROUNDED: Allowance(ulps=0.5, probes=2.0),
        Family.FUNCTION: Allowance(ulps=4.0, probes=4.0),
        Family.SPECIAL: Allowance(ulps=16.0, probes=16.0),
        Family.CONTRACTION: Allowance(sums=4.0),
        Family.SUM: Allowance(ulps=1.0, sums=4.0),
        Family.REDUCTION: Allowance(ulps=4.0, sums=1.0, probes=8.0, floor=1.0),
        Family.RESAMPLING: Allowance(ulps=4.0, probes=32.0, floor=1.0),
        Family.WINDOW: Allowance(ulps=4.0, probes=4.0, ones=4.0),
        Family.GENERIC: Allowance(ulps=4.0, probes=16.0, floor=1.0),
    }
)
"""By family; those that are not judged element by element are missing."""

_GRADIENTS = Allowance(ulps=8.0, sums=1.0, probes=4.0, floor=1.0)
_HARD_GRADIENTS = Allowance(ulps=4.0, sums=1.0, probes=16.0, floor=1.0)
# of what moves or chooses: summed at most
_MOVED_GRADIENTS = Allowance(ulps=1.0, sums=1.0)
# of exponentials of products, and a difference of what nearly cancels
_ATTENTION_GRADIENTS = Allowance(ulps=4.0, sums=1.0, probes=48.0, floor=1.0)
HARD_TO_DIFFERENTIATE = (Family.GENERIC, Family.SPECIAL, Family.REDUCTION, Family.RESAMPLING)
"""Families whose derivatives sum along dimensions, or cancel."""

BY_NAME: Mapping[str, Allowance] = MappingProxyType(
    {
        # with one plus an error function, which cancel one another
        "ndtr": Allowance(ulps=4.0, probes=4.0, ones=4.0),
        "gelu": Allowance(ulps=4.0, probes=4.0, inputs=4.0),
        # the logarithm of a quotient, which is about one in the middle
        "logit": Allowance(ulps=4.0, probes=4.0, ones=4.0),
        # the logarithm of a sum, which is about one where one probability is nearly all
        "log_softmax": Allowance(ulps=4.0, sums=1.0, probes=8.0, floor=1.0, ones=1.0),
        "cross_entropy": Allowance(ulps=4.0, sums=1.0, probes=8.0, floor=1.0, ones=1.0),
        # the hyperbolic tangent is taken from the input, which it nearly equals
        "tanhshrink": Allowance(ulps=4.0, probes=4.0, inputs=4.0),
    }
)
"""By the last part of an operation's name, where its family's does not hold."""


def allowance_of(name: str, family: Family) -> Allowance:
    """Return the factors for the operation `name` (`nn.functional.gelu`) of `family`."""
    return BY_NAME.get(name.rpartition(".")[2].rstrip("_"), ALLOWANCES.get(family, Allowance()))


def gradient_allowance(name: str, family: Family) -> Allowance:
    """Return the factors for gradients that an operation gives back; those of contractions are sums."""
    if family is Family.EXACT:
        return _MOVED_GRADIENTS
    if name == "scaled_dot_product_attention":
        return _ATTENTION_GRADIENTS
    if family is Family.CONTRACTION:
        return ALLOWANCES[family]
    return _HARD_GRADIENTS if family in HARD_TO_DIFFERENTIATE else _GRADIENTS
