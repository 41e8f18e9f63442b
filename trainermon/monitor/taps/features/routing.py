"""How a router spreads tokens over experts: the entropy of each token's choice, and the load of each expert."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.patch import Patch
from trainermon.monitor.taps.features import formulas
from trainermon.monitor.taps.features.feature import Feature, matrix_of
from trainermon.monitor.taps.training import TapHandle

CHOICE_ENTROPY = "router_token_entropy"
LOAD, LOAD_VARIATION = "expert_load", "expert_load_variation"
# How many of the most and of the least loaded experts have series of their own.
NUM_NAMED = 3
ROUTER_NAME = re.compile(r"(router|topkgate|moegate)$", re.IGNORECASE)
COUNTS_LAST = "TopKGate"  # DeepSpeed's router: the last thing it returns is the number of tokens per expert


class ChoiceEntropyFeature(Feature):
    """Records, for each token of this rank, the entropy of the softmax of a router's logits over the experts.

    The logits are what `gating` returns where the module has such a method (Megatron), else what the module returns, or
    the first item of it beside the experts' indices (transformers).
    """

    def attach(self, guard: FaultGuard) -> list[TapHandle]:
        """Hook what gives the logits: `gating` where the module has it, else its forward; return the hook."""
        module = self.module.module
        if callable(getattr(module, "gating", None)):
            return [Patch(module, "gating", after=guard.wrap(self._see))]
        return [module.register_forward_hook(guard.wrap(self._behind))]

    def _see(self, logits: Tensor) -> None:
        if self._is_due:
            self._is_taken = True
            self._look(lambda x: self._take(CHOICE_ENTROPY, formulas.choice_entropies(x)), logits)

    def _behind(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        items = output if isinstance(output, tuple | list) else (output,)
        has_indices = len(items) == 1 or (isinstance(items[-1], Tensor) and not items[-1].is_floating_point())
        if isinstance(items[0], Tensor) and items[0].is_floating_point() and items[0].dim() and has_indices:
            self._see(items[0])
        elif self._is_due:
            self._give_up("it returns no logits; name the module that returns them")


class LoadFeature(Feature):
    """Records, of a router, the share of this rank's tokens that went to each expert, over all micro steps of the step.

    The row of `expert_load` is over the experts: its maximum and minimum are the largest and smallest share, its zeros
    the idle experts. `expert_load_variation` is the coefficient of variation, 0 where all are equal. The most and the
    least loaded experts have series of their own: their share, and their number in the whole model.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counts_E: Tensor | None = None

    def attach(self, guard: FaultGuard) -> list[TapHandle]:
        """Hook the router's forward, whose result says which experts are chosen; return the hook."""
        return [self.module.module.register_forward_hook(guard.wrap(self._behind))]

    def new_step(self) -> None:
        """Begin to count tokens from zero."""
        super().new_step()
        self._counts_E = None

    def at_exit(self) -> None:
        """Record each expert's share of the step's tokens."""
        if self._counts_E is not None and not self._collector.muted:
            self._look(self._compute, self._counts_E)

    def _behind(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if not self._counts:
            return
        items = output if isinstance(output, tuple | list) else (output,)
        chosen = next((x for x in reversed(items) if isinstance(x, Tensor) and not x.is_floating_point()), None)
        if chosen is None:
            self._give_up("it returns neither indices nor a map of experts")
        else:
            self._look(self._count, chosen, module)

    def _count(self, chosen: Tensor, module: nn.Module) -> None:
        num_experts = num_experts_of(module)
        if type(module).__name__ == COUNTS_LAST:
            counts = chosen.long()
        elif chosen.shape[-1] == num_experts:  # a map: whether, or how often, a token goes to an expert
            counts = chosen.reshape(-1, num_experts).sum(0)
        else:
            counts = formulas.counts_of(chosen, num_experts)
        self._counts_E = counts if self._counts_E is None else self._counts_E + counts

    def _compute(self, counts: Tensor) -> None:
        share = counts.double() / counts.sum().clamp(min=1)
        self._take(LOAD, share)
        self._take(LOAD_VARIATION, share.std(correction=0) * len(share))
        for side, largest in (("top", True), ("bottom", False)):
            values, experts = share.topk(min(NUM_NAMED, len(share)), largest=largest)
            for place, (value, expert) in enumerate(zip(values, experts, strict=True)):
                self._take(f"{LOAD}.{side}{place}", value)
                self._take(f"{LOAD}.{side}{place}.expert", expert)


def is_router(module: nn.Module) -> bool:
    """Return whether `module` is a router of experts, by its name.

    Its number of experts must be known, and its choice be returned.
    """
    return bool(ROUTER_NAME.search(type(module).__name__)) and num_experts_of(module) > 0


def num_experts_of(module: nn.Module) -> int:
    """Return how many experts a router chooses from; 0 if that is not known."""
    for name in ("num_experts", "n_routed_experts"):
        number = getattr(module, name, None)
        if isinstance(number, int) and number > 0:
            return number
    weight = matrix_of(module)
    return 0 if weight is None else len(weight)
