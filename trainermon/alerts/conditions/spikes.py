"""Whether a statistic left its usual range: the two-sided, robust, NaN-proof spike condition, and its cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainermon.alerts.conditions.condition import (
    ConditionVerdict,
    ConditionWatcher,
    Indices,
    Mask,
    Slots,
    as_indices,
    grown,
)
from trainermon.alerts.conditions.criteria import Direction, Spike
from trainermon.alerts.conditions.spikes_compiled import TINY, CompiledSpikes, SpikesMemory, compiled_spikes
from trainermon.alerts.conditions.spread import Floats, spread_of
from trainermon.core.derived import DERIVED, INFS, NANS, NEVER_NEGATIVE, Array

_REFRESH_EVERY = 16  # of its own values at most: what else is watched must not change how a series is judged
_REFRESHES = 8  # while a window is filled once
_START = 4  # the first values give the level: one in so many of the warm-up's
_FOLLOWED = np.float32(1 / 8)  # share of a miss by which the level follows
_FIRST_VALUES = 8


class SpikeWatcher(ConditionWatcher):
    """The statistic left its usual range: that around a level which follows it, as wide as it usually misses it.

    The level is an exponential mean of the last calm values that begins at the median of the first ones, so that a wild
    start is soon forgotten. What a value misses it by is compared with the median and the spread of what the last
    values have missed it by: a steady trend shows as a median beside zero, and neither its going on nor its end is
    unusual. The spread is the median absolute deviation, or what all but 5 % of the misses stay
    within where their tails are heavier than normal.

    Misses are differences of logarithms, or for statistics that may be negative shares of the usual magnitude, so that
    those of a loss that has fallen are compared with those before.

    Only values that were seen while the series was calm are learned: neither a fault nor a NaN or an Inf ever enters
    the range, nor, where logarithms are taken, a zero. A series that stays outside its range for `adopt` values forgets
    it and learns the new level through another warm-up: a lasting shift is reported once and then accepted.

    Cost for 3 000 series and a window of 128: about 0.25 ms CPU a step, 1.5 MB.
    """

    def __init__(self, condition: Spike, statistic: str) -> None:
        self._condition = condition
        self._derive = DERIVED[statistic]
        self._logarithmic = statistic in NEVER_NEGATIVE
        self._level = FollowedLevel(logarithmic=self._logarithmic)
        self._misses = UsualMisses(condition)
        self._outside = np.zeros(0, np.int32)  # values in a row that were not learned
        self._first = FirstLevel(condition.share_of_first, logarithmic=self._logarithmic)
        self._seen = self._missed = np.zeros(0, np.float32)
        self._unusable: Mask | None = None
        self._compiled: CompiledSpikes | None = None

    def grow(self, size: int) -> None:  # noqa: D102
        self._level.grow(size)
        self._misses.grow(size)
        self._outside = grown(self._outside, size, 0)
        self._first.grow(size)
        self._compiled = compiled_spikes(self._memory())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}  # a copy has arrays of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._compiled = compiled_spikes(self._memory())

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:  # noqa: D102
        value = self._derive(moments)
        usable = (moments[NANS] + moments[INFS]) == 0
        seen = np.log(value) if self._logarithmic else value
        self._seen = seen.astype(np.float32)
        usable &= np.isfinite(self._seen)  # the logarithm of zero is not
        self._unusable = None if np.count_nonzero(usable) == usable.size else ~usable
        self._missed = self._level.missed_by(slots, self._seen)
        score = self._misses.score(slots, self._missed)
        if self._unusable is not None:
            score[self._unusable] = np.nan
        # A series that is still warming up has the score NaN and counts as clear: nothing is unusual yet.
        clear = ~(score >= self._condition.clear)
        if self._unusable is not None:
            clear &= usable
        bad = score > self._condition.score
        if self._condition.share_of_first and np.count_nonzero(bad):
            matters = self._first.matters(slots, self._seen, self._level.values[slots])
            bad, clear = bad & matters, clear | (~matters & usable)
        return ConditionVerdict(value, score, bad, clear, self._unusable)

    def learn(self, slots: Slots, restless: Mask | None) -> None:  # noqa: D102
        if restless is None and self._unusable is None:
            self._insert(slots, self._seen, self._missed)
        else:
            learned = ~_union(restless, self._unusable)
            indices = as_indices(slots, len(self._outside))
            self._insert(indices[learned], self._seen[learned], self._missed[learned])
        if restless is None:
            self._outside[slots] = 0
        else:
            self._count_outside(as_indices(slots, len(self._outside)), restless)

    def baseline(self, slots: Indices) -> Array:  # noqa: D102
        level: Array = self._level.values[slots].astype(np.float64)
        level[~self._misses.are_known(slots)] = np.nan
        return np.exp(level) if self._logarithmic else level

    def reset(self, slots: Slots = slice(None)) -> None:  # noqa: D102
        self._outside[slots] = 0

    def _insert(self, slots: Slots, seen: Floats, missed: Floats) -> None:
        learn = self._compiled.learn if self._compiled else self._learn
        started, due = learn(slots, seen, missed)
        if started.size:
            self._level.begin(started, self._misses.take_first(started))
        if due.size:
            self._misses.refresh(due)

    def _learn(self, slots: Slots, seen: Floats, missed: Floats) -> tuple[Indices, Indices]:
        """Learn values; return the series whose level begins, and those whose trend is due."""
        self._level.follow(slots, seen)
        if self._condition.share_of_first:
            self._first.learn(slots, seen)
        return self._misses.insert(slots, seen, missed)

    def _memory(self) -> SpikesMemory:
        misses, has_first = self._misses, bool(self._condition.share_of_first)
        return SpikesMemory(
            condition=self._condition,
            levels=self._level.values,
            magnitudes=None if self._logarithmic else self._level.magnitudes,
            window=misses.window,
            next=misses.next,
            num_learned=misses.num_learned,
            firsts=self._first.values if has_first else None,
            num_firsts=self._first.count if has_first else None,
            num_starting=misses.start,
            refresh_every=misses.refresh_every,
        )

    def _count_outside(self, indices: Indices, restless: Mask) -> None:
        counted = restless if self._unusable is None else restless & ~self._unusable
        self._outside[indices] = np.where(restless, self._outside[indices] + counted, 0)
        lasting = indices[self._outside[indices] >= self._condition.adopt]
        if lasting.size:
            self._level.reset(lasting)
            self._misses.reset(lasting)
            self._outside[lasting] = 0


class FollowedLevel:
    """Keeps for each series a level (an exponential mean) that follows its values; says how far values are from it.

    Attributes:
        values: The levels; NaN until they begin.
        magnitudes: The usual magnitudes of the values; 1 for logarithms.
    """

    def __init__(self, *, logarithmic: bool) -> None:
        self.values = np.zeros(0, np.float32)
        self._logarithmic = logarithmic
        self.magnitudes = np.zeros(0, np.float32)

    def grow(self, size: int) -> None:
        """Make room for the levels of `size` series."""
        self.values = grown(self.values, size, np.nan)
        self.magnitudes = grown(self.magnitudes, size, 1.0 if self._logarithmic else np.nan)

    def missed_by(self, slots: Slots, seen: Floats) -> Floats:
        """Return by how much the values `seen` of the series `slots` are above their levels, signed.

        NaN before `begin`. Where values are logarithms it is their difference, else a share of the magnitude.
        """
        missed: Floats = seen - self.values[slots]
        return missed if self._logarithmic else missed / self.magnitudes[slots]

    def begin(self, rows: Indices, first: Floats) -> None:
        """Set the level of the series `rows` to the median of their first values, [n, values]."""
        self.values[rows] = np.median(first, axis=1)
        if not self._logarithmic:
            self.magnitudes[rows] = np.maximum(np.median(np.abs(first), axis=1), np.float32(TINY))

    def follow(self, slots: Slots, seen: Floats) -> None:
        """Move the levels of the series `slots` towards the values `seen`; one that has not begun stays NaN."""
        level = self.values[slots]
        self.values[slots] = level + _FOLLOWED * (seen - level)
        if not self._logarithmic:
            magnitude, size = self.magnitudes[slots], np.maximum(np.abs(seen), np.float32(TINY))
            self.magnitudes[slots] = magnitude + _FOLLOWED * (size - magnitude)

    def reset(self, rows: Indices) -> None:
        """Set the level of the series `rows` to NaN, until `begin`."""
        self.values[rows] = np.nan


class UsualMisses:
    """Keeps by how much the last values of each series missed its level (`FollowedLevel`): trend and spread.

    Attributes:
        window: The misses, [series, values]; at the start, the values that the level begins at.
        trend: The usual miss; NaN during the warm-up.
        weight: 1 / standard deviation of the misses; NaN during the warm-up.
        next: The place in the window that is written next.
        num_learned: Values so far.
        start: The first so many values give the level.
        refresh_every: After so many values of its own a series has a new trend.
    """

    def __init__(self, condition: Spike) -> None:
        self.window = np.full((0, condition.window), np.nan, np.float32)
        self.weight = np.zeros(0, np.float32)
        self._condition = condition
        self.start = max(1, condition.warmup // _START)
        self.refresh_every = min(_REFRESH_EVERY, max(1, condition.window // _REFRESHES))
        self.next = np.zeros(0, np.intp)
        self.trend = np.zeros(0, np.float32)
        self.num_learned = np.zeros(0, np.int32)

    def grow(self, size: int) -> None:
        """Make room for the misses of `size` series."""
        self.window = grown(self.window, size, np.nan)
        self.weight = grown(self.weight, size, np.nan)
        self.next = grown(self.next, size, 0)
        self.trend = grown(self.trend, size, np.nan)
        self.num_learned = grown(self.num_learned, size, 0)

    def are_known(self, slots: Slots) -> Mask:
        """Return a mask of the series `slots` that have shown enough values to be judged."""
        return np.asarray(~np.isnan(self.trend[slots]))

    def score(self, slots: Slots, missed: Floats) -> Floats:
        """Return by how many standard deviations values miss more than usual; NaN during the warm-up."""
        score: Floats = self._excess(missed, self.trend[slots]) * self.weight[slots]
        return score

    def insert(self, slots: Slots, seen: Floats, missed: Floats) -> tuple[Indices, Indices]:
        """Add the misses of calm values; return the series whose level begins, and those whose trend is due."""
        num_learned = self.num_learned[slots] + np.int32(1)
        self.num_learned[slots] = num_learned
        place, indices = self.next[slots], as_indices(slots, len(self.next))
        self.window[indices, place] = np.where(num_learned <= self.start, seen, missed)
        place = place + 1
        place[place == self._condition.window] = 0
        self.next[slots] = place
        due = (num_learned % self.refresh_every == 0) | (num_learned == self._condition.warmup + 1)
        return indices[num_learned == self.start], indices[due]

    def take_first(self, rows: Indices) -> Floats:
        """Take out the first values of the series `rows`, whose level they begin."""
        first = self.window[rows, : self.start]
        self.window[rows, : self.start] = np.nan  # what they would have missed the level by is not kept
        return first

    def reset(self, rows: Indices) -> None:
        """Forget the misses of the series `rows`, which are then learned anew."""
        self.window[rows] = np.nan
        self.trend[rows] = np.nan
        self.next[rows] = 0
        self.num_learned[rows] = 0

    def _excess(self, missed: Floats, trend: Floats) -> Floats:
        """Return by how much the level is missed on the side that is watched, more than with and without the trend."""
        match self._condition.direction:
            case Direction.BOTH:
                excess: Floats = np.maximum(_above(missed, trend), _below(missed, trend))
            case Direction.DOWN:
                excess = _below(missed, trend)
            case Direction.UP:
                excess = _above(missed, trend)
        return excess

    def refresh(self, rows: Indices) -> None:
        """Bring trend and weight of the series `rows` up to date with their windows."""
        spread = spread_of(self.window[rows])
        is_known = spread.num_values > self._condition.warmup - self.start
        self.trend[rows] = np.where(is_known, spread.level, np.nan)
        self.weight[rows] = 1.0 / np.maximum(spread.sigma, np.float32(self._condition.floor))


def _above(missed: Floats, trend: Floats) -> Floats:
    above: Floats = missed - np.maximum(trend, np.float32(0.0))
    return above


def _below(missed: Floats, trend: Floats) -> Floats:
    below: Floats = np.minimum(trend, np.float32(0.0)) - missed
    return below


class FirstLevel:
    """Keeps the mean of the first values of each series, and says whether a later value is large enough to matter.

    Args:
        share: A value matters from this share of the first level on; 0 if every one does.
        logarithmic: Whether values are logarithms.

    Attributes:
        values: The means so far.
        count: Of how many values.
    """

    def __init__(self, share: float, *, logarithmic: bool) -> None:
        self._share = share
        self._logarithmic = logarithmic
        self.values = np.zeros(0, np.float32)
        self.count = np.zeros(0, np.int32)

    def grow(self, size: int) -> None:
        """Make room for the first levels of `size` series."""
        self.values = grown(self.values, size, 0)
        self.count = grown(self.count, size, 0)

    def learn(self, slots: Slots, seen: Floats) -> None:
        """Add values to the mean of the first values, while that is still being formed."""
        count = self.count[slots]
        learns = count < _FIRST_VALUES
        if np.count_nonzero(learns):
            indices = as_indices(slots, len(self.count))[learns]
            self.count[indices] += 1
            self.values[indices] += (seen[learns] - self.values[indices]) / self.count[indices]

    def share_of(self, slots: Slots) -> Floats:
        """Return `share` times the magnitude of the first level, for the series `slots`; not for logarithms."""
        share: Floats = np.abs(self.values[slots]) * np.float32(self._share)
        return share

    def matters(self, slots: Slots, seen: Floats, level: Floats) -> Mask:
        """Return which values, or for negative levels their distances from the level, are large enough to matter."""
        if self._logarithmic:
            return np.asarray(seen >= self.values[slots] + np.log(self._share))
        return np.asarray(seen - np.minimum(level, 0.0) >= self.share_of(slots))


def _union(first: Mask | None, second: Mask | None) -> Mask:
    if first is None or second is None:
        found = second if first is None else first
        assert found is not None
        return found
    return first | second
