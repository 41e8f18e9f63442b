"""Which differences on the first common step are a fault, and which are rounding.

No step before it shows how far two sound runs are apart, and a fault that is there from the start would pass for noise.
So the step is gone through as it happens. While everything is equal to the bit, what an operation returns may be apart
by the rounding of its type. An activation of which the same operation of another block is equal, and what an optimizer
computes element by element, may not even be apart by that; a backward may add up in any order. Behind that,
differences may grow tenfold from one series to the next.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from trainermon.analysis.compare.noise import ROUNDOFF
from trainermon.analysis.diagnosis.against.row_pairs import NOISE_GROWTH, NOISE_LIMIT, RowPair
from trainermon.analysis.diagnosis.findings import FaultPhase
from trainermon.analysis.diagnosis.rows.order import StepOrder
from trainermon.core.values import Kind

_UNITS = 4.0  # two roundings to the type on either side: the extremum of a tensor is one element
_SUMS = 64 * ROUNDOFF["float32"]  # sums of some thousand terms, which are at best accumulated in float32
_NEGLIGIBLE = 1e-3  # so far below the median, a gradient is the rounding of zero: what an optimizer makes of it is, too
_WEIGHED = frozenset((Kind.ACTV_GRAD, Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.EXP_AVG, Kind.EXP_AVG_SQ))
_OF_GRADIENTS = (Kind.GRAD_REDUCED, Kind.GRAD_UNREDUCED, Kind.EXP_AVG)
_UPDATED = (Kind.PARAM_UPDATED, Kind.UPDATE)
_WEIGHTS = (Kind.PARAM_ORIGIN, Kind.PARAM_USED, *_UPDATED)

Operation = tuple[str, str, str]
"""Kind, name without its numbers, slot: what an operation is called in every block of a model."""


class JudgedStep(NamedTuple):
    """What is apart on the first common step.

    Attributes:
        pairs: What is apart by more than rounding; () if nothing is.
        noise: The largest difference that passes for rounding; 0: everything before the first of `pairs` is equal.
        explained: What rounding explains of the first of `pairs`; None: no difference at all.
    """

    pairs: tuple[RowPair, ...]
    noise: float
    explained: float | None


class StepRounding(NamedTuple):
    """How exactly the first common step was computed.

    Attributes:
        alike: The operations of which a series is equal to the bit on both sides.
        unit: The unit roundoff of the coarsest type in which anything is computed; 1 if that is not known.
        units: By module, that of the coarsest type that it or a module inside of it was given or returned.
        has_same_types: Whether activations of one type on both sides are stored.
        are_weights_noisy: Whether weights have come apart by rounding on steps before.
        noise: By how much such steps are apart, as far as they are stored.
    """

    alike: Collection[Operation]
    unit: float
    units: Mapping[str, float]
    has_same_types: bool
    are_weights_noisy: bool
    noise: float = 0.0


def operation_of(kind: str, name: str, slot: str) -> Operation:
    """Return what a series is called in every block: `h.3.up` and `h.0.up` are one operation."""
    return kind, re.sub(r"\d+", "#", name), slot


def unit_of(*dtypes: str | None) -> float:
    """Return the unit roundoff of the coarsest of some types; 0 if none is known."""
    names = [(dtype or "").rpartition(".")[2] for dtype in dtypes]
    return max((ROUNDOFF.get(name, 0.0) for name in names), default=0.0)


def rounding_of(unit: float) -> float:
    """Return how far rounding alone may set apart what is computed in a type of this unit roundoff, at most 5 %."""
    return min(NOISE_LIMIT, max(_SUMS, _UNITS * unit))


def judge_first_step(pairs: Sequence[RowPair], rounding: StepRounding, order: StepOrder) -> JudgedStep:
    """Return which of the `pairs` that are not equal on the first common step are apart by more than rounding.

    What one side alone has is. Cost: sorts the pairs once.
    """
    bounds = _Bounds(pairs, rounding, order)
    noise = rounding.noise
    ordered = sorted((pair for pair in pairs if pair.only_in or pair.relative != 0), key=order.key)
    for place, pair in enumerate(ordered):
        size, bound = bounds.size(pair, noise), bounds.of(pair, noise)
        if size > bound or _has_other_type(pair, rounding):
            left = ordered[place + 1 :]
            behind = (one for one in left if not noise or bounds.size(one, noise) > bounds.of(one, noise))
            return JudgedStep((pair, *behind), noise, bound or None)
        noise = max(noise, size if math.isfinite(size) else 0.0)
    return JudgedStep((), noise, None)


class _Bounds:
    """Tells how far rows of the first common step are apart, and how far they may be."""

    def __init__(self, pairs: Sequence[RowPair], rounding: StepRounding, order: StepOrder) -> None:
        self._size = noisy_sizes(pairs)
        self._rounding = rounding
        self._phase = order.phase
        self._weights = [self._size(pair) for pair in pairs if pair.kind in _WEIGHTS]

    def size(self, pair: RowPair, noise: float) -> float:
        """Return how far a row is apart; infinite: on one side only, or finite on one side alone."""
        if noise or self._rounding.are_weights_noisy or math.isinf(self._size(pair)) or pair.relative is None:
            return self._size(pair)
        return pair.relative

    def of(self, pair: RowPair, noise: float) -> float:
        """Return how far a row may be apart where what came before is apart by as much as `noise`."""
        if pair.kind == Kind.CHECKSUM and (noise or self._rounding.are_weights_noisy):
            return math.inf
        if noise:
            return self._grown(pair, noise)
        phase = self._phase(pair)
        if phase is FaultPhase.PARAMETER:
            return NOISE_LIMIT if self._rounding.are_weights_noisy else 0.0
        is_exact = pair.kind == Kind.ACTV and operation_of(pair.kind, pair.name, pair.slot) in self._rounding.alike
        if phase is FaultPhase.OPTIMIZER or is_exact:
            return 0.0
        return self._rounded(pair)

    def _rounded(self, pair: RowPair) -> float:
        whole = self._rounding.unit
        return rounding_of(self._rounding.units.get(pair.name, whole) if pair.kind == Kind.ACTV else whole)

    def _grown(self, pair: RowPair, noise: float) -> float:
        grown = max(self._rounded(pair), min(NOISE_GROWTH * noise, NOISE_LIMIT))
        if pair.kind not in _WEIGHTS:
            return grown
        # an element of which the gradient is rounding of zero moves by the whole rate, either way: in few parameters
        is_widespread = 2 * sum(size > grown for size in self._weights) > len(self._weights)
        return grown if is_widespread else NOISE_LIMIT


def _has_other_type(pair: RowPair, rounding: StepRounding) -> bool:
    """Return whether an activation has another type here, where others have the same: a part computes otherwise."""
    is_other = bool(pair.ours.dtype and pair.theirs.dtype) and pair.ours.dtype != pair.theirs.dtype
    return is_other and pair.kind == Kind.ACTV and rounding.has_same_types


def noisy_sizes(pairs: Sequence[RowPair]) -> Callable[[RowPair], float]:
    """Return a function that tells how far the rows of one of `pairs` are apart, as it matters beside rounding.

    Gradients count relative to the median of their kind where they are smaller: one that is zero but for rounding is
    as large as that. What an optimizer makes of it counts for nothing, and of weights the norm alone counts: single
    elements may have such gradients. Infinite: on one side only, or finite on one side alone; 0: not known.
    """
    medians = _medians(pairs)
    tiny = {
        (pair.name, pair.rank)
        for pair in pairs
        if pair.kind in _OF_GRADIENTS and _rms(pair) < _NEGLIGIBLE * medians[pair.kind]
    }

    def size(pair: RowPair) -> float:
        relative = pair.relative or 0.0
        if pair.only_in or math.isnan(relative) or pair.kind == Kind.CHECKSUM:
            return math.inf
        if pair.kind in _WEIGHTS:
            return 0.0 if (pair.name, pair.rank) in tiny else _norm_gap(pair)
        if pair.kind in _WEIGHED and medians[pair.kind]:
            return relative * min(1.0, _rms(pair) / medians[pair.kind])
        return relative

    return size


def _norm_gap(pair: RowPair) -> float:
    one, other = pair.ours.norm, pair.theirs.norm
    return abs(one - other) / max(one, other) if max(one, other) > 0 else 0.0


def _medians(pairs: Sequence[RowPair]) -> Mapping[str, float]:
    found: dict[str, list[float]] = {}
    for pair in pairs:
        found.setdefault(pair.kind, []).append(_rms(pair))
    return {kind: statistics.median(sizes) for kind, sizes in found.items()}


def _rms(pair: RowPair) -> float:
    return max(
        side.norm / math.sqrt(max(1, side.num_elements)) if isinstance(side.norm, float) else 0.0
        for side in (pair.ours, pair.theirs)
    )
