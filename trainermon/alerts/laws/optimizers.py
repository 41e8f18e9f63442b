"""The law of what the optimizer holds: a parameter that can be trained is stepped by one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainermon.alerts.laws.law import LawRelation, LawStep, LawVerdict
from trainermon.alerts.laws.updates import least_rate
from trainermon.core.derived import COUNT, Array
from trainermon.core.values import Kind


class Stepped(LawRelation):
    """A parameter that the watched optimizer does not step changes all the same: another one steps it.

    The size is the number of steps in a row on which all moments of it stayed the same, bit for bit. Judged are
    parameters that no rank of the node steps, while its learning rates are not zero.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._last: dict[int, Array] = {}
        self._num_still: dict[int, Array] = {}

    def judge(self, step: LawStep) -> LawVerdict | None:  # noqa: D102 - as in LawRelation
        used, rate = step.rows[Kind.PARAM_USED], least_rate(step)
        is_held = np.isnan(step.rows[Kind.PARAM_UPDATED][:, COUNT]).all(axis=0)
        if rate is None or not (rate > 0).all() or np.isnan(used[:, COUNT]).all():
            return None
        size = np.zeros(used[:, COUNT].shape)
        for place, where in enumerate(step.places):
            last = self._last.get(where.rank, np.empty((len(used[place]), 0)))
            num_known = last.shape[1]
            size[place, :num_known] = self._num_still.get(where.rank, np.zeros(0)) + 1
            size[place, :num_known][(last != used[place][:, :num_known]).any(axis=0)] = 0
            self._last[where.rank], self._num_still[where.rank] = used[place], size[place]
        explained = np.full(size.shape, self.settings["steps"])
        return LawVerdict(size, explained, ~np.isnan(used[:, COUNT]) & is_held)
