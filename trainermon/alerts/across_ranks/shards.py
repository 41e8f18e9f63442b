"""Whether a tensor has died, by what all ranks of the node hold of it: a shard by itself is no parameter."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from trainermon.alerts.across_ranks.comparing import ComparisonMemory, Found
from trainermon.alerts.across_ranks.peers import PeerPart, PeerTable
from trainermon.alerts.conditions.condition import ConditionVerdict, Indices, grown
from trainermon.alerts.conditions.criteria import Dead
from trainermon.core.derived import COUNT, ZEROS, Array
from trainermon.core.values import Coordinates, Placement, SeriesKey


class DeadComparison(ComparisonMemory):
    """Finds tensors that lived and whose share of zeros, over all ranks, has reached a limit: the score is the share.

    Ranks that each hold a part of a tensor are judged by what they hold together: of an embedding that is sharded over
    them, one may hold rows that no token ever asks for. Parts on other nodes are not known here. What has not been seen
    alive for `lived` values in a row may be dead by design, and is not judged.
    """

    def __init__(self, condition: Dead) -> None:
        super().__init__()
        self._condition = condition
        self._table = PeerTable(_same_tensor)
        self._lives: dict[int, Indices] = {}  # by rank and slot: values in a row that were alive, up to `lived`

    def reset(self) -> None:  # noqa: D102 - as in Comparison
        self._table.reset()

    def judge(self, parts: Sequence[PeerPart]) -> list[Found | None]:  # noqa: D102
        table = self._table.arrange(parts, [part.moments[[ZEROS, COUNT]] for part in parts])
        ratio = table[:, 0] / table[:, 1]
        for group in self._table.groups():
            place = np.ix_(group.members, group.columns)
            zeros, count = np.nansum(table[:, 0][place], axis=0), np.nansum(table[:, 1][place], axis=0)
            ratio[place] = np.where(np.isnan(ratio[place]), np.nan, zeros / count)
        return [self._found(part, ratio[place, self._table.columns_of(part)]) for place, part in enumerate(parts)]

    def _found(self, part: PeerPart, ratio: Array) -> Found:
        known = self._lives.get(part.rank, np.zeros(0, np.intp))
        if len(known) < len(part.watch.keys):
            known = self._lives[part.rank] = grown(known, len(part.watch.keys), 0)
        needed = self._condition.lived
        is_dead, blind = ratio >= self._condition.zero_ratio, np.isnan(ratio)
        run = known[part.indices]
        lived = run >= needed
        known[part.indices] = np.where(lived | blind, run, np.where(is_dead, 0, run + 1))
        verdict = ConditionVerdict(ratio, ratio, is_dead & lived, ~is_dead & ~blind, blind)
        return np.arange(len(ratio)), verdict, np.full(len(ratio), np.nan)


def _same_tensor(key: SeriesKey, placement: Placement | None, place: Coordinates) -> Hashable:
    """Return a label that is the same for ranks that hold parts of one tensor."""
    del key
    is_part = placement is not None and (placement.length is not None or bool(placement.partitioned_over))
    return () if is_part else (place.rank,)
