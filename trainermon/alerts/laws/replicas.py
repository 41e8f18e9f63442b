"""Laws of what several ranks hold copies of: their gradients are equal before the optimizer steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from trainermon.alerts.across_ranks.peers import PeerGroup, peer_groups, same_copy
from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict, are_the_same
from trainermon.alerts.laws.updates import half_units
from trainermon.core.derived import COUNT, INFS, NANS, SUM, SUM_SQ, Array
from trainermon.core.values import Kind, Placement

SUM_ORDER = 1e-4
"""As a share of the norm: what sums in another order, of kernels that add up as threads come, leave in float32."""

_UNITS = 8.0
"""Half units in the last place of the type, of each element."""

_FLOOR = 1e-6
"""As a share of the largest norm of a gradient of the rank: a smaller one may be nothing but rounding."""


_FEW = 32
"""So many copies are compared pair by pair."""


class EqualCopies(LawRelation):
    """Ranks that hold copies of a parameter have the same reduced gradient of it.

    Compared are norm and sum (the sum over root n), as a share of the largest norm of a copy: 0 to about 2. What most
    copies are is right; where none has a majority the law is broken on all that differ from another.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._placements: Sequence[Sequence[Placement | None]] = ()
        self._groups: Sequence[PeerGroup] = ()

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        rows = step.rows[Kind.GRAD_REDUCED]
        usable = (rows[:, NANS] == 0) & (rows[:, INFS] == 0)
        norms = np.where(usable, np.sqrt(rows[:, SUM_SQ]), np.nan)
        shown = np.stack((norms, rows[:, SUM] / np.sqrt(rows[:, COUNT])), axis=1)
        size, explained = np.full((2, *norms.shape), np.nan)
        floor = _FLOOR * np.fmax.reduce(norms, axis=None, initial=0.0)
        units = half_units(step.placements[Kind.GRAD_REDUCED]) / np.sqrt(rows[:, COUNT])
        for members, columns in self._copies(step):
            place = np.ix_(members, columns)
            largest = np.fmax.reduce(norms[place], axis=0)
            with np.errstate(all="ignore"):
                explained[place] = SUM_ORDER + _UNITS * units[place] + floor / largest
                pairs = shown[members][:, :, columns] / largest
            size[place] = apart_from_most(pairs, explained[place])
        return LawVerdict(size, explained, ~np.isnan(size) & ~np.isnan(explained))

    def _copies(self, step: LawStep) -> Sequence[PeerGroup]:
        """Return the groups of copies; they are found anew only where a series has come."""
        placements = step.placements[Kind.GRAD_REDUCED]
        if not are_the_same(placements, self._placements):
            by_column: list[dict[Hashable, list[int]]] = [{} for _ in step.tensors]
            for rank, (place, held) in enumerate(zip(step.places, placements, strict=True)):
                for column, placement in enumerate(held):
                    label = None if placement is None else same_copy(placement, place)
                    if label is not None:
                        by_column[column].setdefault(label, []).append(rank)
            self._placements, self._groups = placements, list(peer_groups(by_column))
        return self._groups


def apart_from_most(shown: Array, explained: Array) -> Array:
    """Return how far each copy is from what most are, `[copies, tensors]`, of `shown` `[copies, statistics, tensors]`.

    Where no value has a majority it is the distance from the copy that is furthest; NaN where there is no other copy.
    """
    if len(shown) > _FEW:
        return _apart_from_median(shown, explained)
    apart = np.abs(shown[:, None] - shown[None]).max(axis=2)
    votes = (apart <= explained[:, None]).sum(axis=1)
    present = (~np.isnan(apart)).any(axis=1)
    number = present.sum(axis=0)
    of_most: Array = np.take_along_axis(apart, votes.argmax(axis=0)[None, None], axis=1)[:, 0]
    is_tied = 2 * votes.max(axis=0) <= number
    found = np.where(is_tied, np.fmax.reduce(apart, axis=1), of_most)
    return np.where(present & (number > 1), found, np.nan)


def _apart_from_median(shown: Array, explained: Array) -> Array:
    """Return the same of many copies, without a look at each pair: what most are, if any, their median is, too."""
    size = np.abs(shown - np.nanmedian(shown, axis=0)).max(axis=1)
    number = (~np.isnan(size)).sum(axis=0)
    is_tied = 2 * (size <= explained).sum(axis=0) <= number
    widest = (np.fmax.reduce(shown, axis=0) - np.fmin.reduce(shown, axis=0)).max(axis=0)
    return np.where((number > 1) & ~np.isnan(size), np.where(is_tied, widest, size), np.nan)
