"""Laws of the optimizer's step: what has a gradient moves, and the model is its optimizer's copy, rounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from trainermon.alerts.conditions.condition import Mask
from trainermon.alerts.laws.groups import MergedTensors, data_groups, merged
from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict
from trainermon.core.catalogue import LEARNING_RATE_SERIES, LOSS_SCALE_SERIES
from trainermon.core.derived import COUNT, DERIVED, INFS, NANS, SUM, SUM_SQ, Array
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


class NotUndone(LawRelation):
    """What a step has made of a parameter is there when the next one begins, or is changed to something new.

    A parameter is undone where it is, bit for bit, what it was when one of the last four steps began, and not what the
    last one has left. The size is how often that was so in the last eight steps. Nothing is said where all parameters
    go back together, as a rollback does, and of what lies at its bounds throughout, as after clamping.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._known: dict[int, deque[tuple[int, Array, Array]]] = {}
        self._undone: dict[int, deque[Mask]] = {}

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        origin, updated = step.rows[Kind.PARAM_ORIGIN], step.rows[Kind.PARAM_UPDATED]
        size = np.zeros(origin[:, COUNT].shape)
        for place, where in enumerate(step.places):
            known = self._known.setdefault(where.rank, deque(maxlen=_LOOKS_BACK))
            if known and (known[-1][0] != step.step - 1 or known[-1][1].shape != origin[place].shape):
                known.clear()
                self._undone.pop(where.rank, None)
            found = self._undone.setdefault(where.rank, deque(maxlen=2 * _LOOKS_BACK))
            found.append(_are_undone(origin[place], known))
            size[place] = np.sum(found, axis=0)
            known.append((step.step, origin[place], updated[place]))
        return LawVerdict(size, np.ones(size.shape), ~np.isnan(origin[:, COUNT]))


class NoLeap(LawRelation):
    """A parameter's largest element never becomes `factor` times what it was, in a step or between two steps.

    The size is how many times: the largest magnitude when a step begins over that which the step before had left, or
    that after the step over that before it, whichever is more. What was smaller than the greatest learning rate counts
    as that large: of what begins near zero an optimizer makes that much at once. Nothing is said of what was all zeros.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._left: dict[tuple[int, int], Array] = {}

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        origin, updated = (DERIVED["absmax"](np.moveaxis(step.rows[kind], 1, 0)) for kind in _WEIGHTS)
        rate = np.nan_to_num(_rates(step, np.fmax))[:, None]
        before = np.full(origin.shape, np.nan)
        for place, where in enumerate(step.places):
            left = self._left.get((where.rank, step.attempt), before[place])
            before[place, : len(left)] = left[: origin.shape[1]]
            self._left = {key: kept for key, kept in self._left.items() if key != (where.rank, step.attempt - 1)}
            self._left[where.rank, step.attempt] = np.where(np.isnan(updated[place]), origin[place], updated[place])
        times = [
            np.where(was > 0, now / np.maximum(was, rate), np.nan) for was, now in ((before, origin), (origin, updated))
        ]
        size = np.fmax(*times)
        return LawVerdict(size, np.full(size.shape, self.settings["factor"]), ~np.isnan(size))


_WEIGHTS = (Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED)
_LOOKS_BACK = 4  # steps


def _are_undone(now: Array, known: Sequence[tuple[int, Array, Array]]) -> Mask:
    """Return which tensors are what they were before one of the `known` steps (number, before, after) again."""
    if not known:
        return np.zeros(now.shape[1], np.bool_)
    left = known[-1][2]
    is_other = (now != left).any(axis=0) & ~np.isnan(now[COUNT]) & ~np.isnan(left[COUNT])
    is_old = np.any([(now == before).all(axis=0) for _, before, _ in known], axis=0)
    bound = DERIVED["absmax"](now)
    is_at_bounds = now[SUM_SQ] >= now[COUNT] * bound * bound * (1 - 1e-6)
    undone: Mask = is_other & is_old & ~is_at_bounds
    moved = (known[-1][1] != left).any(axis=0) & ~np.isnan(left[COUNT])
    return undone if (moved & ~undone & ~is_old).any() else np.zeros_like(undone)


_MOVED = (Kind.GRAD_REDUCED, Kind.PARAM_ORIGIN)


def least_rate(step: LawStep) -> Array | None:
    """Return, by rank, the least learning rate of its groups; None if no rank shows one."""
    least = _rates(step, np.fmin)
    return None if np.isnan(least).all() else least


def _rates(step: LawStep, of_groups: np.ufunc) -> Array:
    """Return one of the learning rates of its groups by rank; NaN where it shows none."""
    columns = [n for n, tensor in enumerate(step.tensors) if tensor.name == LEARNING_RATE_SERIES]
    found: Array = of_groups.reduce(step.rows[Kind.STEP][:, SUM, columns], axis=1, initial=np.nan)
    return found


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
