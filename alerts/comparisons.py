"""What a comparison of ranks says: one far from its peers, copies that differ, a rank that holds up the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.conditions import Indices, Mask, Verdict
from trainermon.alerts.criteria import Differs, Spread, Straggler
from trainermon.alerts.peers import Part, PeerGroup, PeerTable, same_elements, same_part, same_stage
from trainermon.alerts.rules import Rule
from trainermon.alerts.spikes import MAD_TO_SIGMA, median_and_deviation
from trainermon.alerts.statistics import COUNT, DERIVED, INFS, MOMENTS, NANS, NEVER_NEGATIVE, SUM, Array
from trainermon.alerts.watchers import STRAGGLER_HISTORY
from trainermon.monitor.values import Kind

Found = tuple[Indices, Verdict, Array]
"""Which of a part's series are judged, what is said of them, and what they were compared with."""

_TINY = 1e-30
_LEAST_WORK = 0.01  # of a step: waits that overlap may add up to more than the step
_MIN_HISTORY = 64


class Comparison:
    """What one rule that compares ranks remembers."""

    def judge(self, parts: Sequence[Part]) -> list[Found | None]:
        """Return what is said of each rank's part of one step; None where nothing can be said."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget what belongs to the attempt that has ended."""


def make_comparison(rule: Rule) -> Comparison | None:
    """Return the comparison of a rule, None for one that looks at one rank alone."""
    match rule.when:
        case Spread() as when:
            return SpreadComparison(when, rule.on.statistic)
        case Differs() as when:
            return DiffersComparison(when, rule.on.statistic)
        case Straggler() as when:
            return StragglerComparison(when)
    return None


class SpreadComparison(Comparison):
    """The statistic of one rank is far from the median of its peers, in robust standard deviations."""

    def __init__(self, condition: Spread, statistic: str) -> None:
        self._condition = condition
        self._derive = DERIVED[statistic]
        self._logarithmic = statistic in NEVER_NEGATIVE
        self._table = PeerTable(same_part)

    def reset(self) -> None:  # noqa: D102 - as in Comparison, here and below
        self._table.reset()

    def judge(self, parts: Sequence[Part]) -> list[Found | None]:  # noqa: D102
        seen = self._table.arrange(parts, [self._seen(part.moments) for part in parts])[:, 0]
        score, level = np.full_like(seen, np.nan), np.full_like(seen, np.nan)
        for group in self._table.groups():
            if len(group.members) >= self._condition.ranks:
                place = np.ix_(group.members, group.columns)
                score[place], level[place] = self._score(seen[place])
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
        return np.where(count >= self._condition.ranks, score, np.nan), np.broadcast_to(level, seen.shape)

    def _found(self, part: Part, score: Array, level: Array) -> Found:
        columns = self._table.columns_of(part)
        own, usual = score[columns], level[columns]
        blind = np.isnan(own)
        verdict = Verdict(
            self._derive(part.moments), own, own > self._condition.score, own < self._condition.clear, blind
        )
        return np.arange(len(columns)), verdict, np.exp(usual) if self._logarithmic else usual


class DiffersComparison(Comparison):
    """Ranks that must show the same do not; those in the minority are named, on a tie all of them."""

    def __init__(self, condition: Differs, statistic: str) -> None:
        self._tolerance = condition.tolerance
        self._derive = None if statistic == MOMENTS else DERIVED[statistic]
        self._table = PeerTable(same_elements)

    def reset(self) -> None:  # noqa: D102
        self._table.reset()

    def judge(self, parts: Sequence[Part]) -> list[Found | None]:  # noqa: D102
        compared = [part.moments if self._derive is None else self._derive(part.moments)[None] for part in parts]
        values = self._table.arrange(parts, compared)
        shown = self._table.arrange(parts, [part.moments[COUNT][None] for part in parts])[:, 0]
        values = np.where(np.isnan(values), np.inf, values)  # what is undefined on all ranks is the same on all
        status = np.full((len(parts), values.shape[2]), np.nan)
        usual = np.full_like(status, np.nan)
        for group in self._table.groups():
            self._judge_group(values, ~np.isnan(shown), group, status, usual)
        return [self._found(part, status[place], usual[place]) for place, part in enumerate(parts)]

    def _judge_group(self, values: Array, shown: Mask, group: PeerGroup, status: Array, usual: Array) -> None:
        members, columns = group
        place = np.ix_(members, columns)
        present = shown[place]
        several = present.sum(axis=0) > 1
        status[place] = np.where(present & several, 0.0, np.nan)
        inner = values[members][:, :, columns]
        odd = np.flatnonzero(several & ~(self._equal(inner, inner[:1]) & present).all(axis=0))
        if odd.size:
            block, here = inner[:, :, odd], present[:, odd]
            votes = sum(self._equal(block, block[[one]]) & here[one] for one in range(len(members))) * here
            most, num_present = votes.max(axis=0), here.sum(axis=0)
            wrong = here & (votes < num_present) & ((votes < most) | (2 * most <= num_present))
            place = np.ix_(members, columns[odd])
            status[place] = np.where(here, wrong, np.nan)
            right = block[votes.argmax(axis=0), 0 if self._derive else SUM, np.arange(odd.size)]
            usual[place] = np.broadcast_to(right, here.shape)

    def _equal(self, one: Array, other: Array) -> NDArray[np.bool_]:
        """Return whether all statistics, the last axis but one, are equal."""
        if not self._tolerance:
            return np.asarray((one == other).all(axis=-2))
        close = np.abs(one - other) <= self._tolerance * np.maximum(np.abs(one), np.abs(other))
        return np.asarray((close | (one == other)).all(axis=-2))

    def _found(self, part: Part, status: Array, usual: Array) -> Found:
        columns = self._table.columns_of(part)
        own = status[columns]
        value = part.moments[SUM] if self._derive is None else self._derive(part.moments)
        return np.arange(len(columns)), Verdict(value, own, own > 0, own == 0, np.isnan(own)), usual[columns]


