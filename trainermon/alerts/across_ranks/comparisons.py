"""What a comparison of ranks says: one far from its peers, copies that differ, a rank that holds up the others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from trainermon.alerts.across_ranks.comparing import ComparisonMemory, Found
from trainermon.alerts.across_ranks.copies import DiffersComparison
from trainermon.alerts.across_ranks.few_ranks import FewRanks
from trainermon.alerts.across_ranks.peers import PeerPart, PeerTable, same_part, same_stage
from trainermon.alerts.across_ranks.shards import DeadComparison
from trainermon.alerts.conditions.condition import ConditionVerdict, Indices
from trainermon.alerts.conditions.criteria import Dead, Differs, Spread, Straggler
from trainermon.alerts.conditions.spikes import MAD_TO_SIGMA, median_and_deviation
from trainermon.alerts.conditions.watchers import STRAGGLER_HISTORY
from trainermon.alerts.rules import AlertRule
from trainermon.core.derived import DERIVED, INFS, NANS, NEVER_NEGATIVE, SUM, Array
from trainermon.core.values import Kind

_TINY = 1e-30
_MANY = 4  # ranks, of which the middle is not moved by one of them
_LEAST_WORK = 0.01  # of a step: waits that overlap may add up to more than the step
_MIN_HISTORY = 64
_REFRESH_STEPS = 8
_MEDIAN_ERROR = 1.2533  # of the median against that of the mean, for a normal distribution
_SIGNIFICANT = 4.0  # standard errors: jobs whose steps vary a lot have a slowest rank by chance all the time


def make_comparison(rule: AlertRule) -> ComparisonMemory | None:
    """Return a new object that compares ranks by `rule`; None for a rule that looks at one rank alone."""
    match rule.when:
        case Spread() as when:
            return SpreadComparison(when, rule.on.statistic)
        case Differs() as when:
            return DiffersComparison(when, rule.on.statistic)
        case Straggler() as when:
            return StragglerComparison(when)
        case Dead() as when:
            return DeadComparison(when)
    return None


class SpreadComparison(ComparisonMemory):
    """Finds ranks whose statistic is far from their peers' median, in robust standard deviations.

    Of fewer than four ranks nobody is in the middle: there the usual distances and the rank's own past decide.
    """

    def __init__(self, condition: Spread, statistic: str) -> None:
        super().__init__()
        self._condition = condition
        self._derive = DERIVED[statistic]
        self._logarithmic = statistic in NEVER_NEGATIVE
        self._table = PeerTable(same_part)
        self._few = FewRanks(score=condition.clear, floor=condition.floor, logarithmic=self._logarithmic)

    def reset(self) -> None:  # noqa: D102 - as in Comparison, here and below
        self._table.reset()
        self._few.reset()

    def judge(self, parts: Sequence[PeerPart]) -> list[Found | None]:  # noqa: D102
        seen = self._table.arrange(parts, [self._seen(part.moments) for part in parts])[:, 0]
        score, level = np.full_like(seen, np.nan), np.full_like(seen, np.nan)
        for group in self._table.groups():
            if len(group.members) >= self._condition.ranks:
                place = np.ix_(group.members, group.columns)
                is_few = len(group.members) < _MANY
                score[place], level[place] = self._few.score(seen, group) if is_few else self._score(seen[place])
        return [self._found(part, score[place], level[place]) for place, part in enumerate(parts)]

    def _seen(self, moments: Array) -> Array:
        value = self._derive(moments)
        seen = np.log(value) if self._logarithmic else value
        usable = np.isfinite(seen) & (moments[NANS] + moments[INFS] == 0)
        return np.where(usable, seen, np.nan)[None]

    def _score(self, seen: Array) -> tuple[Array, Array]:
        level, deviation, count = median_and_deviation(np.ascontiguousarray(seen.T, np.float32))
        floor = self._condition.floor if self._logarithmic else self._condition.floor * np.abs(level)
        sigma = np.maximum(np.maximum(np.float32(MAD_TO_SIGMA) * deviation, floor), np.float32(_TINY))
        score = np.abs(seen - level) / sigma
        return np.where(count >= max(_MANY, self._condition.ranks), score, np.nan), np.broadcast_to(level, seen.shape)

    def _found(self, part: PeerPart, score: Array, level: Array) -> Found:
        columns = self._table.columns_of(part)
        own, usual = score[columns], level[columns]
        blind = np.isnan(own)
        verdict = ConditionVerdict(
            self._derive(part.moments), own, own > self._condition.score, own < self._condition.clear, blind
        )
        return np.arange(len(columns)), verdict, np.exp(usual) if self._logarithmic else usual


class StragglerComparison(ComparisonMemory):
    """Finds ranks whose own work takes longer than their peers', or longer than it used to; waiting is not work.

    Compared are medians of the last steps. What a rank usually needs is known relative to its peers only, so that ranks
    which slow down together are no stragglers.
    """

    def __init__(self, condition: Straggler) -> None:
        super().__init__()
        self._ratio = condition.ratio
        self._window = condition.window
        self._paces: dict[int, _RankPace] = {}

    def reset(self) -> None:  # noqa: D102
        self._paces.clear()
        self.slowness.clear()

    def judge(self, parts: Sequence[PeerPart]) -> list[Found | None]:  # noqa: D102
        works = [_work_of(part) for part in parts]
        paces = [self._paces.setdefault(part.rank, _RankPace(self._window)) for part in parts]
        for pace, work in zip(paces, works, strict=True):
            pace.add(work.own_s)
        logarithms = np.log([pace.last_s for pace in paces])
        levels = np.median(logarithms, axis=1)  # NaN for a rank that has not shown enough steps
        deviations = np.median(np.abs(logarithms - levels[:, None]), axis=1)
        variances = (_MEDIAN_ERROR * MAD_TO_SIGMA * deviations) ** 2 / self._window
        found: list[Found | None] = []
        for place, (work, pace) in enumerate(zip(works, paces, strict=True)):
            peers = [
                n for n, other in enumerate(works) if n != place and other.label == work.label and levels[n] > -np.inf
            ]
            if work.rows.size and peers and levels[place] > -np.inf:
                chance = math.sqrt(variances[place] + sum(variances[peers]) / len(peers) ** 2)
                self.slowness[parts[place].rank] = math.exp(levels[place] - _median(levels[peers]))
                found.append(self._verdict(work, pace, levels[place], _median(levels[peers]), chance))
            else:
                found.append(None)
        return found

    def _verdict(self, work: _StepWork, pace: _RankPace, own: float, theirs: float, chance: float) -> Found:
        """Return what is said of a rank, by the logarithms of its own work and of that of its peers."""
        apart, usually_apart = own - theirs, pace.usually_apart
        excess = max(apart, apart - usually_apart)  # NaN is never greater
        if excess == apart:
            usually_apart = 0.0
        limit = math.log(self._ratio)
        if not excess > limit:
            pace.learn(apart)
        bad = np.array([excess > max(limit, _SIGNIFICANT * chance)])
        clear = np.array([excess < limit / 2.0])
        verdict = ConditionVerdict(np.array([math.exp(own)]), np.array([math.exp(excess)]), bad, clear)
        return work.rows[:1], verdict, np.array([math.exp(theirs + usually_apart)])


class _StepWork(NamedTuple):
    """What a rank did in a step: the rows that are times, its own work, and what peers have in common."""

    rows: Indices
    own_s: float
    label: Hashable


def _work_of(part: PeerPart) -> _StepWork:
    """Return the time less the waits. Ranks whose waits are known are no peers of those whose are not."""
    keys = [part.watch.keys[index] for index in part.indices]
    is_time = np.array([key.kind is Kind.STEP for key in keys], np.bool_)
    sums = part.moments[SUM]
    whole_s, waited_s = float(sums[is_time].sum()), float(sums[~is_time].sum())
    label = (same_stage(keys[0], None, part.place), bool(is_time.all()))
    return _StepWork(np.flatnonzero(is_time), max(whole_s - waited_s, _LEAST_WORK * whole_s), label)


class _RankPace:
    """How long a rank's own work took on the last steps, and how far it usually is from its peers.

    Attributes:
        last_s: Own work of the last steps in any order; NaN where there was none yet.
        usually_apart: Usual difference of its logarithm from the peers'; NaN until there are enough steps.
    """

    def __init__(self, window: int) -> None:
        self.last_s: Array = np.full(window, np.nan)
        self.usually_apart = np.nan
        self._next = 0
        self._apart: deque[float] = deque(maxlen=STRAGGLER_HISTORY)
        self._num_learned = 0

    def add(self, own_s: float) -> None:
        """Add the work of one step; nothing if it is not known."""
        if 0.0 < own_s < np.inf:
            self.last_s[self._next] = own_s
            self._next = (self._next + 1) % len(self.last_s)

    def learn(self, apart: float) -> None:
        """Take the distance from the peers on a calm step for usual."""
        self._apart.append(apart)
        self._num_learned += 1
        if len(self._apart) >= _MIN_HISTORY and self._num_learned % _REFRESH_STEPS == 0:
            self.usually_apart = _median(np.array(self._apart))


def _median(values: Array) -> float:
    return float(np.median(values))
