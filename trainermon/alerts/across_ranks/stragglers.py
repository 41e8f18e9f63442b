"""Which rank holds up the others: by its own work, which is the time of a step less the waits for other ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.across_ranks.comparing import ComparedSeries, ComparisonMemory, are_calm
from trainermon.alerts.across_ranks.peers import PeerPart, same_stage
from trainermon.alerts.conditions.condition import ConditionVerdict, Indices, grown
from trainermon.alerts.conditions.criteria import Straggler
from trainermon.alerts.conditions.spread import MAD_TO_SIGMA
from trainermon.alerts.conditions.watchers import STRAGGLER_HISTORY
from trainermon.core.derived import SUM, Array
from trainermon.core.values import Kind

_LEAST_WORK = 0.01  # of a step: waits that overlap may add up to more than the step
_MIN_HISTORY = 64
_REFRESH_STEPS = 8
_MEDIAN_ERROR = 1.2533  # of the median against that of the mean, for a normal distribution
_SIGNIFICANT = 4.0  # standard errors: jobs whose steps vary a lot have a slowest rank by chance all the time


class StragglerComparison(ComparisonMemory):
    """Finds ranks whose own work takes longer than their peers', or longer than it used to; waiting is not work.

    Compared are medians of the last steps, by their ratio and, so that what a scheduler does to short steps is nobody's
    fault, by their difference and by how long it lasts. What a rank usually needs is known relative to its peers only,
    so that ranks which slow down together are no stragglers.
    """

    def __init__(self, condition: Straggler) -> None:
        super().__init__()
        self._limit = np.log(condition.ratio)
        self._least_s = condition.least_s
        self._lasts_s, self._half_window = condition.lasts_s, condition.window // 2
        self._lasted_s: dict[int, float] = {}  # by rank, how long it has been slower
        self._paces = RankPaces(condition.window)
        self._place_of: dict[int, int] = {}  # by rank, its place among the paces
        self._rows_of: dict[int, _WorkRows] = {}

    def reset(self) -> None:  # noqa: D102 - as in ComparisonMemory, here and below
        self._paces.clear()
        self._place_of.clear()
        self._rows_of.clear()
        self._lasted_s.clear()
        self.slowness.clear()

    def judge(self, parts: Sequence[PeerPart]) -> list[ComparedSeries | None]:  # noqa: D102
        places = np.array([self._place_of.setdefault(part.rank, len(self._place_of)) for part in parts])
        rows = [self._rows(part) for part in parts]
        self._paces.add(places, np.array([own.work_s(part) for own, part in zip(rows, parts, strict=True)]))
        levels, variances = self._paces.levels(places)
        theirs, chance = _of_peers([own.label for own in rows], levels, variances)
        judged = ~np.isnan(theirs) & np.array([bool(own.times.size) for own in rows])
        if not judged.any():
            return [None] * len(parts)
        apart, usually = levels - theirs, self._paces.usually_apart[places]
        used = np.where(apart - usually > apart, usually, 0.0)  # of NaN nothing is used
        excess = apart - used
        calm = judged & ~(excess > self._limit)
        self._paces.learn(places[calm], apart[calm])
        self._note_slowness(parts, judged, np.exp(apart))
        value, baseline = np.exp(levels), np.exp(theirs + used)
        more_s = value - np.exp(theirs)
        slower = judged & (excess > np.maximum(self._limit, _SIGNIFICANT * chance)) & (more_s > self._least_s)
        bad = slower & (self._lasting_s(parts, rows, slower) > self._lasts_s)
        if not bad.any() and are_calm(parts):
            return [None] * len(parts)
        clear, score = (excess < self._limit / 2.0) | (more_s < self._least_s / 2.0), np.exp(excess)
        return [
            ComparedSeries(
                parts[n].indices[rows[n].times[:1]],
                parts[n].moments[:, rows[n].times[:1]],
                ConditionVerdict(*(each[n : n + 1] for each in (value, score, bad, clear))),
                baseline[[n]],
            )
            if judged[n]
            else None
            for n in range(len(parts))
        ]

    def _lasting_s(self, parts: Sequence[PeerPart], rows: Sequence[_WorkRows], slower: NDArray[np.bool_]) -> Array:
        """Return for how long each rank has been slower: half a window when its median shows it, and from then on."""
        for part, own, is_slower in zip(parts, rows, slower.tolist(), strict=True):
            before_s, step_s = self._lasted_s.get(part.rank, 0.0), own.whole_s(part)
            self._lasted_s[part.rank] = (before_s or self._half_window * step_s) + step_s if is_slower else 0.0
        return np.array([self._lasted_s[part.rank] for part in parts])

    def _note_slowness(self, parts: Sequence[PeerPart], judged: NDArray[np.bool_], ratio: Array) -> None:
        for part, is_judged, slowness in zip(parts, judged.tolist(), ratio.tolist(), strict=True):
            if is_judged:
                self.slowness[part.rank] = slowness

    def _rows(self, part: PeerPart) -> _WorkRows:
        known = self._rows_of.get(part.rank)
        if known is None or known.indices is not part.indices:
            known = self._rows_of[part.rank] = _work_rows(part)
        return known


class RankPaces:
    """How long the own work of ranks took on their last steps, and how far each usually is from its peers.

    Args:
        window: The median of so many steps is a rank's pace.

    Attributes:
        usually_apart: By place of a rank, the usual difference of its logarithm from the peers'; NaN until there are
            enough steps.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self.clear()

    def clear(self) -> None:
        """Forget all ranks."""
        self.usually_apart = np.zeros(0)
        self._last = np.zeros((0, self._window))  # logarithms of the last steps in any order; NaN: none yet
        self._next = np.zeros(0, np.intp)
        self._apart = np.zeros((0, STRAGGLER_HISTORY))
        self._num_learned = np.zeros(0, np.intp)

    def add(self, places: Indices, own_s: Array) -> None:
        """Add the work of one step of the ranks at `places`; nothing where it is not known."""
        self._make_room(int(places.max()) + 1)
        known = (own_s > 0.0) & (own_s < np.inf)
        at = places[known]
        self._last[at, self._next[at]] = np.log(own_s[known])
        self._next[at] = (self._next[at] + 1) % self._window

    def levels(self, places: Indices) -> tuple[Array, Array]:
        """Return the logarithms of the ranks' paces, and the squares of their standard errors.

        NaN for a rank that has not shown enough steps.
        """
        last = self._last[places]
        levels = _median_of_rows(last)
        deviations = _median_of_rows(np.abs(last - levels[:, None]))
        return levels, (_MEDIAN_ERROR * MAD_TO_SIGMA * deviations) ** 2 / self._window

    def learn(self, places: Indices, apart: Array) -> None:
        """Take the distance from the peers on a calm step for usual."""
        self._apart[places, self._num_learned[places] % STRAGGLER_HISTORY] = apart
        self._num_learned[places] += 1
        learned = self._num_learned[places]
        for place in places[(learned >= _MIN_HISTORY) & (learned % _REFRESH_STEPS == 0)].tolist():
            self.usually_apart[place] = np.median(self._apart[place, : self._num_learned[place]])

    def _make_room(self, size: int) -> None:
        if size > len(self._next):
            self.usually_apart = grown(self.usually_apart, size, np.nan)
            self._last = grown(self._last, size, np.nan)
            self._next = grown(self._next, size, 0)
            self._apart = grown(self._apart, size, np.nan)
            self._num_learned = grown(self._num_learned, size, 0)


