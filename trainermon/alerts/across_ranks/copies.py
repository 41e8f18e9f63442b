"""Whether ranks differ that must not: copies of the same elements, or members of a group that count its collectives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.across_ranks.comparing import ComparedSeries, ComparisonMemory, are_calm
from trainermon.alerts.across_ranks.peers import PeerGroup, PeerPart, PeerTable, same_elements
from trainermon.alerts.conditions.condition import ConditionVerdict, Mask
from trainermon.alerts.conditions.criteria import Differs
from trainermon.core.derived import COUNT, DERIVED, MOMENTS, SUM, Array

_UNDECIDED = -1.0  # not what the others show, but nothing says that it is the wrong one
_CLEARLY = 4.0  # times as far from what all had before as another copy: then it is that one which was changed


class DiffersComparison(ComparisonMemory):
    """Finds ranks that differ where all must be equal; the value that most ranks have is taken as right.

    Where nothing has a majority, of counts those with the smallest one are named. Of other values it is the rank that
    has moved `_CLEARLY` further than another from what all showed when they agreed last; where that does not tell, or
    not the same for all tensors, or bits are compared, all of them are named. Each is compared with what it is not: a
    value of the others. An alert is over on no rank whose value differs without being outvoted, named or not.
    """

    def __init__(self, condition: Differs, statistic: str) -> None:
        super().__init__()
        self._tolerance = condition.tolerance
        self._fewest = condition.fewest
        self.is_patient = not condition.fewest  # who has begun fewer collectives is told while the others wait for it
        self._derive = None if statistic == MOMENTS else DERIVED[statistic]
        self._table = PeerTable(same_elements)
        self._agreed: Array = np.zeros((0, 0))  # [ranks, columns]: the value when all members agreed last

    def reset(self) -> None:  # noqa: D102 - as in Comparison
        self._table.reset()
        self._agreed = np.zeros((0, 0))

    def judge(self, parts: Sequence[PeerPart]) -> list[ComparedSeries | None]:  # noqa: D102
        compared = [part.moments if self._derive is None else self._derive(part.moments)[None] for part in parts]
        values = self._table.arrange(parts, compared)
        shown = self._table.arrange(parts, [part.moments[COUNT][None] for part in parts])[:, 0]
        values = np.where(np.isnan(values), np.inf, values)  # what is undefined on all ranks is the same on all
        status = np.full((len(parts), values.shape[2]), np.nan)
        usual = np.full_like(status, np.nan)
        self._make_room(status.shape)
        for group in self._table.groups():
            self._judge_group(values, ~np.isnan(shown), group, status, usual)
        self.num_compared += bool((~np.isnan(status)).any())
        for part in parts:
            self.num_odd.setdefault(part.rank, 0)
        if not np.count_nonzero(status > 0) and are_calm(parts):
            return [None] * len(parts)
        return [self._found(part, status[place], usual[place]) for place, part in enumerate(parts)]

    def _make_room(self, shape: tuple[int, ...]) -> None:
        if self._agreed.shape != shape:
            known, self._agreed = self._agreed, np.full(shape, np.nan)
            if len(known) == len(self._agreed):
                self._agreed[:, : known.shape[1]] = known

    def _judge_group(self, values: Array, shown: Mask, group: PeerGroup, status: Array, usual: Array) -> None:
        members, columns = group
        place = np.ix_(members, columns)
        present = shown[place]
        several = present.sum(axis=0) > 1
        status[place] = np.where(present & several, 0.0, np.nan)
        inner = values[members][:, :, columns]
        one_value = inner[:, 0 if self._derive else SUM]
        agrees = (self._equal(inner, inner[:1]) & present).all(axis=0)
        odd = np.flatnonzero(several & ~agrees)
        if odd.size:
            block, here = inner[:, :, odd], present[:, odd]
            same = np.stack([self._equal(block, block[[one]]) & here & here[one] for one in range(len(members))])
            votes = same.sum(axis=1) * here  # [ranks, columns]: how many show what this one shows
            place_odd = np.ix_(members, columns[odd])
            wrong = self._wrong(votes, here, one_value[:, odd], self._agreed[place_odd])
            tied = 2 * votes.max(axis=0) <= here.sum(axis=0)
            status[place_odd] = np.where(here, np.where(wrong, 1.0, np.where(tied, _UNDECIDED, 0.0)), np.nan)
            usual[place_odd] = _of_others(same, votes, one_value[:, odd])
        self._agreed[place] = np.where(agrees & several, one_value, self._agreed[place])

    def _wrong(self, votes: NDArray[np.intp], here: Mask, value: Array, agreed: Array) -> Mask:
        """Return which of the values `[ranks, columns]` are wrong; `agreed` is what they were when all agreed last."""
        most, num_present = votes.max(axis=0), here.sum(axis=0)
        tied = 2 * most <= num_present
        wrong: Mask = here & (votes < num_present) & ((votes < most) | tied)
        if self._fewest:
            least = np.where(here, value, np.inf).min(axis=0)
            return np.asarray(wrong & (~tied | (value == least)))
        if self._derive is None:
            return wrong
        moved = np.abs(value - agreed)
        still = np.fmin.reduce(np.where(here, moved, np.nan), axis=0)
        known = tied & (np.fmax.reduce(moved, axis=0) > _CLEARLY * still)
        has_moved = moved > _CLEARLY * still
        if (has_moved[:, known].any(axis=1) & (here & ~has_moved)[:, known].any(axis=1)).any():
            return wrong  # one tensor says so of this rank, another of that one
        return np.asarray(wrong & (~known | has_moved))

    def _equal(self, one: Array, other: Array) -> NDArray[np.bool_]:
        """Return whether all statistics, the last axis but one, are equal."""
        if not self._tolerance:
            return np.asarray((one == other).all(axis=-2))
        close = np.abs(one - other) <= self._tolerance * np.maximum(np.abs(one), np.abs(other))
        return np.asarray((close | (one == other)).all(axis=-2))

    def _found(self, part: PeerPart, status: Array, usual: Array) -> ComparedSeries:
        columns = self._table.columns_of(part)
        own = status[columns]
        self.num_odd[part.rank] += int((own > 0).sum())
        value = part.moments[SUM] if self._derive is None else self._derive(part.moments)
        verdict = ConditionVerdict(value, own, own > 0, own == 0, np.isnan(own))
        return ComparedSeries(part.indices, part.moments, verdict, usual[columns])


def _of_others(same: Mask, votes: NDArray[np.intp], value: Array) -> Array:
    """Return for each rank what most of those show that do not show the same as it."""
    others = np.where(same, 0, votes[None])  # [rank, other, columns]
    found: Array = np.take_along_axis(value, others.argmax(axis=1), axis=0)
    return found
