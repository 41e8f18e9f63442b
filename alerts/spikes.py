"""Whether a statistic left its usual range: the two-sided, robust, NaN-proof spike condition, and its cost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.conditions import Indices, Mask, Slots, Verdict, Watcher, as_indices, grown, mask_or_none
from trainermon.alerts.criteria import Direction, Spike
from trainermon.alerts.statistics import DERIVED, INFS, NANS, NEVER_NEGATIVE, Array

_REFRESHED_SHARE = 16  # every 16th baseline is computed anew per step: 0.1 instead of 1.5 ms for 3 000 series
MAD_TO_SIGMA = 1.4826  # of a normal distribution
_TINY = 1e-30  # a standard deviation of zero would make 0 / 0 of a constant series


class SpikeWatcher(Watcher):
    """The statistic left its usual range: the median and the median absolute deviation of its last values.

    The window of a series holds values that were seen while the series was calm, so neither a fault nor a NaN, an Inf
    or a zero ever enters it. A series that stays outside its range for `adopt` values forgets the range and learns the
    new level through another warm-up: a lasting shift is reported once and then accepted.

    Cost for 3 000 series and a window of 128: about 0.13 ms CPU a step, 1.5 MB.
    """

    def __init__(self, condition: Spike, statistic: str) -> None:
        self._condition = condition
        self._derive = DERIVED[statistic]
        self._logarithmic = statistic in NEVER_NEGATIVE
        self._window = np.full((0, condition.window), np.nan, np.float32)
        self._next = np.zeros(0, np.intp)  # the place in the window that is written next
        self._level = np.zeros(0, np.float32)
        self._weight = np.zeros(0, np.float32)  # 1 / standard deviation
        self._outside = np.zeros(0, np.int32)  # values in a row that were not learned
        self._refreshed = 0
        self._seen = np.zeros(0, np.float32)
        self._unusable: Mask | None = None

    def grow(self, size: int) -> None:  # noqa: D102
        self._window = grown(self._window, size, np.nan)
        self._next = grown(self._next, size, 0)
        self._level = grown(self._level, size, np.nan)
        self._weight = grown(self._weight, size, np.nan)
        self._outside = grown(self._outside, size, 0)

    def judge(self, slots: Slots, moments: Array) -> Verdict:  # noqa: D102
        value = self._derive(moments)
        usable = (moments[NANS] + moments[INFS]) == 0
        seen = np.log(value) if self._logarithmic else value
        self._seen = seen.astype(np.float32)
        usable &= np.isfinite(self._seen)  # the logarithm of zero is not
        self._unusable = mask_or_none(~usable)
        score = (self._seen - self._level[slots]) * self._weight[slots]
        if self._unusable is not None:
            score[self._unusable] = np.nan
        match self._condition.direction:
            case Direction.BOTH:
                score = np.abs(score)
            case Direction.DOWN:
                score = -score
            case Direction.UP:
                pass
        # A series that is still warming up has the score NaN and counts as clear: nothing is unusual yet.
        clear = ~(score >= self._condition.clear)
        if self._unusable is not None:
            clear &= usable
        return Verdict(value, score, score > self._condition.score, clear, self._unusable)

    def learn(self, slots: Slots, restless: Mask | None) -> None:  # noqa: D102
        if restless is None and self._unusable is None:
            self._insert(slots, self._seen)
        else:
            skipped = _union(restless, self._unusable)
            indices = as_indices(slots, len(self._level))
            self._insert(indices[~skipped], self._seen[~skipped])
        if restless is None:
            self._outside[slots] = 0
        else:
            self._count_outside(as_indices(slots, len(self._level)), restless)
        self._refresh()

    def baseline(self, slots: Indices) -> Array:  # noqa: D102
        level: Array = self._level[slots].astype(np.float64)
        return np.exp(level) if self._logarithmic else level

    def reset(self) -> None:  # noqa: D102
        self._outside[:] = 0

    def _insert(self, slots: Slots, seen: NDArray[np.float32]) -> None:
        place = self._next[slots]
        self._window[as_indices(slots, len(self._level)), place] = seen
        place = place + 1
        place[place == self._condition.window] = 0
        self._next[slots] = place

    def _count_outside(self, indices: Indices, restless: Mask) -> None:
        counted = restless if self._unusable is None else restless & ~self._unusable
        self._outside[indices] = np.where(restless, self._outside[indices] + counted, 0)
        lasting = indices[self._outside[indices] >= self._condition.adopt]
        if lasting.size:
            self._window[lasting] = np.nan
            self._level[lasting] = np.nan
            self._next[lasting] = 0
            self._outside[lasting] = 0

    def _refresh(self) -> None:
        size = len(self._level)
        rows = slice(self._refreshed % _REFRESHED_SHARE, size, _REFRESHED_SHARE)
        self._refreshed += 1
        level, deviation, count = median_and_deviation(self._window[rows])
        sigma = np.float32(MAD_TO_SIGMA) * deviation
        floor = self._condition.floor if self._logarithmic else self._condition.floor * np.abs(level)
        level[count < self._condition.warmup] = np.nan
        self._level[rows] = level
        self._weight[rows] = 1.0 / np.maximum(np.maximum(sigma, floor), np.float32(_TINY))


def median_and_deviation(
    window: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32], Indices]:
    """Return median, median absolute deviation and number of the values that are not NaN, for each row.

    Of an empty row, the first two are NaN. Two sorts are an order faster than `numpy.nanmedian` and take NaN, which
    sorts last, for granted.
    """
    width = window.shape[1]
    ascending = np.sort(window, axis=1)
    count = np.full(len(window), width)
    if np.isnan(ascending[:, -1]).any():
        count -= np.isnan(ascending).sum(axis=1)
    level = _middle(ascending, count)
    deviation = np.abs(ascending - level[:, None])
    deviation.sort(axis=1)
    return level, _middle(deviation, count), count


def _middle(ascending: NDArray[np.float32], count: Indices) -> NDArray[np.float32]:
    rows = np.arange(len(ascending))
    lower, upper = ascending[rows, np.maximum(count - 1, 0) // 2], ascending[rows, count // 2]
    middle: NDArray[np.float32] = (lower + upper) * np.float32(0.5)
    return middle


def _union(first: Mask | None, second: Mask | None) -> Mask:
    if first is None or second is None:
        found = second if first is None else first
        assert found is not None
        return found
    return first | second
