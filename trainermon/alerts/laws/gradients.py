"""Laws of gradients: every trainable parameter gets one, each step begins without, and none is made without any."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainermon.alerts.conditions.condition import Mask, grown
from trainermon.alerts.laws.groups import data_groups
from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict
from trainermon.alerts.laws.updates import least_rate
from trainermon.core.catalogue import GRADIENT_KEPT
from trainermon.core.derived import COUNT, INFS, NANS, SUM_SQ, ZEROS
from trainermon.core.values import Kind

_BY_DESIGN = "expert"
"""Part of the names of parameters that a router may well leave without any token for a long time."""


class Reached(LawRelation):
    """Every trainable parameter has had a gradient that is not zero, on some rank, within its first `steps` steps.

    The size is the number of steps without one. Of a tensor that is spread over ranks of several nodes nothing is
    said, nor of experts, nor of a bias of one element that has a gradient of zero while that of its weight is not: the
    loss may be the same whatever it is, as that of a critic, the difference of two means.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._alive: Mask = np.zeros(0, np.bool_)
        self._steps = np.zeros(0)

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        rows, limit = step.rows[Kind.GRAD_REDUCED], self.settings["steps"]
        size = len(step.tensors)
        self._alive, self._steps = grown(self._alive, size, fill=False), grown(self._steps, size, 0.0)
        with np.errstate(all="ignore"):
            self._alive |= ((rows[:, SUM_SQ] > 0) | (rows[:, NANS] + rows[:, INFS] > 0)).any(axis=0)
        if self._alive.all():
            return None
        self._steps += 1
        seen = np.array([self._is_seen_whole(step, column) for column in range(size)])
        seen &= ~self._are_offsets(step)
        without = np.where(self._alive, 0.0, self._steps)
        judged = np.broadcast_to(seen & (self._steps > limit), (len(rows), size))
        return LawVerdict(np.broadcast_to(without, judged.shape), np.full(judged.shape, limit), judged)

    def _are_offsets(self, step: LawStep) -> Mask:
        """Return which tensors are a bias of one element, zero in its gradient, whose weight has one."""
        found = np.zeros(len(step.tensors), np.bool_)
        counts = step.rows[Kind.GRAD_REDUCED][:, COUNT]
        alive = {(each.name, each.stage) for n, each in enumerate(step.tensors) if self._alive[n]}
        for column in np.flatnonzero(~self._alive & (counts == 1).any(axis=0)).tolist():
            tensor = step.tensors[column]
            module, _, kind = tensor.name.rpartition("bias")
            found[column] = not kind and (f"{module}weight", tensor.stage) in alive
        return found

    def _is_seen_whole(self, step: LawStep, column: int) -> bool:
        held = [of_rank[column] for of_rank in step.placements[Kind.GRAD_REDUCED]]
        known = [placement for placement in held if placement is not None]
        if not known or _BY_DESIGN in step.tensors[column].name or 0 in known[0].shape:
            return False
        is_spread = any(placement.partitioned_over or placement.length is not None for placement in known)
        return not is_spread or bool(data_groups(step.places))


class BeginEmpty(LawRelation):
    """What a step's first backward finds in a gradient is nothing, or zeros.

    The size is the share of elements that are not zero, 0 to 1. There is a row only where nothing is seen to have
    cleared the gradient since the step before.
    """

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        rows = step.rows[Kind.STATE]
        is_kept = np.array([tensor.slot == GRADIENT_KEPT for tensor in step.tensors], np.bool_)
        size = 1.0 - rows[:, ZEROS] / rows[:, COUNT]
        return LawVerdict(size, np.zeros(size.shape), is_kept & ~np.isnan(size))


class SomeGradient(LawRelation):
    """A step of the optimizer has a gradient: some rank has one that is not zero, while learning rates are not.

    The size is the share of the gradients that are missing or zero, 0 to 1; the law is broken at 1.
    """

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        rows, rate = step.rows[Kind.GRAD_REDUCED], least_rate(step)
        if rate is None or not (rate > 0).any() or not data_groups(step.places):
            return None
        with np.errstate(all="ignore"):
            alive = (rows[:, SUM_SQ] > 0) | (rows[:, NANS] + rows[:, INFS] > 0)
        has_series = np.array([[p is not None for p in held] for held in step.placements[Kind.GRAD_REDUCED]])
        share = 1.0 - alive.sum() / max(int(has_series.sum()), 1)
        size = np.full(rows[:, COUNT].shape, share)
        return LawVerdict(size, np.full(size.shape, 1.0 - 1e-9), has_series)


class EveryRankGradient(LawRelation):
    """Each data-parallel rank has a gradient of its own that is not zero, where another one has.

    The size is the share of the rank's gradients before their reduction that are zero, 0 to 1; it is broken at 1.
    """

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        rows = step.rows[Kind.GRAD_UNREDUCED]
        shown = ~np.isnan(rows[:, COUNT])
        with np.errstate(all="ignore"):
            alive = (rows[:, SUM_SQ] > 0) | (rows[:, NANS] + rows[:, INFS] > 0)
        share = 1.0 - alive.sum(axis=1) / np.maximum(shown.sum(axis=1), 1)
        judged = np.zeros(shown.shape, np.bool_)
        for members in data_groups(step.places):
            judged[members] = shown[members] & bool(alive[members].any())
        size = np.broadcast_to(share[:, None], shown.shape)
        return LawVerdict(size, np.full(shown.shape, 1.0 - 1e-9), judged)
