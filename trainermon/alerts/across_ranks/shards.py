"""Whether a tensor has died, by what all ranks of the node hold of it: a shard by itself is no parameter."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from trainermon.alerts.across_ranks.comparing import ComparedSeries, ComparisonMemory, are_calm
from trainermon.alerts.across_ranks.peers import PeerPart, PeerTable
from trainermon.alerts.conditions.condition import ConditionVerdict, Mask
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
        self._place_of: dict[int, int] = {}  # by rank, its row of `_lives`
        self._lives = np.zeros((0, 0), np.intp)  # by column of the table: values in a row that were alive, to `lived`

    def reset(self) -> None:  # noqa: D102 - as in Comparison
        self._table.reset()

    def judge(self, parts: Sequence[PeerPart]) -> list[ComparedSeries | None]:  # noqa: D102
        table = self._table.arrange(parts, [part.moments[[ZEROS, COUNT]] for part in parts])
        ratio = table[:, 0] / table[:, 1]
        for group in self._table.groups():
            place = np.ix_(group.members, group.columns)
            zeros, count = np.nansum(table[:, 0][place], axis=0), np.nansum(table[:, 1][place], axis=0)
            ratio[place] = np.where(np.isnan(ratio[place]), np.nan, zeros / count)
        is_dead, blind, lived = ratio >= self._condition.zero_ratio, np.isnan(ratio), self._lived(parts, ratio)
        bad = is_dead & lived
        if not np.count_nonzero(bad) and are_calm(parts):
            return [None] * len(parts)
        verdict = ConditionVerdict(ratio, ratio, bad, ~is_dead & ~blind, blind)
        return [self._found(part, place, verdict) for place, part in enumerate(parts)]

    def _lived(self, parts: Sequence[PeerPart], ratio: Array) -> Mask:
        """Return which tensors `[ranks, columns]` have lived long enough before this step, and count it for them."""
        places = np.array([self._place_of.setdefault(part.rank, len(self._place_of)) for part in parts])
        self._make_room(len(self._place_of), ratio.shape[1])
        place = places[:, None], np.arange(ratio.shape[1])
        run = self._lives[place]
        lived: Mask = run >= self._condition.lived
        is_dead = ratio >= self._condition.zero_ratio
        self._lives[place] = np.where(lived | np.isnan(ratio), run, np.where(is_dead, 0, run + 1))
        return lived

    def _make_room(self, num_ranks: int, num_columns: int) -> None:
        known = self._lives
        if num_ranks > known.shape[0] or num_columns > known.shape[1]:
            self._lives = np.zeros((num_ranks, num_columns), np.intp)
            self._lives[: known.shape[0], : known.shape[1]] = known

    def _found(self, part: PeerPart, place: int, verdict: ConditionVerdict) -> ComparedSeries:
        columns = self._table.columns_of(part)
        assert verdict.blind is not None
        own = ConditionVerdict(
            verdict.value[place, columns],
            verdict.score[place, columns],
            verdict.bad[place, columns],
            verdict.clear[place, columns],
            verdict.blind[place, columns],
        )
        return ComparedSeries(part.indices, part.moments, own, np.full(len(columns), np.nan))


def _same_tensor(key: SeriesKey, placement: Placement | None, place: Coordinates) -> Hashable:
    """Return a label that is the same for ranks that hold parts of one tensor."""
    del key
    is_part = placement is not None and (placement.length is not None or bool(placement.partitioned_over))
    return () if is_part else (place.rank,)
