"""The law of activation checkpointing: what is computed again in the backward is what the forward computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainermon.alerts.conditions.condition import Mask
from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict
from trainermon.alerts.laws.updates import half_units
from trainermon.core.derived import COUNT, INFS, NANS, SUM, SUM_SQ
from trainermon.core.values import Kind, Placement

_FLOOR = 2.0**-10  # of an element: kernels that add in any order, over a block
_FEW = 8.0  # half units in the last place of an element


class RepeatsForward(LawRelation):
    """What a module returns when it is computed again is what it returned in the forward, up to rounding.

    Kernels that add in another order change elements by some units in their last place, at random: the sum of `n` by
    such a share of `rms * sqrt(n)`, the sum of squares by twice that share of `rms**2 * sqrt(n)`. The size is
    the larger of both over that. Another mask of a dropout changes both by nearly the whole; another type is told
    however close the numbers are.
    """

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        first, again = (np.moveaxis(step.rows[kind], 1, 0) for kind in (Kind.ACTV, Kind.ACTV_RECOMPUTED))
        forward, repeated = (step.placements[kind] for kind in (Kind.ACTV, Kind.ACTV_RECOMPUTED))
        share = np.maximum(_FEW * half_units(forward), _FLOOR)
        with np.errstate(all="ignore"):
            scale = share * np.sqrt(first[COUNT])
            square = first[SUM_SQ] / first[COUNT]
            size = np.fmax(
                np.abs(again[SUM] - first[SUM]) / (scale * np.sqrt(square)),
                np.abs(again[SUM_SQ] - first[SUM_SQ]) / (2.0 * scale * square),
            )
        equal = (again[SUM] == first[SUM]) & (again[SUM_SQ] == first[SUM_SQ])
        size = np.where(equal, 0.0, size)
        size[_are_other_types(forward, repeated) | (again[COUNT] != first[COUNT])] = np.inf
        finite = (first[NANS] + first[INFS] + again[NANS] + again[INFS]) == 0
        judged = finite & ~np.isnan(first[COUNT]) & ~np.isnan(again[COUNT]) & ~np.isnan(share) & _called_once(step)
        return LawVerdict(size, np.ones(size.shape), judged & ~np.isnan(size))


def _are_other_types(
    forward: Sequence[Sequence[Placement | None]], repeated: Sequence[Sequence[Placement | None]]
) -> Mask:
    return np.array(
        [
            [a is not None and b is not None and a.dtype != b.dtype for a, b in zip(*held, strict=True)]
            for held in zip(forward, repeated, strict=True)
        ]
    )


def _called_once(step: LawStep) -> Mask:
    """Return of which tensors there is one call: the order in which several are computed again is not known."""
    several = {(tensor.name, tensor.stage, tensor.slot) for tensor in step.tensors if tensor.call}
    return np.array([(tensor.name, tensor.stage, tensor.slot) not in several for tensor in step.tensors])
