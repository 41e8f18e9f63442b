"""The law of clipping: by one factor, the same on all ranks."""

from __future__ import annotations

import numpy as np

from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict
from trainermon.alerts.laws.replicas import apart_from_most
from trainermon.alerts.laws.updates import half_units, of_step
from trainermon.core.catalogue import CLIP_RATIO_SERIES, GLOBAL_NORM_SERIES
from trainermon.core.derived import COUNT, SUM_SQ, Array
from trainermon.core.values import Kind

_ROUNDING = 1e-4
_SAME_LIMIT = 1e-3
"""How far two norms may be apart, as a share, to be taken for one limit that each rank has clipped its own part to."""


class OneFactor(LawRelation):
    """What clipping multiplies gradients by is the same on all ranks of a pipeline stage.

    Judged are ranks with the same norm, by the framework or of what they hold, and ranks whose own norms clipping has
    made equal: they have clipped each by the norm of its own part. Others may clip each parameter by itself. The size
    is the distance from what most ranks have, as a share of the largest factor: 0 to 1.
    """

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        columns = [n for n, tensor in enumerate(step.tensors) if tensor.name == CLIP_RATIO_SERIES]
        if not columns:
            return None
        ratio, told = of_step(step, CLIP_RATIO_SERIES), of_step(step, GLOBAL_NORM_SERIES)
        own = np.sqrt(np.nansum(step.rows[Kind.GRAD_REDUCED][:, SUM_SQ], axis=1))
        unit = np.fmax.reduce(half_units(step.placements[Kind.GRAD_REDUCED]), axis=None, initial=0.0)
        explained = _ROUNDING + 4.0 * unit
        size = np.full(ratio.shape, np.nan)
        stages = np.array([place.pp for place in step.places])
        for stage in np.unique(stages):
            members = np.flatnonzero((stages == stage) & np.isfinite(ratio) & (ratio > 0))
            if len(members) > 1 and _must_agree(ratio[members], own[members], told[members], explained):
                shown = ratio[members] / ratio[members].max()
                size[members] = apart_from_most(shown[:, None, None], np.full((len(members), 1), explained))[:, 0]
        found = np.full((2, *step.rows[Kind.STEP][:, COUNT].shape), np.nan)
        found[0, :, columns[0]] = size
        return LawVerdict(found[0], np.full(found[1].shape, explained), ~np.isnan(found[0]))


def _must_agree(ratio: Array, own: Array, told: Array, explained: float) -> bool:
    limit = ratio * own
    clips_own = bool((ratio < 1.0 - explained).all()) and _is_one(limit, _SAME_LIMIT)
    return _is_one(told, _ROUNDING) or _is_one(own, _ROUNDING) or clips_own


def _is_one(values: Array, tolerance: float) -> bool:
    return bool(values.max() - values.min() <= tolerance * values.max())  # False where one is not known
