"""One step of an engine by DeepSpeed's own account: skipped or not, its norm, its loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.patch import Patch
from trainermon.monitor.frameworks.deepspeed.holders import OptimizerHolder, OverflowVerdict
from trainermon.monitor.taps.training import StepOutcome, TapHandle

# Methods of the ZeRO optimizers that return the norm of one group; -1 stands for one that is not finite.
GROUP_NORMS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")


class StepWatch:
    """Watches `engine._take_model_step`, through which every engine steps, at accumulation boundaries only.

    It is entered before anything is clipped, and left when the optimizer's step returns: before the gradients are
    cleared and before the learning rate changes.
    """

    def __init__(self, engine: Any, holder: OptimizerHolder) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        self._holder = holder
        self._is_open = self._is_decided = False
        self._scale: float | None = None
        self._group_norms: list[Any] = []
        self._entry: Callable[[], None] = lambda: None
        self._exit: Callable[[StepOutcome], None] = lambda _outcome: None
        self._decide: Callable[[bool], None] = lambda _nonfinite: None

    def watch(
        self, guard: FaultGuard, entry: Callable[[], None], exit: Callable[[StepOutcome], None]
    ) -> list[TapHandle]:
        """Call `entry()` before and `exit(outcome)` after each optimizer step of the engine; return the patches.

        Only steps at an accumulation boundary count. `guard` contains errors of both.
        """
        self._entry, self._exit = entry, exit
        before, after = guard.wrap(self._enter), guard.wrap(self._leave)
        handles: list[TapHandle] = [Patch(self._engine, "_take_model_step", before=before, after=after)]
        if isinstance(self._optimizer, torch.optim.Optimizer):
            handles.append(self._optimizer.register_step_post_hook(after))
        else:
            handles.append(Patch(self._optimizer, "step", after=after))
        keep = guard.wrap(self._keep_norm)
        handles += [Patch(self._optimizer, name, after=keep) for name in GROUP_NORMS if hasattr(self._optimizer, name)]
        return handles

    def watch_decision(self, guard: FaultGuard, decide: Callable[[bool], None]) -> list[TapHandle]:
        """Call `decide(nonfinite)` once in each optimizer step, when DeepSpeed knows overflow and norm.

        Return the patches. Waits for the device once, where DeepSpeed itself does not (bfloat16 without clipping).
        """
        self._decide = decide
        return self._holder.watch_verdict(guard, self._tell)

    def _enter(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        self._is_open, self._is_decided = True, False
        self._group_norms.clear()
        self._scale = self._loss_scale()
        self._entry()

    def _keep_norm(self, norm: Any) -> None:
        if self._is_open:
            self._group_norms.append(norm)

    def _tell(self, verdict: OverflowVerdict) -> None:
        if self._is_open and not self._is_decided:
            self._is_decided = True
            by_norm = verdict is OverflowVerdict.BY_NORM and not all(
                0 <= float(norm) < math.inf for norm in self._group_norms
            )
            self._decide(by_norm or verdict is OverflowVerdict.OVERFLOW)

    def _leave(self, *_: Any) -> None:
        """End the step; also one in which a scaler of the user's has left the optimizer's step out."""
        if not self._is_open:
            return
        self._is_open = False
        skipped = bool(getattr(self._optimizer, "overflow", False))
        norm = math.inf if skipped else self._norm()
        clip = float(self._engine.gradient_clipping() or 0.0)
        self._exit(StepOutcome(skipped=skipped, grad_norm=norm, max_norm=clip or None, loss_scale=self._scale))

    def _loss_scale(self) -> float | None:
        """Return what the step divides by; in float16, and at stage 0 of some versions in bfloat16 too."""
        scale = float(getattr(self._optimizer, "loss_scale", None) or 1.0)
        return scale if self._engine.fp16_enabled() or scale != 1.0 else None

    def _norm(self) -> float | Tensor | None:
        """Return the norm that DeepSpeed computed, unscaled; NaN where it has put -1 for one that is not finite.

        None where it computes none, where it is not that of the gradients (Muon), and in a step after which the loss
        scale grew: most versions and stages then divide by the new scale what carries the old one.
        """
        norm = getattr(self._optimizer, "_global_grad_norm", None)
        if norm is None or self._loss_scale() != self._scale or not self._holder.norm_is_of_gradients:
            return None
        if self._holder.norm_carries_scale:
            norm = norm / (self._scale or 1.0)
        for group_norm in [*self._group_norms, norm]:
            norm = _masked(norm, group_norm)
        found: float | Tensor = norm
        return found


def _masked(norm: Any, sign: Any) -> Any:
    if isinstance(sign, Tensor):
        return torch.where(sign.to(getattr(norm, "device", sign.device)) < 0, math.nan, norm)
    return math.nan if sign < 0 else norm