class _Pace:
    """How long a rank's own work takes: of the last steps, and usually."""

    def __init__(self, window: int) -> None:
        self.last: deque[float] = deque(maxlen=window)
        self.usual: deque[float] = deque(maxlen=STRAGGLER_HISTORY)

    @property
    def now_s(self) -> float:
        """Median of the last steps; NaN until there are enough."""
        return float(np.median(self.last)) if len(self.last) == self.last.maxlen else np.nan

    @property
    def usual_s(self) -> float:
        """Median of the calm steps; NaN until there are enough."""
        return float(np.median(self.usual)) if len(self.usual) >= _MIN_HISTORY else np.nan


class StragglerComparison(Comparison):
    """A rank's own work takes longer than its peers', or grew while theirs did not; a rank that waits does not work."""

    def __init__(self, condition: Straggler) -> None:
        self._ratio = condition.ratio
        self._window = condition.window
        self._paces: dict[int, _Pace] = {}

    def reset(self) -> None:  # noqa: D102
        self._paces.clear()

    def judge(self, parts: Sequence[Part]) -> list[Found | None]:  # noqa: D102
        timed = [self._times(part) for part in parts]
        paces = [self._pace(part.rank, own_s) for part, (_, own_s) in zip(parts, timed, strict=True)]
        now_s = np.array([pace.now_s for pace in paces])
        grown = now_s / np.array([pace.usual_s for pace in paces])
        stages = [same_stage(part.watch.keys[0], None, part.place) for part in parts]
        found: list[Found | None] = []
        for place, (rows, own_s) in enumerate(timed):
            peers = [other for other, stage in enumerate(stages) if other != place and stage == stages[place]]
            if not rows.size or not peers:
                found.append(None)
                continue
            theirs_s, their_growth = _median(now_s[peers]), _median(grown[peers])
            scores = (now_s[place] / theirs_s, grown[place] / their_growth)
            usual_s = theirs_s if not scores[1] > scores[0] else paces[place].usual_s
            found.append(self._verdict(rows, now_s[place], float(np.fmax(*scores)), usual_s))
            if own_s > 0 and not np.fmax(*scores) > self._ratio:
                paces[place].usual.append(own_s)
        return found

    def _times(self, part: Part) -> tuple[Indices, float]:
        """Return the rows that are times, and how long the rank itself has worked, NaN if that is not known."""
        kinds = np.array([part.watch.keys[index].kind is Kind.STEP for index in part.indices], np.bool_)
        sums = part.moments[SUM]
        whole_s = float(sums[kinds].sum())
        own_s = max(whole_s - float(sums[~kinds].sum()), _LEAST_WORK * whole_s)
        return np.flatnonzero(kinds), own_s if whole_s > 0 and np.isfinite(own_s) else np.nan

    def _pace(self, rank: int, own_s: float) -> _Pace:
        pace = self._paces.setdefault(rank, _Pace(self._window))
        if own_s > 0:
            pace.last.append(own_s)
        return pace

    def _verdict(self, rows: Indices, now_s: float, score: float, usual_s: float) -> Found:
        column = np.ones(1)
        bad = np.array([score > self._ratio])
        clear = np.array([score < 1.0 + (self._ratio - 1.0) / 2.0])
        verdict = Verdict(now_s * column, score * column, bad, clear, np.isnan(score * column))
        return rows[:1], verdict, usual_s * column


def _median(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else np.nan
