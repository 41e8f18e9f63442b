"""`DeepSpeedTraining`: a DeepSpeed engine as the taps see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.replayable import Replayable
from trainermon.monitor.frameworks.deepspeed import names
from trainermon.monitor.frameworks.deepspeed.holders import OptimizerHolder
from trainermon.monitor.frameworks.deepspeed.replay import DeepSpeedReplayable, Stage3Replayable
from trainermon.monitor.frameworks.deepspeed.step import StepWatch
from trainermon.monitor.taps.training import (
    HeldParameter,
    HookMaker,
    OptimizerState,
    StepOutcome,
    TapHandle,
    Training,
)


class DeepSpeedTraining(Training):
    """How the training of a DeepSpeed engine (ZeRO stage 0 to 3, or a pipeline) is watched.

    A reduced gradient is the mean over ranks and micro batches, times the loss scale of the step: the root of the
    squares summed over all pieces, divided by `StepOutcome.loss_scale`, is `engine.get_global_grad_norm()`. An
    unreduced one is this rank's, times the loss scale and 1/`gradient_accumulation_steps` (`Placement.scale`), by which
    `engine.backward` multiplies the loss. Where DeepSpeed's own norm differs, see `step`.
    """

    framework = "deepspeed"
    reads_at_entry = True
    unreduced_once = True

    def take_over(self, engine: Any, holder: OptimizerHolder) -> None:
        """Set the engine to watch and the holder of its optimizer; called once, before anything else."""
        self._engine = engine
        self._holder = holder
        self._steps = StepWatch(engine, holder)
        self._index = {id(parameter.tensor): index for index, parameter in enumerate(self.parameters)}
        self.reduces = engine.dp_world_size > 1
        self.is_pipelined = engine.pipeline_parallelism
        if engine.zero_optimization_partition_weights():
            self.communicates = ("dp",)
            self.holds_replicas = False
        if engine.has_moe_layers:
            self.communicates += ("ep",)

    def process_groups(self) -> Mapping[str, Any]:
        """Return the engine's own process groups by purpose (`dp`, `ep`, `pp` …)."""
        return names.groups_of(self._engine)

    def watch_step(
        self,
        guard: FaultGuard,
        *,
        entry: Callable[[], None],
        exit: Callable[[StepOutcome], None],
        hooks: HookMaker | None = None,
    ) -> list[TapHandle]:
        """Call `entry` and `exit(outcome)` around the engine's step at accumulation boundaries; return the patches.

        `engine.step()` between the boundaries does not count.
        """
        if hooks is not None:
            entry, exit = hooks.entry(guard, entry), hooks.exit(guard, exit)
        return self._steps.watch(guard, entry, exit)

    def watch_decision(self, guard: FaultGuard, decide: Callable[[bool], None]) -> list[TapHandle]:
        """Call `decide(nonfinite)` once in each step, when DeepSpeed knows overflow or norm; return the patches.

        May wait for the device, see `StepWatch.watch_decision`.
        """
        return self._steps.watch_decision(guard, decide)

    def replayable(self) -> Replayable:
        """Return how a step is replayed: by a rank alone, or by all ranks together at stage 3 and with experts."""
        if self._engine.zero_optimization_partition_weights():
            return Stage3Replayable(self._engine, self.communicates, self.parameters)
        return DeepSpeedReplayable(self._engine, self.communicates)

    def watch_unreduced(self, guard: FaultGuard, see: Callable[[int, Tensor], None]) -> list[TapHandle]:
        """Call `see(index, gradient)` with each parameter's gradient before it is reduced, at stages 0 and 1.

        Return the patches. Stages 2 and 3 reduce in every micro step: then there is none.
        """

        def look(parameter: nn.Parameter, gradient: Tensor) -> None:
            index = self._index.get(id(parameter))
            if index is not None:
                see(index, gradient)

        return self._holder.watch_unreduced(guard, look)

    def reduced_gradients(self) -> list[Tensor | None]:
        """Return by parameter this rank's part of its averaged gradient, before clipping; None where there is none.

        Meant for the entry of the step.
        """
        found = self._holder.gradients()
        return [found.get(id(parameter.tensor)) for parameter in self.parameters]

    def values(self) -> list[Tensor | None]:
        """Return, by parameter, this rank's part of the fp32 main copy; None where it steps none of it."""
        return [self._holder.value(parameter.tensor) for parameter in self.parameters]

    def used_weights(self) -> list[Tensor | None]:
        """Return by parameter what the forward used; at stage 3 this rank's part of it, before it is gathered."""
        if self.holds_replicas:
            return super().used_weights()
        return [_shard_of(parameter) for parameter in self.parameters]

    def states(self) -> list[OptimizerState | None]:
        """Return by parameter this rank's part of the inner optimizer's state; None where there is none."""
        return [self._holder.state(parameter.tensor) for parameter in self.parameters]


def _shard_of(parameter: HeldParameter) -> Tensor | None:
    """Return the rank's part of a parameter that is gathered for each forward, without padding; None without any."""
    shard, length = getattr(parameter.tensor, "ds_tensor", None), parameter.owned.length or 0
    return None if shard is None or not length else shard.detach().view(-1)[:length]
