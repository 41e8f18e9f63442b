"""Conditions that compare a value with a limit that is known beforehand, without a usual range."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from trainermon.alerts.conditions.condition import (
    ConditionVerdict,
    ConditionWatcher,
    Indices,
    Slots,
    grown,
    mask_or_none,
)
from trainermon.alerts.conditions.criteria import Ratio, Saturated, Threshold
from trainermon.core.derived import DERIVED, Array
from trainermon.core.values import STATISTICS, Placement, SeriesKey

LARGEST = MappingProxyType(
    {
        "float64": 1.7976931348623157e308,
        "float32": 3.4028234663852886e38,
        "bfloat16": 3.3895313892515355e38,
        "float16": 65504.0,
        "float8_e4m3fn": 448.0,
        "float8_e4m3fnuz": 240.0,
        "float8_e5m2": 57344.0,
        "float8_e5m2fnuz": 57344.0,
    }
)
"""The largest finite number of each type that a tensor may have."""

_FULL = 0.999


class ThresholdWatcher(ConditionWatcher):
    """Finds series whose statistic, or the mean of its last values, is beyond a limit.

    The score is the distance from it.
    """

    def __init__(self, condition: Threshold, statistic: str) -> None:
        self._limits = _ValueLimits(condition.above, condition.below)
        self._over = condition.over
        self._derive = DERIVED[statistic]
        self._last = np.full((0, condition.over), np.nan)
        self._next = np.zeros(0, np.intp)

    def grow(self, size: int) -> None:  # noqa: D102 - as in ConditionWatcher, here and below
        if self._over > 1:
            self._last = grown(self._last, size, np.nan)
            self._next = grown(self._next, size, 0)

    def reset(self, slots: Slots = slice(None)) -> None:  # noqa: D102
        if self._over > 1:
            self._last[slots] = np.nan

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        value = self._derive(moments)
        return self._limits.verdict(value if self._over == 1 else self._mean(slots, value))

    def _mean(self, slots: Slots, value: Array) -> Array:
        """Return the mean of the last values; NaN until there are so many, and for a value that is none."""
        known = ~np.isnan(value)
        indices = np.arange(len(self._next))[slots]
        place = self._next[indices]
        self._last[indices[known], place[known]] = value[known]
        self._next[indices[known]] = (place[known] + 1) % self._over
        mean: Array = np.where(known, self._last[indices].mean(axis=1), np.nan)
        return mean


class RatioWatcher(ConditionWatcher):
    """Finds series whose ratio to another series of the same name, as gradient to parameter, is beyond a limit.

    `judge` takes 17 rows: the moments of the series, those of the divisor, and the learning rate of the step. A ratio
    to zero is not judged: of a parameter that is still zero nothing can be said.
    """

    def __init__(self, condition: Ratio, statistic: str) -> None:
        self._limits = _ValueLimits(condition.above, condition.below)
        self._times_rate = condition.times_rate
        self._derive = DERIVED[statistic]

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: ARG002, D102
        size = len(STATISTICS)
        divisor = self._derive(moments[size : 2 * size])
        ratio = self._derive(moments[:size]) / np.where(divisor == 0.0, np.nan, divisor)
        if self._times_rate:
            ratio *= moments[2 * size]
        return self._limits.verdict(ratio)


class SaturatedWatcher(ConditionWatcher):
    """Finds tensors whose largest magnitude has come near the largest number of their type.

    The score is the share of it. Series of a type that is not known, or is not one of floating point, are not judged,
    and neither are those that held the very largest number when they were first seen: masks do by design.
    """

    def __init__(self, condition: Saturated) -> None:
        self._share = condition.share
        self._largest = np.zeros(0)
        self._unseen = np.zeros(0, np.bool_)

    def grow(self, size: int) -> None:  # noqa: D102
        self._largest = grown(self._largest, size, np.nan)
        self._unseen = grown(self._unseen, size, 1)

    def meet(  # noqa: D102
        self, slots: Indices, keys: Sequence[SeriesKey], placements: Sequence[Placement | None]
    ) -> None:
        del keys
        self._largest[slots] = [LARGEST.get(place.dtype, np.nan) if place else np.nan for place in placements]
        self._unseen[slots] = True

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        value = DERIVED["absmax"](moments)
        unseen = self._unseen[slots]
        if np.count_nonzero(unseen):
            full = unseen & (value >= _FULL * self._largest[slots])
            self._largest[slots] = np.where(full, np.nan, self._largest[slots])
            self._unseen[slots] = unseen & np.isnan(value)
        share = value / self._largest[slots]
        bad = share >= self._share
        blind = np.isnan(share)
        return ConditionVerdict(value, share, bad, ~(bad | blind), mask_or_none(blind))

    def baseline(self, slots: Indices) -> Array:  # noqa: D102
        return self._largest[slots]


class _ValueLimits:
    """One or two limits of a value."""

    def __init__(self, above: float | None, below: float | None) -> None:
        self._above = np.inf if above is None else above
        self._below = -np.inf if below is None else below

    def verdict(self, value: Array) -> ConditionVerdict:
        """Return on which values the condition holds; of NaN nothing is said."""
        bad = (value > self._above) | (value < self._below)
        blind = np.isnan(value)
        score = np.maximum(value - self._above, self._below - value)
        return ConditionVerdict(value, score, bad, ~(bad | blind), mask_or_none(blind))
