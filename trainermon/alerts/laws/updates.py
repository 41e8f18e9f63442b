"""Laws of the optimizer's step: what has a gradient moves, and the model is its optimizer's copy, rounded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainermon.alerts.laws.groups import MergedTensors, data_groups, merged
from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict
from trainermon.core.catalogue import LEARNING_RATE_SERIES, LOSS_SCALE_SERIES
from trainermon.core.derived import COUNT, DERIVED, INFS, NANS, SUM, Array
from trainermon.core.values import Kind, Placement

HALF_UNIT = {"float64": 2.0**-54, "float32": 2.0**-25, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""By type, the least change of a number that is not rounded away, as a share of it."""

_LEAST = 2.0  # times what would be rounded away


class Moves(LawRelation):
    """A parameter whose gradient is not zero is another one after the step, if its group's learning rate is not zero.

    Compared are all moments, bit for bit. The size is that of the step to be expected of the largest element, as a
    share of it: the learning rate times the gradient, or with Adam's moments the learning rate alone; a step that
    rounding to the parameter's type loses breaks nothing. Where only some groups rest nothing is said, as no row
    tells whose parameters they hold.
    """

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        before, after = step.rows[Kind.PARAM_ORIGIN], step.rows[Kind.PARAM_UPDATED]
        rate = least_rate(step)
        if rate is None:
            return None
        gradient, largest = (DERIVED["absmax"](np.moveaxis(step.rows[kind], 1, 0)) for kind in _MOVED)
        adam = ~np.isnan(step.rows[Kind.EXP_AVG_SQ][:, COUNT])
        scale = of_step(step, LOSS_SCALE_SERIES)
        expected = rate[:, None] * np.where(adam, 1.0, gradient / np.where(np.isnan(scale), 1.0, scale)[:, None])
        with np.errstate(all="ignore"):
            size = np.where(largest > 0, expected / largest, np.inf)
        still = (before == after).all(axis=1)
        judged = (gradient > 0) & (rate > 0)[:, None] & ~np.isnan(after[:, COUNT])
        unit = half_units(step.placements[Kind.PARAM_ORIGIN])
        return LawVerdict(np.where(still, size, 0.0), _LEAST * unit, judged & ~np.isnan(unit))


class Copied(LawRelation):
    """The model's own parameters are those that the optimizer holds, rounded to the model's type.

    Compared are sum, least and greatest element, over all parts that the data-parallel ranks hold. The size is the
    largest of the three distances, as a share of the largest magnitude (of the sum: of root n times the norm).
    """

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        used = step.rows[Kind.PARAM_USED]
        size, explained = np.full((2, *used[:, COUNT].shape), np.nan)
        for members in data_groups(step.places):
            held, copy = merged(step, Kind.PARAM_ORIGIN, members), merged(step, Kind.PARAM_USED, members)
            for rank in members:
                own = used[rank]
                is_whole = own[COUNT] == held.num_elements
                found = merged(step, Kind.PARAM_USED, members[members == rank])
                apart = np.where(is_whole, _apart(found, held), _apart(copy, held))
                usable = ~np.isnan(own[COUNT]) & (is_whole | (copy.num_elements == held.num_elements))
                usable &= (own[NANS] == 0) & (own[INFS] == 0)
                size[rank, usable] = apart[usable]
            units = half_units([step.placements[Kind.PARAM_USED][rank] for rank in members])
            explained[members] = 2 * _LEAST * units + 1e-6
        return LawVerdict(size, explained, ~np.isnan(size) & ~np.isnan(explained))


_MOVED = (Kind.GRAD_REDUCED, Kind.PARAM_ORIGIN)


def least_rate(step: LawStep) -> Array | None:
    """Return, by rank, the least learning rate of its groups; None if no rank shows one."""
    columns = [n for n, tensor in enumerate(step.tensors) if tensor.name == LEARNING_RATE_SERIES]
    rates = step.rows[Kind.STEP][:, :, columns]
    if not columns or np.isnan(rates[:, COUNT]).all():
        return None
    least: Array = np.fmin.reduce(rates[:, SUM], axis=1)
    return least


def of_step(step: LawStep, name: str) -> Array:
    """Return, by rank, the step's number of this name; NaN where there is none."""
    columns = [n for n, tensor in enumerate(step.tensors) if tensor.name == name]
    if not columns:
        return np.full(len(step.places), np.nan)
    value: Array = step.rows[Kind.STEP][:, SUM, columns[0]]
    return value


def half_units(placements: Sequence[Sequence[Placement | None]]) -> Array:
    """Return `HALF_UNIT` by rank and tensor; NaN where the rank has none of it, or its type is another."""
    rows = [[np.nan if p is None else HALF_UNIT.get(p.dtype, np.nan) for p in of_rank] for of_rank in placements]
    return np.array(rows)


def _apart(found: MergedTensors, held: MergedTensors) -> Array:
    largest = np.maximum(np.abs(held.least), np.abs(held.greatest))
    reach = np.sqrt(held.sum_sq * held.num_elements)
    with np.errstate(all="ignore"):
        extremes = np.maximum(np.abs(found.least - held.least), np.abs(found.greatest - held.greatest)) / largest
        sums = np.abs(found.sum - held.sum) / reach
    apart: Array = np.where(reach > 0, np.fmax(extremes, sums), np.where(found.sum_sq > 0, np.inf, 0.0))
    return apart
