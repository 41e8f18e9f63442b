"""Everything that a due step collects, by configuration: which taps there are, and what each does when."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from trainermon.core.config import MonitorConfig
from trainermon.core.config.schema import GradientSignsConfig
from trainermon.core.outbox import Parcel
from trainermon.core.schedule import DueSteps
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.names import chosen
from trainermon.monitor.gradient_probe.run_signs import RunSigns
from trainermon.monitor.session.structure import StructureRecorder
from trainermon.monitor.taps.buffers import BufferTaps
from trainermon.monitor.taps.checksums import ChecksumTaps
from trainermon.monitor.taps.collectives import CollectiveTaps
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.compiled_regions import CompiledRegions
from trainermon.monitor.taps.features import FeatureTaps
from trainermon.monitor.taps.gradients import GradientTaps
from trainermon.monitor.taps.histograms import ChosenHistograms
from trainermon.monitor.taps.loop.frozen_moves import FrozenMoves
from trainermon.monitor.taps.loop.kept_gradients import KeptGradients
from trainermon.monitor.taps.loop.late_clipping import LateClipping
from trainermon.monitor.taps.loop.left_out import LeftOut
from trainermon.monitor.taps.loop.loop_taps import LoopTap, LoopTaps
from trainermon.monitor.taps.loop.lost_gradients import LostGradients
from trainermon.monitor.taps.loop.module_settings import ModuleSettings
from trainermon.monitor.taps.loop.repeated_steps import RepeatedSteps
from trainermon.monitor.taps.loop.reused_batch import ReusedBatch
from trainermon.monitor.taps.loop.shared_memory import SharedMemory
from trainermon.monitor.taps.loop.torch_warnings import TorchWarnings
from trainermon.monitor.taps.loop.uneven_steps import UnevenSteps
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.modules import ModuleTaps
from trainermon.monitor.taps.optimizer import ParameterTaps, StateTaps
from trainermon.monitor.taps.process_groups import purposes_of
from trainermon.monitor.taps.step_values import StepValues
from trainermon.monitor.taps.training import StepOutcome, Training

logger = logging.getLogger("trainermon")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TapContext:
    """What all taps (code that reads tensors where they arise) need, whatever the configuration.

    Attributes:
        training: What is watched.
        collector: Takes the rows of statistics.
        steps: Knows which forward and backward runs.
        guard: Contains errors in what torch calls.
        num_micro_steps: Backwards per step.
        groups: Process groups by purpose.
        structure: Returns the folder for the structure of the model, if that is asked for.
        signs: Returns what writes the signs of gradients.
    """

    training: Training
    collector: Collector
    steps: MicroSteps
    guard: FaultGuard
    num_micro_steps: int
    groups: Mapping[str, Any]
    structure: Callable[[], Parcel]
    signs: Callable[[GradientSignsConfig], RunSigns]


class TapCollection:
    """Makes, attaches and runs the taps (code that reads tensors where they arise) that one configuration asks for.

    Args:
        context: What they need.
        config: The configuration.
        first: The step from which it holds.
    """

    def __init__(self, context: TapContext, config: MonitorConfig, *, first: int) -> None:
        training, collector, steps, guard = context.training, context.collector, context.steps, context.guard
        indices = [
            i for i, p in enumerate(training.parameters) if chosen(p.name, config.targets, p.stage, config.exclude)
        ]
        modules = [
            m for m in training.modules if config.all_xy or chosen(m.name, config.targets, m.stage, config.exclude)
        ]
        self._config, self._context = config, context
        self.gradients = GradientTaps(training, indices, collector, steps, guard=guard)
        self._modules = ModuleTaps(modules, collector, steps, guard)
        self._regions = CompiledRegions(modules, collector, steps, guard)
        self._parameters = ParameterTaps(training, indices, collector)
        self._states = StateTaps(training, indices, collector)
        self._recomputed = _rarely(config)
        self._buffers = BufferTaps(training, collector, _rarely(config))
        self._checksums = ChecksumTaps(training, indices, collector, _rarely(config))
        self._values = StepValues(training, collector)
        self._loop = self._loop_taps()
        self._signs = None if config.gradient_signs.level is None else context.signs(config.gradient_signs)
        chosen_histograms = ChosenHistograms(
            config.histograms,
            collector.table,
            first=max(config.start_step, first),
            step_interval=config.step_interval,
        )
        collector.histograms = chosen_histograms if config.histograms.kinds else None
        self._features = FeatureTaps(training.modules, collector, steps, guard, config)
        self._structure = StructureRecorder(
            modules, steps, guard, context.structure(), structure=config.print_struct, stacks=config.stack_info
        )
        self._collectives = None
        if dist.is_available() and dist.is_initialized():
            purposes = purposes_of(context.groups)
            self._collectives = CollectiveTaps(collector, guard, purposes=purposes, config=config.cc_distribution)

    def attach(self) -> None:
        """Attach every hook that is needed on a step that is collected."""
        config = self._config
        self._loop.attach()
        if config.wg_distribution:
            self.gradients.attach(per_micro_step=config.monitor_mbs_grad)
        if config.xy_distribution:
            self._modules.attach(
                forward=not config.backward_only,
                backward=not config.forward_only,
                micro_steps=self._context.num_micro_steps,
            )
            if not config.backward_only:
                self._regions.attach(micro_steps=self._context.num_micro_steps)
        self._features.attach()
        self._structure.attach()
        if self._collectives is not None:
            self._collectives.attach()

    def detach(self) -> None:
        """Remove all hooks of the taps."""
        self._loop.detach()
        self.gradients.detach()
        self._modules.detach()
        self._regions.detach()
        self._features.detach()
        self._structure.detach()
        if self._collectives is not None:
            self._collectives.detach()

    def new_step(self) -> None:
        """Release what belongs to the step that has ended."""
        self.gradients.new_step()
        if self._config.xy_distribution:
            self._modules.new_step()
        self._values.new_step()
        if self._features.are_any:
            self._features.new_step()
        if self._collectives is not None:
            self._collectives.new_step()

    def forward_begins(self, step: int) -> None:
        """Read the buffers that the first forward of a step is about to use; called when any forward of it begins."""
        self._loop.forward_begins()
        self._buffers.forward_begins(step)
        self._modules.reads_recomputed = self._recomputed.include(step)

    def forward_ended(self) -> None:
        """Release the activations that were read last."""
        if self._config.xy_distribution:
            self._modules.forget_seen()

    def backward_ended(self) -> None:
        """Read the gradients if they are final, and release what the backward used."""
        if self._config.xy_distribution:
            self._modules.reset()
        training = self._context.training
        is_final = not training.reads_at_entry and self._context.steps.is_complete
        gradients = training.reduced_gradients() if is_final else None
        if self._config.wg_distribution and not training.reads_at_entry:
            self.gradients.backward_ended(gradients)
        if gradients is not None:
            self._values.at_backward_end(gradients, self.gradients.just_read)

    def before_optimizer(self, step: int, *, is_scaled: bool) -> None:
        """Read what the optimizer is about to use: gradients, parameters, states.

        `is_scaled`: the script scales its loss.
        """
        steps = self._context.steps
        num_missing = steps.expected - steps.backward if steps.has_backward else 0
        self._values.at_entry(is_scaled=is_scaled, num_missing=num_missing)
        self._checksums.at_entry(step)
        if self._config.param_distribution:
            self._parameters.at_entry()
        if self._config.ur_distribution:
            self._states.at_entry()
        if self._config.mg_direction:
            self._states.take_direction()
        if self._config.wg_distribution:
            self.gradients.complete(is_clipped=self._values.is_clipped)
        self._loop.at_entry(step)
        if self._signs is not None:
            self._signs.at_entry(step)

    def after_optimizer(self, outcome: StepOutcome) -> None:
        """Read the optimizer's results, and the numbers of the step as a whole."""
        if self._config.param_distribution:
            self._parameters.at_exit()
        if self._config.mv_distribution:
            self._states.take_states()
        if self._config.ur_distribution:
            self._states.take_updates()
        if self._config.xy_distribution:
            self._regions.step_ended(self._modules.num_seen, self._modules.called_outside)
        self._values.at_exit(outcome)
        self._loop.step_ended()
        if self._features.are_any:
            self._features.at_exit()
        if not self._structure.is_done:
            self._structure.step_ended()
        if self._collectives is not None:
            self._collectives.step_ended()

    def _loop_taps(self) -> LoopTaps:
        training, collector, steps = self._context.training, self._context.collector, self._context.steps
        taps: list[LoopTap] = [
            LateClipping(training, collector, steps, self._values),
            ModuleSettings(training, collector),
            TorchWarnings(collector, steps),
            UnevenSteps(training, collector),
        ]
        if self._config.xy_distribution:
            taps.append(ReusedBatch(collector, steps))
        if self._config.wg_distribution:
            taps += [
                KeptGradients(training, collector, steps),
                LostGradients(training, collector, steps, self.gradients),
                LeftOut(training, collector),
                SharedMemory(training, collector),
                FrozenMoves(training, collector, _rarely(self._config)),
                RepeatedSteps(training, collector, steps),
            ]
        return LoopTaps(taps, collector)


def _rarely(config: MonitorConfig) -> DueSteps:
    return DueSteps(config.checksum_interval, config.step_interval)
