"""Conditions on what becomes of a value in the long run: nothing, less and less, or not less although it should."""

from __future__ import annotations

import numpy as np

from trainermon.alerts.conditions.condition import (
    ConditionVerdict,
    ConditionWatcher,
    Indices,
    Slots,
    as_indices,
    grown,
    mask_or_none,
)
from trainermon.alerts.conditions.criteria import Flat, Frozen, NotDecreasing, Vanishing
from trainermon.core.derived import DERIVED, INFS, NANS, SUM, SUM_SQ, Array


class FlatWatcher(ConditionWatcher):
    """Finds series whose statistic hardly moves away from one value.

    The score is how little it moved, 1 for not at all.
    """

    def __init__(self, condition: Flat, statistic: str) -> None:
        self._share = condition.relative_change
        self._derive = DERIVED[statistic]
        self._anchor = np.zeros(0)

    def grow(self, size: int) -> None:  # noqa: D102 - as in ConditionWatcher, here and below
        self._anchor = grown(self._anchor, size, np.nan)

    def reset(self, slots: Slots = slice(None)) -> None:  # noqa: D102
        self._anchor[slots] = np.nan

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        value = self._derive(moments)
        anchor = self._anchor[slots]
        moved = np.abs(value - anchor)
        bad = moved <= self._share * np.abs(anchor)
        blind = np.isnan(value)
        self._anchor[slots] = np.where(bad | blind, anchor, value)
        return ConditionVerdict(value, 1.0 / (1.0 + moved), bad, ~(bad | blind), mask_or_none(blind))

    def baseline(self, slots: Indices) -> Array:  # noqa: D102
        return self._anchor[slots]


class FrozenWatcher(ConditionWatcher):
    """Finds tensors whose elements no longer change from step to step, though they did (by sum and sum of squares).

    The score is 1 for a series that stands still. Values with a NaN or Inf among their elements, and zeros alone, are
    not judged.
    """

    def __init__(self, condition: Frozen) -> None:
        self._lived = condition.lived
        self._last = np.zeros((0, 2))
        self._changes = np.zeros(0, np.intp)  # in a row, up to the number that makes it live

    def grow(self, size: int) -> None:  # noqa: D102
        self._last = grown(self._last, size, np.nan)
        self._changes = grown(self._changes, size, 0)

    def reset(self, slots: Slots = slice(None)) -> None:  # noqa: D102
        self._last[slots] = np.nan

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        value, square = moments[SUM], moments[SUM_SQ]
        last = self._last[slots]
        same = (value == last[:, 0]) & (square == last[:, 1])
        nothing = (moments[NANS] + moments[INFS] > 0) | (square == 0.0)  # a step that is lost, a module that is dead
        blind = np.isnan(last[:, 0]) | ~np.isfinite(square) | nothing
        self._last[slots] = np.stack((value, square), axis=1)
        changes = self._changes[slots]
        lives = changes >= self._lived
        self._changes[slots] = np.where(blind | lives, changes, np.where(same, 0, changes + 1))
        bad = same & lives & ~blind
        return ConditionVerdict(value, same.astype(np.float64), bad, ~(bad | blind), mask_or_none(blind))


class VanishingWatcher(ConditionWatcher):
    """Finds series whose magnitude has sunk below a share of their first values' geometric mean.

    The score is how far, in logs. Exact zeros and values with a NaN or Inf among their elements are neither judged nor
    learned. The first level is kept for ever, also over attempts, so that a decline of any slowness is seen.
    """

    def __init__(self, condition: Vanishing, statistic: str) -> None:
        self._limit = np.log(condition.share)
        self._warmup = condition.warmup
        self._derive = DERIVED[statistic]
        self._sum = np.zeros(0)  # of logarithms, of the first values
        self._count = np.zeros(0)
        self._seen: Array = np.zeros(0)

    def grow(self, size: int) -> None:  # noqa: D102
        self._sum = grown(self._sum, size, 0.0)
        self._count = grown(self._count, size, 0.0)

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        value = self._derive(moments)
        seen = np.log(np.abs(value))
        self._seen = np.where(np.isfinite(seen) & (moments[NANS] + moments[INFS] == 0), seen, np.nan)
        count = self._count[slots]
        sunk = self._seen - np.where(count >= self._warmup, self._sum[slots] / count, np.nan)
        bad = sunk < self._limit
        blind = np.isnan(self._seen)
        return ConditionVerdict(value, -sunk, bad, ~(bad | blind), mask_or_none(blind))

    def learn(self, slots: Slots, restless: np.ndarray | None) -> None:  # noqa: ARG002, D102
        count = self._count[slots]
        learns = (count < self._warmup) & ~np.isnan(self._seen)
        if np.count_nonzero(learns):
            indices = as_indices(slots, len(self._count))[learns]
            self._sum[indices] += self._seen[learns]
            self._count[indices] += 1.0

    def baseline(self, slots: Indices) -> Array:  # noqa: D102
        level: Array = np.exp(self._sum[slots] / np.maximum(self._count[slots], 1.0))
        return level


class NotDecreasingWatcher(ConditionWatcher):
    """Finds series, as the loss, whose mean over some values is not less than the least such mean before.

    The score is how much more it is. It is judged when the values are together: in between nothing can be said, so
    `for` and `keep` of the rule count means, not steps.
    """

    def __init__(self, condition: NotDecreasing, statistic: str) -> None:
        self._steps = condition.steps
        self._improvement = condition.improvement
        self._derive = DERIVED[statistic]
        self._sum = np.zeros(0)
        self._count = np.zeros(0)
        self._best = np.zeros(0)
        self._compared = np.zeros(0)

    def grow(self, size: int) -> None:  # noqa: D102
        self._sum = grown(self._sum, size, 0.0)
        self._count = grown(self._count, size, 0.0)
        self._best = grown(self._best, size, np.inf)
        self._compared = grown(self._compared, size, np.nan)

    def reset(self, slots: Slots = slice(None)) -> None:  # noqa: D102
        self._sum[slots] = 0.0  # steps of the last checkpoint come again: half a mean would count them twice
        self._count[slots] = 0.0

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        value = self._derive(moments)
        known = np.isfinite(value)
        total = self._sum[slots] + np.where(known, value, 0.0)
        count = self._count[slots] + known
        whole = known & (count >= self._steps)
        mean = np.where(whole, total / count, np.nan)
        best = self._best[slots]
        bad = mean >= best - self._improvement * np.abs(best)
        self._compared[slots] = np.where(whole, best, self._compared[slots])
        self._best[slots] = np.where(mean < best, mean, best)
        self._sum[slots] = np.where(whole, 0.0, total)
        self._count[slots] = np.where(whole, 0.0, count)
        return ConditionVerdict(np.where(whole, mean, value), mean - best, bad, whole & ~bad, mask_or_none(~whole))

    def baseline(self, slots: Indices) -> Array:  # noqa: D102
        return self._compared[slots]
