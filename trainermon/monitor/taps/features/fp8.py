"""Whether FP8 still holds the numbers: scales, amaxes and underflows of modules of Transformer Engine.

They are recognised by their `fp8_meta`, a dictionary with the state of delayed scaling under `scaling_fwd` and
`scaling_bwd`: `scale` `[n]` and `amax_history` `[steps, n]` of n tensors; the first of those of a forward is its input.
Recipes that keep no such state (current and block scaling) have no rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.taps.features import formulas
from trainermon.monitor.taps.features.feature import Feature
from trainermon.monitor.taps.pieces import take_in_pieces
from trainermon.monitor.taps.training import TapHandle

UNDERFLOW = "fp8_underflow"
PASSES = {"scaling_fwd": "forward", "scaling_bwd": "backward"}


class Fp8Feature(Feature):
    """Records a module's FP8 scales and largest magnitudes (amax), and the share of its input that underflows.

    `fp8_scale.<pass>` and `fp8_amax.<pass>` have one element per tensor; amax is the largest of the history.
    `fp8_underflow` has one per element of the module's input in its first forward of the step: 1 if it is not zero and
    the scale of that moment makes it zero in FP8, else 0.
    """

    def attach(self, guard: FaultGuard) -> list[TapHandle]:
        """Hook the module before its forward; return the hook."""
        return [self.module.module.register_forward_pre_hook(guard.wrap(self._before))]

    def at_exit(self) -> None:
        """Record scales and largest magnitudes (amax) after the step."""
        for key, name in PASSES.items():
            state = self._meta().get(key)
            scale, history = getattr(state, "scale", None), getattr(state, "amax_history", None)
            if isinstance(scale, Tensor) and isinstance(history, Tensor) and not self._is_off:
                self._look(self._take_state, scale, history, name)

    def _take_state(self, scale: Tensor, history: Tensor, name: str) -> None:
        self._take(f"fp8_scale.{name}", scale)
        self._take(f"fp8_amax.{name}", history.amax(0))

    def _before(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        scale = getattr(self._meta().get("scaling_fwd"), "scale", None)
        is_seen = isinstance(scale, Tensor) and args and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if self._is_due and is_seen:
            self._is_taken = True
            self._look(self._take_underflow, args[0], scale)

    def _take_underflow(self, values: Tensor, scale: Tensor) -> None:
        recipe_format = getattr(self._meta().get("recipe"), "fp8_format", "")
        is_e5m2 = getattr(recipe_format, "name", "") == "E5M2"  # E4M3 and HYBRID keep forward tensors in E4M3
        is_lost = formulas.underflows("e5m2" if is_e5m2 else "e4m3")
        take_in_pieces(
            self._collector, (self._number(UNDERFLOW),), (values,), lambda piece: (is_lost(piece, scale[0]),)
        )

    def _meta(self) -> dict[str, Any]:
        found = self.module.module.fp8_meta
        return found if isinstance(found, dict) else {}


def has_fp8(module: nn.Module) -> bool:
    """Return whether this module keeps FP8 state in the manner of Transformer Engine."""
    return isinstance(getattr(module, "fp8_meta", None), dict)
