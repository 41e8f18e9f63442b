"""What an optimizer of the Adam family makes of its two moments, element by element."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from trainermon.monitor.taps.training import OptimizerState

Formula = Callable[[Tensor, Tensor, Mapping[str, Any], Tensor], tuple[Tensor, Tensor]]


def adam(first: Tensor, second: Tensor, group: Mapping[str, Any], step: Tensor) -> tuple[Tensor, Tensor]:
    """Return Adam's update and ratio of a piece of the moments; learning rate and weight decay are not part of them.

    `update = m_hat / (sqrt(v_hat) + eps)` and `ratio = m_hat / sqrt(v_hat)` with `m_hat = first / (1 - beta1^t)`,
    `v_hat = second / (1 - beta2^t)`; a group with `bias_correction` false has neither correction. The ratio is 0 where
    both moments are, and infinite where only the second is (it underflowed).

    Source: Kingma and Ba, "Adam", algorithm 1; for amsgrad pass the running maximum as `second`.
    """
    mean, root = _corrected(first, second, group, step)
    ratio = mean / root
    update = mean.div_(root.add_(group["eps"]))
    return update, _without_nothing(ratio, update)


def radam(first: Tensor, second: Tensor, group: Mapping[str, Any], step: Tensor) -> tuple[Tensor, Tensor]:
    """Return the update of RAdam and the ratio of Adam, of a piece of the moments, as `adam` does.

    While the variance is intractable (`rho_t <= 5`) the update is `m_hat` alone, else `m_hat * r_t / ((sqrt(second) +
    eps) / sqrt(1 - beta2^t))`: as in torch, eps stands inside the correction.

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", algorithm 2; torch.optim.RAdam.
    """
    beta2 = group["betas"][1]
    correction = 1 - beta2**step
    limit = 2 / (1 - beta2) - 1
    rho = limit - 2 * step * beta2**step / correction
    squared = (rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)
    is_tractable = (rho > 5).double()
    mean, root = _corrected(first, second, group, step)
    ratio = mean / root
    adaptive = squared.clamp(min=0).sqrt() * is_tractable / root.add_(group["eps"] / correction.sqrt())
    update = mean.mul_(adaptive.add_(1 - is_tractable))
    return update, _without_nothing(ratio, update)


# The class whose `step` it is -> what that step does with the moments. FusedAdam is apex's, Transformer Engine's and
# DeepSpeed's. NAdam is not here: its update also needs the gradient.
_FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {"Adam": adam, "AdamW": adam, "FusedAdam": adam, "DeepSpeedCPUAdam": adam, "RAdam": radam}
)


class UpdateFormulas:
    """Finds the update formula (Adam, RAdam) of each parameter group of an optimizer, or of several below a wrapper.

    Good for one step: loading a checkpoint gives an optimizer new groups.
    """

    def __init__(self, optimizer: Any) -> None:
        found = [(inner, _FORMULAS.get(_author(inner))) for inner in steppers(optimizer)]
        self._of_group = {id(group): formula for inner, formula in found for group in inner.param_groups}
        kinds = {formula for _, formula in found}
        self._of_any = kinds.pop() if len(kinds) == 1 else None

    def inputs_of(self, found: OptimizerState) -> tuple[Formula, Tensor, Tensor, Tensor] | None:
        """Return the formula for a parameter and its inputs: (formula, first moment, second moment, step count).

        The count is float64 on the step's own device. None where the parameter's optimizer has no known formula or has
        not stepped it yet.
        """
        formula = self._of_group.get(id(found.group), self._of_any)
        state, group = found.state, found.group
        step = state.get("step", group.get("step"))
        if formula is None or step is None or "exp_avg" not in state:
            return None
        second = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
        # in float32, 1 - 0.999 is 6e-5 off
        count = step if isinstance(step, Tensor) else torch.tensor(step, device="cpu")
        return formula, state["exp_avg"], second, count.to(torch.float64)


def why_no_formula(optimizer: Any) -> str:
    """Return why the update is known of none of the optimizers; "" if that of at least one is."""
    inner = steppers(optimizer)
    if not inner or any(_author(one) in _FORMULAS for one in inner):
        return ""
    names = ", ".join(sorted({type(one).__name__ for one in inner}))
    return f"no formula is known for {names}, only for {', '.join(_FORMULAS)}"


def steppers(optimizer: Any) -> list[Any]:
    """Return the optimizers that hold moments, below those of a framework that wrap or chain others."""
    for several in ("chained_optimizers", "sub_optimizers"):
        if hasattr(optimizer, several):
            return [inner for one in getattr(optimizer, several) for inner in steppers(one)]
    for single in ("optimizer", "optim"):
        if hasattr(optimizer, single):
            one = getattr(optimizer, single)
            return [] if one is None else steppers(one)
    return [optimizer]


def _author(optimizer: Any) -> str:
    """Return the name of the class that wrote `step`: a subclass with a step of its own is another optimizer."""
    name: str = getattr(type(optimizer).step, "__qualname__", "")
    return name.rpartition(".")[0]


def _corrected(first: Tensor, second: Tensor, group: Mapping[str, Any], step: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(first.dtype, torch.float32)
    beta1, beta2 = group["betas"]
    if not group.get("bias_correction", True):
        return first.to(dtype, copy=True), second.to(dtype).sqrt()
    return first.to(dtype) / (1 - beta1**step), (second.to(dtype) / (1 - beta2**step)).sqrt_()


def _without_nothing(ratio: Tensor, update: Tensor) -> Tensor:
    """Return `ratio` with 0 for 0 / 0: where the first moment is 0 the update is, too."""
    return ratio.masked_fill_(update == 0, 0.0)
