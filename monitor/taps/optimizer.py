"""Parameters around the optimizer step, the optimizer's moments, and the update by formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.gradients import Parameter
from trainermon.monitor.values import Kind

MOMENTS = {Kind.EXP_AVG: "exp_avg", Kind.EXP_AVG_SQ: "exp_avg_sq"}


class ParameterTaps:
    """Takes parameters before and after the optimizer step.

    What a step left is what the next one finds, so right after a watched step a parameter is read again only if it was
    written to in between (its version counter or its memory changed; a write through `.data` is not counted).
    """

    def __init__(self, parameters: Sequence[Parameter], collector: Collector) -> None:
        self._parameters = parameters
        self._collector = collector
        self._origin = [collector.table.id_of(p.key(Kind.PARAM_ORIGIN), p.placement) for p in parameters]
        self._updated = [collector.table.id_of(p.key(Kind.PARAM_UPDATED), p.placement) for p in parameters]
        self._last_step = -1
        self._after_last: list[tuple[int, int]] = []
        self._rows_after_last: Tensor | None = None

    def at_entry(self, step: int) -> None:
        """Take the parameters as the optimizer finds them."""
        kept = self._rows_after_last
        # the counter does not see what fused optimizers write: only a step that was watched may be leant on
        if kept is not None and self._last_step == step - 1 and self._after_last == self._states():
            self._collector.repeat(self._origin, kept)
        else:
            self._collector.take(self._origin, [p.tensor for p in self._parameters])

    def at_exit(self, step: int) -> None:
        """Take the parameters as the optimizer leaves them."""
        self._last_step = step
        first = self._collector.take(self._updated, [p.tensor for p in self._parameters])
        self._after_last = self._states()
        self._rows_after_last = self._collector.copy_rows(first, len(self._parameters))

    def _states(self) -> list[tuple[int, int]]:
        return [(p.tensor._version, p.tensor.data_ptr()) for p in self._parameters]


class MomentTaps:
    """Takes Adam's moments after the step that made them, and its update.

    The update is `m_hat / (sqrt(v_hat) + eps)`, with `m_hat = exp_avg / (1 - beta1^t)` and `v_hat = exp_avg_sq /
    (1 - beta2^t)` (Kingma and Ba, "Adam", algorithm 1); with amsgrad the running maximum stands for `exp_avg_sq`.
    Learning rate and weight decay are not part of it. A parameter without state has no row.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Parameter], collector: Collector) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._collector = collector
        table = collector.table
        self._series = {kind: [table.id_of(p.key(kind), p.placement) for p in parameters] for kind in MOMENTS}
        self._update = [table.id_of(p.key(Kind.UPDATE), p.placement) for p in parameters]

    def take_moments(self) -> None:
        """Take both moments of every parameter that has them."""
        for kind, name in MOMENTS.items():
            found = [
                (series, state[name])
                for series, state in zip(self._series[kind], self._states(), strict=True)
                if name in state
            ]
            self._collector.take([series for series, _ in found], [tensor for _, tensor in found])

    def take_updates(self) -> None:
        """Take the update of every parameter that has moments; needs memory for one parameter at a time."""
        group_of = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for series, parameter, state in zip(self._update, self._parameters, self._states(), strict=True):
            if "exp_avg" in state and "exp_avg_sq" in state:
                update = _adam_update(group_of[id(parameter.tensor)], state)
                self._collector.take((series,), (update,))

    def _states(self) -> list[dict[str, Any]]:
        states = self._optimizer.state
        return [states.get(p.tensor, {}) for p in self._parameters]


def has_adam_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether every parameter group has what Adam's formula needs."""
    return all("betas" in group and "eps" in group for group in optimizer.param_groups)


@torch.no_grad()
def _adam_update(group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    beta1, beta2 = group["betas"]
    step = torch.as_tensor(state["step"], dtype=torch.float64)  # in float32, 1 - 0.999 is 6e-5 off
    second: Tensor = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    denominator = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
    update: Tensor = state["exp_avg"] / (1 - beta1**step)
    return update.div_(denominator)
