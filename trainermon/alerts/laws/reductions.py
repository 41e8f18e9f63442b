"""Laws of gradients that are reduced over ranks: linear, by a usual factor, and of different data on each."""

from __future__ import annotations

from collections import Counter

import numpy as np

from trainermon.alerts.conditions.condition import Indices, Mask
from trainermon.alerts.laws.groups import DATA_AXES, MergedTensors, data_groups, is_plain, merged
from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict
from trainermon.core.derived import COUNT, INFS, NANS, SUM, SUM_SQ, Array
from trainermon.core.values import Kind, Placement

_TERM = 2.0**-7
"""What a reduction in 16 bits loses of a term: half a unit of bfloat16's 8 bits, twice for a result rounded once more.

The errors of many terms are independent of each other, so of a sum of n of them it is the n-th root less."""

_FITS = 1e-2
_ORDER = 1e-5
"""Of float32 sums, whose order differs from rank to rank."""


class ReductionLaw(LawRelation):
    """Judges the groups of ranks whose gradients are reduced, one after the other. Base class."""

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        reduced = step.rows[Kind.GRAD_REDUCED]
        size, explained = np.full((2, *reduced[:, COUNT].shape), np.nan)
        for members in data_groups(step.places):
            if len(members) > 1 or any(place.tp_size > 1 for place in step.places):
                given, whole = _summed(step, members), merged(step, Kind.GRAD_REDUCED, members)
                usable = _usable(step, members, given, whole)
                if usable.any():
                    apart, limit = self.judge_group(step, members, given, whole, usable)
                    for rank in members:
                        here = usable & ~np.isnan(reduced[rank, COUNT])
                        size[rank, here], explained[rank, here] = apart[here], limit[here]
        return LawVerdict(size, explained, ~np.isnan(size))

    def judge_group(
        self, step: LawStep, members: Indices, given: MergedTensors, whole: MergedTensors, usable: Mask
    ) -> tuple[Array, Array]:
        """Return by tensor how far the reduction of what was `given` is off, and what is explained of that.

        `whole` is what came of it. Only tensors that are `usable` count.
        """
        raise NotImplementedError


class Linear(ReductionLaw):
    """A reduced gradient is the scaled sum of what the ranks had: compared by the sum of its elements.

    The scale is one for all parameters: 1 over the number of ranks, 1, or the one that most parameters show. The
    size is the distance of the sums over the largest that the sum could be (root of n times the norm), 0 to about 1.
    Where copies lie on other tensor or pipeline ranks, these may have been summed too.
    """

    def judge_group(  # noqa: D102 - as in ReductionLaw
        self, step: LawStep, members: Indices, given: MergedTensors, whole: MergedTensors, usable: Mask
    ) -> tuple[Array, Array]:
        reach = np.sqrt(given.sum_sq * given.num_elements)
        sums = np.stack((given.sum, self._of_all_copies(step, members, given)))
        scale = _scale(whole.sum[usable], sums[:, usable], reach[usable], len(members))
        apart: Array = np.abs(whole.sum - scale * sums).min(axis=0) / (scale * reach)
        return apart, _ORDER + _TERM * np.log2(2 * len(members)) / np.sqrt(given.num_elements)

    def _of_all_copies(self, step: LawStep, members: Indices, given: MergedTensors) -> Array:
        """Return the sums over the tensor and pipeline ranks too that hold copies, where there are any."""
        total: Array = given.sum.copy()
        first = members[0]
        own = step.places[first]
        for others in data_groups(step.places):
            other = step.places[others[0]]
            if others[0] == first:
                continue
            apart = {axis for axis in ("tp", "pp") if getattr(own, axis) != getattr(other, axis)}
            theirs = _summed(step, others).sum
            held = step.placements[Kind.GRAD_UNREDUCED][first]
            copies = np.array([p is not None and apart <= {*p.replicated_over} - DATA_AXES for p in held])
            total = np.where(copies & ~np.isnan(theirs), total + theirs, total).astype(np.float64)
        return total


