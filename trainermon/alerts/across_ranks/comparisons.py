"""Which comparison of ranks belongs to which rule, and whether a rank is far from its peers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainermon.alerts.across_ranks.comparing import ComparedSeries, ComparisonMemory, are_calm
from trainermon.alerts.across_ranks.copies import DiffersComparison
from trainermon.alerts.across_ranks.few_ranks import FewRanks
from trainermon.alerts.across_ranks.peers import PeerPart, PeerTable, same_part
from trainermon.alerts.across_ranks.shards import DeadComparison
from trainermon.alerts.across_ranks.stragglers import StragglerComparison
from trainermon.alerts.conditions.condition import ConditionVerdict
from trainermon.alerts.conditions.criteria import BreaksLaw, Dead, Differs, Spread, Straggler
from trainermon.alerts.conditions.spread import MAD_TO_SIGMA, spread_of
from trainermon.alerts.laws.comparison import LawComparison
from trainermon.alerts.rules import AlertRule
from trainermon.core.derived import DERIVED, INFS, NANS, NEVER_NEGATIVE, Array

_TINY = 1e-30
_MANY = 4  # ranks, of which the middle is not moved by one of them


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
        case BreaksLaw() as when:
            return LawComparison(when)
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

    def judge(self, parts: Sequence[PeerPart]) -> list[ComparedSeries | None]:  # noqa: D102
        seen = self._table.arrange(parts, [self._seen(part.moments) for part in parts])[:, 0]
        score, level = np.full_like(seen, np.nan), np.full_like(seen, np.nan)
        for group in self._table.groups():
            if len(group.members) >= self._condition.ranks:
                place = np.ix_(group.members, group.columns)
                is_few = len(group.members) < _MANY
                score[place], level[place] = self._few.score(seen, group) if is_few else self._score(seen[place])
        if not np.count_nonzero(score > self._condition.score) and are_calm(parts):
            return [None] * len(parts)
        return [self._found(part, score[place], level[place]) for place, part in enumerate(parts)]

    def _seen(self, moments: Array) -> Array:
        value = self._derive(moments)
        seen = np.log(value) if self._logarithmic else value
        usable = np.isfinite(seen) & (moments[NANS] + moments[INFS] == 0)
        return np.where(usable, seen, np.nan)[None]

    def _score(self, seen: Array) -> tuple[Array, Array]:
        level, deviation, _, count = spread_of(np.ascontiguousarray(seen.T, np.float32))
        floor = self._condition.floor if self._logarithmic else self._condition.floor * np.abs(level)
        sigma = np.maximum(np.maximum(np.float32(MAD_TO_SIGMA) * deviation, floor), np.float32(_TINY))
        score = np.abs(seen - level) / sigma
        return np.where(count >= max(_MANY, self._condition.ranks), score, np.nan), np.broadcast_to(level, seen.shape)

    def _found(self, part: PeerPart, score: Array, level: Array) -> ComparedSeries:
        columns = self._table.columns_of(part)
        own, usual = score[columns], level[columns]
        blind = np.isnan(own)
        verdict = ConditionVerdict(
            self._derive(part.moments), own, own > self._condition.score, own < self._condition.clear, blind
        )
        return ComparedSeries(part.indices, part.moments, verdict, np.exp(usual) if self._logarithmic else usual)
