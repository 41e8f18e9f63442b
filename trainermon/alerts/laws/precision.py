"""The law of precision: rounding to the type of the parameters leaves something of a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainermon.alerts.conditions.condition import Mask
from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict
from trainermon.alerts.laws.updates import HALF_UNIT, least_rate
from trainermon.core.derived import COUNT, DERIVED, MAX, MIN, SUM, Array
from trainermon.core.values import Kind, Placement

_SHORT_TYPES = frozenset({"bfloat16", "float16"})
_ADAMS_SETTING, _MOMENTUM = "beta2", "momentum"


class NotRoundedAway(LawRelation):
    """Where the optimizer steps parameters of 16 bits, its step is larger than half a unit of their last place.

    The size is half a unit of a typical element over a typical step: the learning rate with Adam, which knows a second
    moment, else the rate times the gradient. It breaks the law where the least and the greatest element have stood
    still for `steps` steps, too, as they do not where rounding is random or what is lost is added up, and where more
    than a share of the elements of a rank lie in such tensors: those of a norm, which are 1, always do.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._settings_of: dict[int, dict[str, float]] = {}
        self._ends: dict[int, Array] = {}
        self._num_still: dict[int, Array] = {}

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        rows, rate = step.rows[Kind.PARAM_ORIGIN], least_rate(step)
        half = np.array([[_half_unit(placement) for placement in held] for held in step.placements[Kind.PARAM_ORIGIN]])
        self._note_settings(step)
        if rate is None or np.isnan(half).all():
            return None
        gradient, typical = (DERIVED["rms"](np.moveaxis(step.rows[k], 1, 0)) for k in (Kind.GRAD_REDUCED, _HELD))
        step_size = np.full(half.shape, np.nan)
        for place, where in enumerate(step.places):
            known = self._settings_of.get(where.rank, {})
            if _ADAMS_SETTING in known:
                step_size[place] = rate[place]
            elif _MOMENTUM in known:
                step_size[place] = rate[place] * gradient[place] / max(1.0 - known[_MOMENTUM], 1e-3)
        with np.errstate(all="ignore"):
            size = np.where(self._stands_still(step), half * typical / step_size, 0.0)
        judged = (step_size > 0) & ~np.isnan(size) & (gradient > 0)
        elements = np.where(judged, rows[:, COUNT], 0.0)
        with np.errstate(all="ignore"):
            share = (elements * (size > 1.0)).sum(axis=1) / elements.sum(axis=1)
        is_much = share >= self.settings["share"]
        return LawVerdict(np.where(is_much[:, None], size, np.fmin(size, 1.0)), np.ones(size.shape), judged)

    def _stands_still(self, step: LawStep) -> Mask:
        """Return where neither end of the range of the elements has moved for long enough."""
        rows = step.rows[Kind.PARAM_ORIGIN]
        still = np.zeros(rows[:, COUNT].shape)
        for place, where in enumerate(step.places):
            ends = rows[place][[MIN, MAX]]
            last = self._ends.get(where.rank, ends[:, :0])
            known = last.shape[1]
            still[place, :known] = self._num_still.get(where.rank, still[place, :0]) + 1
            still[place, :known][(last != ends[:, :known]).any(axis=0)] = 0
            self._ends[where.rank], self._num_still[where.rank] = ends, still[place]
        return still >= self.settings["steps"]

    def _note_settings(self, step: LawStep) -> None:
        """Remember whether the optimizer is Adam's kin, of which there is a row on the first step only."""
        columns = [n for n, tensor in enumerate(step.tensors) if tensor.name in (_ADAMS_SETTING, _MOMENTUM)]
        for place, where in enumerate(step.places):
            values: Array = step.rows[Kind.STEP][place, SUM]
            found = {step.tensors[n].name: float(values[n]) for n in columns if not np.isnan(values[n])}
            if found:
                self._settings_of.setdefault(where.rank, {}).update(found)


_HELD = Kind.PARAM_ORIGIN


def _half_unit(placement: Placement | None) -> float:
    return HALF_UNIT[placement.dtype] if placement is not None and placement.dtype in _SHORT_TYPES else np.nan
