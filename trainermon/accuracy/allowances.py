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
        usual: With it the floor is no more than this times the change that three quarters of the elements stay below:
            of results of very different sizes the largest says nothing of the others.
        inputs: Of the magnitude of the first input, element by element: for functions that multiply it by what cancels.
            Without inputs, of the largest result: for series of which each element is the first and so many steps.
        tails: Of the magnitude of the first input times the smallest normal number of the computation, element by
            element: for functions that divide it by what overflows.
        ones: Of 1: for functions with numbers about 1 on the way to the result; of gradients, of the result's gradient.
    """

    ulps: float = 0.0
    sums: float = 0.0
    probes: float = 0.0
    floor: float = 0.0
    usual: float = 0.0
    inputs: float = 0.0
    tails: float = 0.0
    ones: float = 0.0


ALLOWANCES: Mapping[Family, Allowance] = MappingProxyType(
    {
        Family.EXACT: Allowance(),
        Family.ROUNDED: Allowance(ulps=0.5, probes=2.0),
        Family.FUNCTION: Allowance(ulps=4.0, probes=4.0),
        Family.SPECIAL: Allowance(ulps=16.0, probes=16.0),
        Family.CONTRACTION: Allowance(sums=4.0),
        Family.SUM: Allowance(ulps=1.0, sums=4.0),
        Family.REDUCTION: Allowance(ulps=4.0, sums=1.0, probes=8.0, floor=1.0, usual=2.0),
        Family.RESAMPLING: Allowance(ulps=4.0, probes=32.0, floor=1.0),
        Family.WINDOW: Allowance(ulps=4.0, probes=4.0, ones=4.0),
        Family.GENERIC: Allowance(ulps=4.0, probes=12.0, floor=1.0, usual=2.0),
    }
)
"""By family; those that are not judged element by element are missing."""

# of backwards that are judged as calls: they may be differences of what nearly cancels, as one less a probability
_BACKWARD_CALLS = Allowance(ulps=4.0, probes=16.0, floor=1.0)
_GRADIENTS = Allowance(ulps=8.0, sums=1.0, probes=4.0, floor=1.0)
_HARD_GRADIENTS = Allowance(ulps=4.0, sums=1.0, probes=16.0, floor=1.0)
# of what moves or chooses: summed at most
_MOVED_GRADIENTS = Allowance(ulps=1.0, sums=1.0)
# of exponentials of products or long sums, and a difference of what nearly cancels
_ATTENTION_GRADIENTS = Allowance(ulps=4.0, sums=1.0, probes=48.0, floor=1.0)
# The derivative adds one half of 1 + erf(x / sqrt(2)) and x times the density. The first is rounded at 1 wherever x is
# negative, and the second nearly cancels it about x = -0.75: the error is a share of the gradient of the result, not of
# what is left of it. erf is good to two roundoffs of 1, its sum with 1 and the two terms' own rounding add two more.
_GELU_GRADIENTS = _GRADIENTS._replace(ones=4.0)
# With tanh the second term has 1 - tanh^2, off by 2.5 roundoffs of 1, times at most 9.4 before tanh is -1 in float32
# (x = -5.15): 24 roundoffs, and those of the first term.
_GELU_TANH_GRADIENTS = _GRADIENTS._replace(ones=16.0)
# One less the result, which is kept rounded: about 1 it is off by the result's roundoff, however little is left.
_SIGMOID_GRADIENTS = _GRADIENTS._replace(ones=1.0)
HARD_TO_DIFFERENTIATE = (Family.GENERIC, Family.SPECIAL, Family.REDUCTION, Family.RESAMPLING)
"""Families whose derivatives sum along dimensions, or cancel."""

BY_NAME: Mapping[str, Allowance] = MappingProxyType(
    {
        # with one plus an error function, which cancel one another
        "ndtr": Allowance(ulps=4.0, probes=4.0, ones=4.0),
        "gelu": Allowance(ulps=4.0, probes=4.0, inputs=4.0),
        # the logarithm of a quotient, which is about one in the middle
        "logit": Allowance(ulps=4.0, probes=4.0, ones=4.0),
        # a share of the sum, each with an error of its own size
        "softmax": Allowance(ulps=4.0, sums=1.0, probes=8.0),
        "softmin": Allowance(ulps=4.0, sums=1.0, probes=8.0),
        # the logarithm of a sum, which is about one where one probability is nearly all
        "log_softmax": Allowance(ulps=4.0, sums=1.0, probes=8.0, floor=1.0, ones=1.0),
        "cross_entropy": Allowance(ulps=4.0, sums=1.0, probes=8.0, floor=1.0, ones=1.0),
        # divided by one plus an exponential, which overflows where the quotient is below the smallest normal numbers
        "silu": Allowance(ulps=4.0, probes=4.0, tails=1.0),
        "mish": Allowance(ulps=4.0, probes=4.0, tails=1.0),
        # some kernels take it from one, whatever is left
        "erf": Allowance(ulps=4.0, probes=4.0, ones=2.0),
        # the first, and so many steps of a size that is rounded
        "linspace": Allowance(ulps=4.0, probes=4.0, inputs=2.0),
        "arange": Allowance(ulps=0.5, probes=2.0, inputs=2.0),
        "range": Allowance(ulps=0.5, probes=2.0, inputs=2.0),
        # the hyperbolic tangent is taken from the input, which it nearly equals
        "tanhshrink": Allowance(ulps=4.0, probes=4.0, inputs=4.0),
    }
)
"""By the last part of an operation's name, where its family's does not hold."""


def allowance_of(name: str, family: Family) -> Allowance:
    """Return the factors for the operation `name` (`nn.functional.gelu`, `gelu_backward`) of `family`."""
    last = name.rpartition(".")[2].rstrip("_")
    if family is Family.GENERIC and "backward" in last:
        return _BACKWARD_CALLS
    return BY_NAME.get(last, ALLOWANCES.get(family, Allowance()))


def gradient_allowance(name: str, family: Family, approximate: str = "none") -> Allowance:
    """Return the factors for gradients that an operation gives back; those of contractions are sums.

    `approximate` is the form of a gelu: "none" or "tanh".
    """
    if family is Family.EXACT:
        return _MOVED_GRADIENTS
    if name == "gelu":
        return _GELU_TANH_GRADIENTS if approximate == "tanh" else _GELU_GRADIENTS
    if name == "sigmoid":
        return _SIGMOID_GRADIENTS
    if name in ("scaled_dot_product_attention", "ctc_loss"):
        return _ATTENTION_GRADIENTS
    if family is Family.CONTRACTION:
        return ALLOWANCES[family]
    return _HARD_GRADIENTS if family in HARD_TO_DIFFERENTIATE else _GRADIENTS
