"""On which steps the taps of the configuration in force are attached."""

from __future__ import annotations

import math

from trainermon.core.config import MonitorConfig
from trainermon.core.schedule import Schedule
from trainermon.hooks.names import chosen
from trainermon.monitor.session.collection import TapCollection, TapContext


class DueTaps:
    """Attaches the taps (code that reads tensors) on the steps that are collected, and detaches them on the others.

    Args:
        context: What the taps watch, and where their rows go.
        config: The configuration in force.
        first: The first step of this start.

    Attributes:
        context: What the taps watch, and where their rows go.
        collection: The taps.
        is_due: Whether the open step is collected.
        schedule: On which steps the configuration in force collects.
        takes_gradients: Whether gradients are read on steps that are collected.
    """

    def __init__(self, context: TapContext, config: MonitorConfig, *, first: int) -> None:
        self.context = context
        self.collection = TapCollection(context, config, first=first)
        self.is_due = False
        self._config = config
        self.takes_gradients = config.wg_distribution
        self.schedule = Schedule(config.start_step, config.step_interval, config.collect_times)

    def reconfigure(self, config: MonitorConfig, step: int) -> None:
        """Collect by `config` from `step` on, or from its `start_step` if that is later."""
        self.detach()
        self._config = config
        self.takes_gradients = config.wg_distribution
        self.schedule = Schedule(max(config.start_step, step), config.step_interval, config.collect_times)
        self.collection = TapCollection(self.context, config, first=step)

    def renew(self, step: int) -> None:
        """Make the taps anew, from `step` on: the optimizer is another one."""
        self.detach()
        self.collection = TapCollection(self.context, self._config, first=step)

    def prepare(self, step: int, *, is_ordered: bool) -> None:
        """Attach the taps if `step` is collected, else detach them.

        `is_ordered`: an order asks for it beside the schedule.
        """
        self.is_due = is_ordered or self.schedule.due(step)
        attached = self.context.steps.attached
        if self.is_due and not attached:
            self.collection.attach()
            self.context.steps.attach()
        elif not self.is_due and attached:
            self.detach()

    def next_due(self, step: int) -> float:
        """Return the first step from `step` on that the schedule collects; infinite if there is none."""
        found = self.schedule.next_due(step)
        return math.inf if found is None else found

    def detach(self) -> None:
        """Remove every hook of the taps."""
        self.context.steps.detach()
        self.collection.detach()

    @property
    def gradients(self) -> list[int]:
        """The ids of the series of all gradients, unreduced and reduced."""
        return self.collection.gradients.series

    def estimate_rows(self) -> int:
        """Return about how many rows a collected step will have: parameters exactly, activations by module count."""
        config, per_step = self._config, 0
        training, num_micro_steps = self.context.training, self.context.num_micro_steps
        parameters = sum(chosen(p.name, config.targets, exclude=config.exclude) for p in training.parameters)
        modules = sum(config.all_xy or chosen(m.name, config.targets, exclude=config.exclude) for m in training.modules)
        per_step += config.wg_distribution * (2 + config.monitor_mbs_grad * num_micro_steps)
        per_step += 2 * config.param_distribution + 2 * config.mv_distribution + config.ur_distribution
        directions = 2 - (config.forward_only or config.backward_only)
        sides = 2 * directions * num_micro_steps * config.xy_distribution
        return parameters * per_step + modules * sides + 2