class UsualScale(ReductionLaw):
    """What a reduction multiplies the sum by is 1 over the number of ranks, or 1: gradients are averaged, or summed.

    Others are no error by themselves, as 1 over the number of tokens. What is told is a factor that comes of counting
    ranks twice: 1 over the square of their number, that number, twice the average, and the average multiplied or
    divided by the size of another axis. The size is the factor over the average, or its inverse: 1 and more.
    """

    def judge_group(  # noqa: D102 - as in ReductionLaw
        self, step: LawStep, members: Indices, given: MergedTensors, whole: MergedTensors, usable: Mask
    ) -> tuple[Array, Array]:
        reach = np.sqrt(given.sum_sq * given.num_elements)[usable]
        number, place = len(members), step.places[members[0]]
        scale = _scale(whole.sum[usable], given.sum[None, usable], reach, number)
        apart = np.abs(whole.sum - scale * given.sum)[usable] / (scale * reach)
        fits = apart <= _FITS * (np.abs(given.sum[usable]) / reach).max()
        found = number * scale
        axes = {place.tp_size, place.pp_size, place.cp_size} - {1}
        twice = {1.0 / number, float(number**2), 2.0, *map(float, axes), *(1.0 / size for size in axes)}
        unusual = twice - {1.0, float(number)}
        is_twice = fits.mean() > 0.5 and any(abs(found / other - 1.0) < _FITS for other in unusual)
        factor = np.full(len(step.tensors), max(found, 1.0 / found) if is_twice else 1.0)
        return factor, np.full(len(step.tensors), 1.0 + _FITS)


class OwnData(LawRelation):
    """Two data-parallel ranks never have the same gradients: they would have computed the same on the same data.

    Of all tensors that a framework reduces all moments are compared, bit for bit: others may have been reduced by the
    script when they were read. The size is the number of other ranks that have the very same; nothing is said of ranks
    that have zeros only.
    """

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        rows = step.rows[Kind.GRAD_UNREDUCED]
        placed = [[_is_reduced(placement) for placement in held] for held in step.placements[Kind.GRAD_UNREDUCED]]
        shown = ~np.isnan(rows[:, COUNT]) & np.array(placed)
        others = np.full(len(step.places), np.nan)
        for members in data_groups(step.places):
            if len(members) < 2:
                continue
            held = {rank: rows[rank][:, shown[rank]] for rank in members.tolist()}
            alive = {rank: own.tobytes() for rank, own in held.items() if (own[SUM_SQ] > 0).any()}
            holders = Counter(alive.values())
            for rank, digest in alive.items():
                others[rank] = holders[digest] - 1
        size = np.broadcast_to(others[:, None], shown.shape)
        return LawVerdict(size, np.zeros(shown.shape), shown & ~np.isnan(size))


def _summed(step: LawStep, members: Indices) -> MergedTensors:
    """Return, of what the ranks had before the reduction, the sums over them; NaN where one had none."""
    rows = step.rows[Kind.GRAD_UNREDUCED][members]
    return MergedTensors(rows[0, COUNT], rows[:, SUM].sum(0), rows[:, SUM_SQ].sum(0), rows[0, COUNT], rows[0, COUNT])


def _usable(step: LawStep, members: Indices, given: MergedTensors, whole: MergedTensors) -> Mask:
    unreduced, first = step.rows[Kind.GRAD_UNREDUCED][members], step.placements[Kind.GRAD_UNREDUCED][members[0]]
    plain = np.array([is_plain(placement) and _is_reduced(placement) for placement in first])
    lost = (step.rows[Kind.GRAD_REDUCED][members][:, [NANS, INFS]] > 0).any(axis=(0, 1))
    lost |= (unreduced[:, [NANS, INFS]] > 0).any(axis=(0, 1))
    usable: Mask = plain & (given.num_elements == whole.num_elements) & (given.sum_sq > 0) & ~lost
    return usable


def _is_reduced(placement: Placement | None) -> bool:
    """Return whether a framework says how ranks hang together: without one each may train on its own."""
    return placement is not None and bool(placement.replicated_over or placement.partitioned_over)


def _scale(reduced: Array, sums: Array, reach: Array, num_ranks: int) -> float:
    """Return the scale that explains most parameters: 1 over the ranks, none, or what their ratio usually is.

    `sums` `[2, tensors]` are those over the group, and over copies on other ranks too.
    """
    with np.errstate(all="ignore"):
        ratios, weights = reduced / sums[0], np.abs(sums[0]) / reach
    candidates = [1.0 / num_ranks, 1.0, *_weighted_median(ratios[ratios > 1e-12], weights[ratios > 1e-12])]
    apart = [np.abs(reduced - scale * sums).min(axis=0) / (scale * reach) for scale in candidates]
    return candidates[int(np.argmax([np.count_nonzero(each <= _FITS * weights.max()) for each in apart]))]


def _weighted_median(values: Array, weights: Array) -> list[float]:
    """Return the value below and above which half of the weight lies; nothing of no values."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return [float(values[order[np.searchsorted(total, total[-1] / 2)]])] if total.size else []
