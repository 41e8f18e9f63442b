"""What a replay under DeepSpeed must put back. Stages 0 to 2 keep to themselves; stage 3 gathers parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from trainermon.hooks.replayable import Replayable
from trainermon.monitor.taps.training import HeldParameter

COUNTER = "micro_offset"


class DeepSpeedReplayable(Replayable):
    """How a step of a DeepSpeed engine is replayed: a pipeline stage by itself, experts by all ranks together.

    Args:
        engine: The engine.
        axes: The axes (`dp`, `ep` …) over which the forward communicates.
    """

    def __init__(self, engine: Any, axes: Sequence[str]) -> None:
        super().__init__()
        self._engine = engine
        self.joint = bool(axes)

    def handed(self, stage: int) -> list[tuple[nn.Module, str]]:
        """Return (module, attribute) of the counter of forwards by which a pipeline seeds its layers."""
        del stage
        module = self._engine.module
        return [(module, COUNTER)] if COUNTER in vars(module) else []

    def expects_overflow(self) -> bool:
        """Return whether non-finite gradients are normal now: a dynamic loss scale is above its least value."""
        if not self._engine.fp16_enabled():
            return False
        held = self._engine.optimizer
        if hasattr(held, "loss_scale_config"):
            scale = held.loss_scale_config
            return bool(scale.dynamic_loss_scale) and scale.cur_scale > scale.min_loss_scale
        scaler = held.loss_scaler
        return bool(scaler.dynamic) and scaler.cur_scale > scaler.min_scale


class Stage3Replayable(DeepSpeedReplayable):
    """How a step under ZeRO stage 3 is replayed by all ranks: gradients are kept from the hooks that reduce them.

    DeepSpeed's hooks know the true parameters, so these are used. Refused where modules are leaves, as transformers
    makes its experts.

    Args:
        engine: The engine.
        axes: The axes over which the forward communicates.
        parameters: Those that are watched.
    """

    shadowed = False
    accumulates = False

    def __init__(self, engine: Any, axes: Sequence[str], parameters: Sequence[HeldParameter]) -> None:
        super().__init__(engine, axes)
        self._parameters = parameters
        leaf = next(
            (name for name, module in engine.module.named_modules() if getattr(module, "_z3_leaf", False)), None
        )
        if leaf is not None:
            # a backward that leaves no gradients fails in their hooks, and what it has left ends the next bad step
            self.refusal = (
                f"ZeRO stage 3 treats {leaf} as one leaf (set_z3_leaf_modules), whose hooks want every gradient"
            )

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Return a context for a replay, which sets nothing aside.

        At its end, also after an error, parameters that the replay left gathered are released, as by the step. Nothing
        is sent.
        """
        try:
            yield
        finally:
            held = self._engine.optimizer
            held.parameter_offload.partition_all_parameters()

    def own_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of this rank's part of each parameter that is gathered for a forward."""
        for parameter in self._parameters:
            shard = getattr(parameter.tensor, "ds_tensor", None)
            if shard is not None and shard.numel():
                yield parameter.name, shard
