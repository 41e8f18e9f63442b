"""Conditions on where a value has come to: slowly away from where it was, or beyond all that it ever was."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.conditions.condition import (
    ConditionVerdict,
    ConditionWatcher,
    Indices,
    Mask,
    Slots,
    as_indices,
    grown,
    mask_or_none,
)
from trainermon.alerts.conditions.criteria import Direction, Drift, Exceeds
from trainermon.alerts.conditions.spikes import FirstLevel
from trainermon.alerts.conditions.spread import MAD_TO_SIGMA, median_of
from trainermon.core.derived import DERIVED, INFS, NANS, NEVER_NEGATIVE, Array

_REMEMBERED = 32  # levels
_FURTHER = 1.2  # than a series has swung before


class DriftWatcher(ConditionWatcher):
    """Finds series whose level has moved far from earlier levels.

    The score is how far, in logs or as a share of the limit. A level is the median of some values, so that a few
    outliers do not move it. It is judged when the values of a level are together: in between nothing can be said, so
    `for` and `keep` of the rule count levels, not steps. Values with a NaN or Inf among their elements, and for
    logarithms zeros, do not count. The first levels are passed over, as everything moves at the start. A level is
    compared with at most `levels` levels before it, so that a lasting change ends by itself; how far levels usually
    move from one to the next is what these moved. A series that goes up and down by its nature, as the losses of rivals
    do, has to go further than it did before.

    Cost for 3 000 series: about 0.05 ms CPU a step, and 2 ms when levels are complete.
    """

    def __init__(self, condition: Drift, statistic: str) -> None:
        self._condition = condition
        self._derive = DERIVED[statistic]
        self._logarithmic = statistic in NEVER_NEGATIVE
        self._values = np.full((0, condition.steps), np.nan, np.float32)
        self._filled = np.zeros(0, np.intp)
        self._passed = np.zeros(0, np.intp)  # levels that were passed over
        self._levels = np.full((0, condition.levels), np.nan, np.float32)  # newest last
        self._moves = np.full((0, _REMEMBERED), np.nan, np.float32)  # how far earlier levels had moved, newest last
        self._steps = np.full((0, _REMEMBERED), np.nan, np.float32)  # from one level to the next, newest last
        self._compared = np.zeros(0, np.float32)
        self._first = FirstLevel(condition.share_of_first, logarithmic=self._logarithmic)

    def grow(self, size: int) -> None:  # noqa: D102 - as in ConditionWatcher, here and below
        self._values = grown(self._values, size, np.nan)
        self._filled = grown(self._filled, size, 0)
        self._passed = grown(self._passed, size, 0)
        self._levels = grown(self._levels, size, np.nan)
        self._moves = grown(self._moves, size, np.nan)
        self._steps = grown(self._steps, size, np.nan)
        self._compared = grown(self._compared, size, np.nan)
        self._first.grow(size)

    def reset(self, slots: Slots = slice(None)) -> None:  # noqa: D102
        self._filled[slots] = 0  # steps of the last checkpoint come again

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        value = self._derive(moments)
        seen = (np.log(value) if self._logarithmic else value).astype(np.float32)
        usable = np.isfinite(seen) & (moments[NANS] + moments[INFS] == 0)
        indices = as_indices(slots, len(self._filled))
        taken = indices[usable]
        self._values[taken, self._filled[taken]] = seen[usable]
        self._filled[taken] += 1
        if self._condition.share_of_first:
            self._first.learn(taken, seen[usable])
        whole = self._filled[indices] == self._condition.steps
        score = np.full(len(indices), np.nan)
        bad = np.zeros(len(indices), np.bool_)
        if np.count_nonzero(whole):
            value = value.copy()
            value[whole], score[whole], bad[whole] = self._judge_levels(indices[whole])
        return ConditionVerdict(value, score, bad, whole & ~bad, mask_or_none(~whole))

    def baseline(self, slots: Indices) -> Array:  # noqa: D102
        compared: Array = self._compared[slots].astype(np.float64)
        return np.exp(compared) if self._logarithmic else compared

    def _judge_levels(self, indices: Indices) -> tuple[Array, Array, Mask]:
        """Return the newest level of the series, how far it has moved, and whether that is too far."""
        condition, up = self._condition, self._condition.direction is Direction.UP
        self._filled[indices] = 0
        level = median_of(self._values[indices])
        before, moves, steps = self._levels[indices], self._moves[indices], self._steps[indices]
        origin = (np.fmin if up else np.fmax).reduce(before, axis=1)
        moved = (level - origin) if up else (origin - level)
        usual = median_of(steps.copy())
        furthest = np.fmax.reduce(moves[:, : -condition.levels], axis=1, initial=0.0)
        bad = moved > self._limit(origin, indices)
        bad &= (moved > _FURTHER * furthest) & (moved > condition.score * MAD_TO_SIGMA * usual)
        if self._logarithmic and condition.share_of_first:
            larger = np.fmax(level, origin)
            bad &= self._first.matters(indices, larger, larger)
        counts = self._passed[indices] >= condition.warmup
        self._passed[indices] += 1
        self._levels[indices] = np.where(counts[:, None], _appended(before, level), before)
        self._moves[indices] = _appended(moves, moved)
        self._steps[indices] = _appended(steps, np.abs(level - before[:, -1]))
        self._compared[indices] = origin
        shown = np.exp(level) if self._logarithmic else level
        return shown.astype(np.float64), moved.astype(np.float64), np.asarray(bad)

    def _limit(self, origin: NDArray[np.float32], indices: Indices) -> NDArray[np.float32]:
        """Return how far a level has to move from `origin`."""
        condition = self._condition
        if self._logarithmic:
            return np.full_like(origin, np.log(condition.factor))
        share = condition.factor - 1.0 if condition.direction is Direction.UP else 1.0 - 1.0 / condition.factor
        least = self._first.share_of(indices) if condition.share_of_first else np.zeros_like(origin)
        limit: NDArray[np.float32] = np.maximum(np.float32(share) * np.abs(origin), least)
        return limit


def _appended(rows: NDArray[np.float32], newest: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate((rows[:, 1:], newest[:, None]), axis=1)


class ExceedsWatcher(ConditionWatcher):
    """Finds values that are several times the largest one that there was before; the score is how many times.

    The first values are only learned. Zeros and what is no number are neither judged nor learned.
    """

    def __init__(self, condition: Exceeds, statistic: str) -> None:
        self._condition = condition
        self._derive = DERIVED[statistic]
        self._largest = np.zeros(0)
        self._count = np.zeros(0, np.intp)
        self._beyond = np.zeros(0, np.intp)  # values in a row that were not learned
        self._seen: Array = np.zeros(0)

    def grow(self, size: int) -> None:  # noqa: D102
        self._largest = grown(self._largest, size, 0.0)
        self._count = grown(self._count, size, 0)
        self._beyond = grown(self._beyond, size, 0)

    def reset(self, slots: Slots = slice(None)) -> None:  # noqa: D102
        self._beyond[slots] = 0

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        value = self._derive(moments)
        self._seen = np.where(np.isfinite(value) & (value != 0.0), np.abs(value), np.nan)
        times = self._seen / self._largest[slots]
        bad = (times > self._condition.times) & (self._count[slots] >= self._condition.warmup)
        blind = np.isnan(self._seen)
        return ConditionVerdict(value, times, bad, ~(bad | blind), mask_or_none(blind))

    def learn(self, slots: Slots, restless: Mask | None) -> None:  # noqa: D102
        indices = as_indices(slots, len(self._count))
        calm = np.ones(len(indices), np.bool_) if restless is None else ~restless
        over = self._seen > self._condition.times * self._largest[indices]
        beyond = np.where(over & ~calm, self._beyond[indices] + 1, 0)
        calm |= (beyond >= self._condition.adopt) | ~over
        learns = indices[calm & ~np.isnan(self._seen)]
        self._largest[learns] = np.maximum(self._largest[learns], self._seen[calm & ~np.isnan(self._seen)])
        self._count[learns] += 1
        self._beyond[indices] = np.where(beyond >= self._condition.adopt, 0, beyond)

    def baseline(self, slots: Indices) -> Array:  # noqa: D102
        return self._largest[slots]
