"""Whether a rule's condition holds, for all of its series at once.

A watcher holds what one rule remembers about its series, of one rank or of several, each for itself: `judge` looks at
the values of a step without taking them for usual, `learn` takes them into the usual range once the state machine has
said which series are calm.
What follows from a verdict (for how many steps, which alert) is decided in `state`. Here are the conditions on a single
value and on the mean so far; further ones stand in `limits`, `spikes`, `drifts` and `trends`; `across` compares ranks.

Series are numbered by slots in the order in which they were first shown. A selection of slots is a slice where
possible, as numpy then neither copies nor gathers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.conditions.criteria import Direction, NonFinite, RelativeToMean
from trainermon.core.derived import COUNT, DERIVED, INFS, NANS, Array
from trainermon.core.values import Placement, SeriesKey

Mask = NDArray[np.bool_]
Indices = NDArray[np.intp]
Slots = slice | Indices


@dataclasses.dataclass(frozen=True, slots=True)
class ConditionVerdict:
    """What a condition says about the observed series of one step.

    Attributes:
        value: What was looked at, as the alert shows it.
        score: How bad, only to tell the worst; NaN where nothing can be said.
        bad: The condition holds.
        clear: It is clearly over; never together with `bad`.
        blind: Nothing can be said, so that the series stays as it is; None if that is so for no series.
    """

    value: Array
    score: NDArray[np.floating[Any]]
    bad: Mask
    clear: Mask
    blind: Mask | None = None

    def of(self, chosen: Slots) -> ConditionVerdict:
        """Return the same verdict for some of its series only; `chosen` are their positions in it."""
        blind = None if self.blind is None else self.blind[chosen]
        return ConditionVerdict(self.value[chosen], self.score[chosen], self.bad[chosen], self.clear[chosen], blind)


class ConditionWatcher:
    """Evaluates a rule's condition on series, and remembers what it needs.

    Base class of all conditions. Series have slots: positions in the watcher's arrays, 0, 1, 2 … What is said of one
    never depends on which others are judged with it. A condition of another package has a watcher for each rank; of
    ours, one for all of them.
    """

    def grow(self, size: int) -> None:
        """Make room for `size` series; what is remembered of the present ones stays."""

    def meet(self, slots: Indices, keys: Sequence[SeriesKey], placements: Sequence[Placement | None]) -> None:
        """Set which series the `slots` stand for, and how their tensors are placed.

        Called again in every attempt, as they may be placed differently then.
        """

    def reset(self, slots: Slots = slice(None)) -> None:
        """Forget what belongs to the attempt that has ended, of the series `slots`; the usual ranges stay."""

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:
        """Return for which of the series `slots` the condition holds, by their moments [8, n] of one step."""
        raise NotImplementedError

    def learn(self, slots: Slots, restless: Mask | None) -> None:
        """Add the values of the last `judge` to the usual range, except those of series that are pending or firing.

        `restless` is the mask of those; None if there are none.
        """

    def baseline(self, slots: Indices) -> Array:
        """Return what the values of the series `slots` are compared with; NaN where there is nothing."""
        return np.full(len(slots), np.nan)


class NonFiniteWatcher(ConditionWatcher):
    """Finds series with an element that is NaN or infinite; the score is the share of such elements."""

    _UNSEEN, _SEEN, _INFS, _NANS = 0, 1, 2, 4

    def __init__(self, condition: NonFinite) -> None:
        self._allows_inf = condition.allow_initial_inf or condition.allow_initial
        self._allows_nan = condition.allow_initial
        self._first = np.zeros(0, np.uint8)

    def grow(self, size: int) -> None:  # noqa: D102 - as in ConditionWatcher, here and below
        self._first = grown(self._first, size, self._UNSEEN)

    def reset(self, slots: Slots = slice(None)) -> None:  # noqa: D102
        if not self._allows_nan:  # a NaN that a checkpoint brings back was not there at first
            self._first[slots] = self._UNSEEN

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        nans, infs = moments[NANS], moments[INFS]
        if self._allows_inf:
            first = self._at_first(slots, nans, infs)
            nans, infs = np.where(first & self._NANS, 0.0, nans), np.where(first & self._INFS, 0.0, infs)
        count = nans + infs
        bad = count > 0
        return ConditionVerdict(count, count / moments[COUNT], bad, ~bad)

    def baseline(self, slots: Indices) -> Array:  # noqa: D102
        return np.zeros(len(slots))

    def _at_first(self, slots: Slots, nans: Array, infs: Array) -> NDArray[np.uint8]:
        """Return by series what it held when first seen, and may hold since."""
        first = self._first[slots]
        unseen = first == self._UNSEEN
        if np.count_nonzero(unseen):
            held = self._INFS * ((infs > 0) & (self._allows_nan | (nans == 0))) + self._NANS * (
                self._allows_nan & (nans > 0)
            )
            first = np.where(unseen, self._SEEN | held, first).astype(np.uint8)
            self._first[slots] = first
        return first


class RelativeToMeanWatcher(ConditionWatcher):
    """Finds values whose magnitude is far from the exponential mean of those before.

    The score is the ratio of both, above 1. The first value that is not zero begins the mean. A value with a NaN or Inf
    among its elements is neither judged nor learned, so that the mean stays a number; every other value is learned,
    whether the condition holds or not. Magnitudes below the floor, a share of the tensor's rms, count as the floor: for
    a mean that hovers around zero any ratio would be large.

    Source: AnomalyTurbulence of msprobe's monitor, which looks upwards only and has no floor.
    """

    def __init__(self, condition: RelativeToMean, statistic: str) -> None:
        self._condition = condition
        self._derive = DERIVED[statistic]
        self._mean = np.zeros(0)
        self._seen: Array = np.zeros(0)

    def grow(self, size: int) -> None:  # noqa: D102
        self._mean = grown(self._mean, size, 0.0)

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        value = self._derive(moments)
        magnitude = np.abs(value)
        if self._condition.floor:
            magnitude = np.maximum(magnitude, self._condition.floor * DERIVED["rms"](moments))
        self._seen = np.where(moments[NANS] + moments[INFS] > 0, np.nan, magnitude)
        mean = self._mean[slots]
        up, down = self._seen / mean, mean / self._seen
        match self._condition.direction:
            case Direction.BOTH:
                score = np.fmax(up, down)
            case Direction.UP:
                score = up
            case Direction.DOWN:
                score = down
        score = np.where(mean > 0.0, score, 1.0)  # nothing is unusual before there is a mean
        blind = np.isnan(self._seen)
        bad = (score > 1.0 + self._condition.threshold) & ~blind
        return ConditionVerdict(value, score, bad, ~(bad | blind), mask_or_none(blind))

    def learn(self, slots: Slots, restless: Mask | None) -> None:  # noqa: ARG002, D102
        mean, beta = self._mean[slots], self._condition.beta
        learned = np.where(mean > 0.0, beta * mean + (1.0 - beta) * self._seen, self._seen)
        self._mean[slots] = np.where(np.isnan(self._seen), mean, learned)

    def baseline(self, slots: Indices) -> Array:  # noqa: D102
        mean: Array = self._mean[slots]
        return np.where(mean > 0.0, mean, np.nan)


def grown(array: NDArray[Any], size: int, fill: float) -> NDArray[Any]:
    """Return the array with its first axis lengthened to `size`; the new elements are `fill`."""
    rest = np.full((size - len(array), *array.shape[1:]), fill, array.dtype)
    return np.concatenate((array, rest))


def mask_or_none(mask: Mask) -> Mask | None:
    """Return the mask, or None if it marks nothing, so that work that depends on it can be left out."""
    return mask if np.count_nonzero(mask) else None


def as_indices(slots: Slots, size: int) -> Indices:
    """Return a selection of series (a slice or indices) as indices; `size` is the number of all series."""
    return np.arange(*slots.indices(size)) if isinstance(slots, slice) else slots