class _WorkRows(NamedTuple):
    """Which of a rank's series are times and which are waits, and what its peers have in common with it."""

    indices: Indices
    times: Indices
    waits: Indices
    label: Hashable

    def whole_s(self, part: PeerPart) -> float:
        return float(part.moments[SUM][self.times].sum())

    def work_s(self, part: PeerPart) -> float:
        whole_s, waited_s = self.whole_s(part), float(part.moments[SUM][self.waits].sum())
        return max(whole_s - waited_s, _LEAST_WORK * whole_s)


def _work_rows(part: PeerPart) -> _WorkRows:
    """Return where times and waits are. Ranks whose waits are known are no peers of those whose are not."""
    keys = [part.watch.keys[index] for index in part.indices]
    is_time = np.array([key.kind is Kind.STEP for key in keys], np.bool_)
    label = (same_stage(keys[0], None, part.place), bool(is_time.all()))
    return _WorkRows(part.indices, np.flatnonzero(is_time), np.flatnonzero(~is_time), label)


def _of_peers(labels: Sequence[Hashable], levels: Array, variances: Array) -> tuple[Array, Array]:
    """Return the median of the levels of each rank's peers, and the standard error of its distance from them.

    NaN for a rank without a level, or without a peer that has one.
    """
    theirs, chance = np.full(len(levels), np.nan), np.full(len(levels), np.nan)
    members_of: dict[Hashable, list[int]] = {}
    for place, (label, is_unknown) in enumerate(zip(labels, np.isnan(levels).tolist(), strict=True)):
        if not is_unknown:
            members_of.setdefault(label, []).append(place)
    for members in members_of.values():
        if len(members) > 1:
            own = variances[members]
            others = np.maximum(own.sum() - own, 0.0) / (len(members) - 1) ** 2
            theirs[members], chance[members] = _medians_of_others(levels[members]), np.sqrt(own + others)
    return theirs, chance


def _medians_of_others(values: Array) -> Array:
    """Return for each of two and more values the median of all but it."""
    order = np.argsort(values, kind="stable")
    place = np.empty(len(values), np.intp)
    place[order] = np.arange(len(values))
    ascending, num_others = values[order], len(values) - 1
    lower, upper = (num_others - 1) // 2, num_others // 2
    middle: Array = (ascending[lower + (place <= lower)] + ascending[upper + (place <= upper)]) * 0.5
    return middle


def _median_of_rows(values: Array) -> Array:
    """Return the median of each row; NaN of one that holds a NaN."""
    ascending, width = np.sort(values, axis=1), values.shape[1]
    middle: Array = (ascending[:, (width - 1) // 2] + ascending[:, width // 2]) * 0.5
    return np.where(np.isnan(ascending[:, -1]), np.nan, middle)
