"""One training step after another: what is attached for it, what is taken when, and what leaves the rank.

    exit of step k-1 ── attach what step k needs ── forward, backward (taps) ── entry of step k: gradients, parameters,
    replay if a gradient is not finite ── optimizer ── exit of step k: moments, parameters; seal, write, beat

Always in place are only the optimizer's two hooks. Everything else is attached on the steps on which it is due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainermon.monitor.catalogue import LOSS_SERIES, STEP_TIME_SERIES
from trainermon.monitor.config import MonitorConfig
from trainermon.monitor.control import ControlPage, Phase
from trainermon.monitor.frameworks import Training
from trainermon.monitor.journal import JournalWriter
from trainermon.monitor.schedule import Schedule
from trainermon.monitor.session.dumps import Dumps
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.gradients import GradientTaps
from trainermon.monitor.taps.guard import Guard
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.modules import ModuleTaps
from trainermon.monitor.taps.names import chosen
from trainermon.monitor.taps.optimizer import MomentTaps, ParameterTaps
from trainermon.monitor.values import Kind, SeriesKey

DURATION = SeriesKey(Kind.STEP, STEP_TIME_SERIES)


class StepLoop:
    """Watches the steps of one optimizer. Made and driven by `TrainerMon`; every hook is contained by `guard`."""

    def __init__(  # noqa: PLR0913  # the parts that it wires together
        self,
        training: Training,
        config: MonitorConfig,
        *,
        step: int,
        num_micro_steps: int,
        journal: JournalWriter,
        page: ControlPage,
        dumps: Dumps,
        guard: Guard,
        between_steps: Callable[[int], None],
    ) -> None:
        self.step = step
        self._training = training
        self._config = config
        self._schedule = Schedule(config.start_step, config.step_interval, config.collect_times)
        self._num_micro_steps = num_micro_steps
        self._page = page
        self._dumps = dumps
        self._guard = guard
        self._between_steps = between_steps
        self._handles: list[Any] = []
        self._due = False
        self._recorded_after_step = False
        self._exited_s = 0.0
        self.collector = Collector(training.parameters[0].tensor.device, journal)
        self._steps = MicroSteps(
            training.roots, guard, on_forward_end=self._forward_ended, on_backward_end=self._backward_ended
        )
        dumps.configure(config)
        self._make_taps()

    def _make_taps(self) -> None:
        training, config, collector = self._training, self._config, self.collector
        parameters = [p for p in training.parameters if chosen(p.name, config.targets)]
        modules = [m for m in training.modules if config.all_xy or chosen(m.name, config.targets)]
        self._gradients = GradientTaps(
            parameters,
            collector,
            is_reduced=training.is_reduced,
            micro_steps=self._num_micro_steps,
            guard=self._guard,
        )
        self._modules = ModuleTaps(modules, collector, self._steps, self._guard)
        self._parameters = ParameterTaps(parameters, collector)
        self._moments = MomentTaps(training.optimizer, parameters, collector)

    def start(self) -> None:
        """Put the optimizer's hooks in place and prepare the first step."""
        optimizer = self._training.optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._guard.wrap(self._entry)),
            optimizer.register_step_post_hook(self._guard.wrap(self._exit)),
        ]
        self._prepare()

    def stop(self) -> None:
        """Take every hook away again; what was taken stays until `finish`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._detach()
        self._dumps.abandon()

    def finish(self) -> None:
        """Write everything that was taken, waiting for the device if need be."""
        self.collector.seal()
        self.collector.write_ready(wait=True)

    def reconfigure(self, config: MonitorConfig) -> None:
        """Collect by `config` from the next step on."""
        self._detach()
        self._config = config
        self._schedule = Schedule(config.start_step, config.step_interval, config.collect_times)
        self._dumps.configure(config)
        self._make_taps()

    def estimate_rows(self) -> int:
        """Return about how many rows a collected step will have: parameters exactly, activations by module count."""
        config, per_step = self._config, 0
        parameters = sum(chosen(p.name, config.targets) for p in self._training.parameters)
        modules = sum(config.all_xy or chosen(m.name, config.targets) for m in self._training.modules)
        per_step += config.wg_distribution * (2 + config.monitor_mbs_grad * self._num_micro_steps)
        per_step += 2 * config.param_distribution + 2 * config.mv_distribution + config.ur_distribution
        directions = 2 - (config.forward_only or config.backward_only)
        sides = 2 * directions * self._num_micro_steps * config.xy_distribution
        return parameters * per_step + modules * sides + 2

    def record(self, values: Mapping[str, Tensor | float]) -> None:
        """File `values` under the step they belong to.

        That is the step that is running, or the one that has just ended if no forward has begun since. On a step on
        which no forward is watched, the place in the loop that an earlier call was seen in decides.
        """
        if self._steps.attached:
            self._recorded_after_step = self._steps.forward < 0 and self._exited_s > 0
        late = self._recorded_after_step and self._exited_s > 0 and self.collector.is_empty
        if late:
            self.collector.begin(self.step - 1)
        for name, value in values.items():
            series = self.collector.table.id_of(SeriesKey(Kind.LOSS if name == LOSS_SERIES else Kind.STEP, name))
            if isinstance(value, Tensor):
                self.collector.take((series,), (value,))
            else:
                self.collector.put(series, float(value))
        if late:
            self.collector.seal()
            self.collector.begin(self.step)

    def _prepare(self) -> None:
        """Attach what the coming step needs, and take away what it does not."""
        self._due = self._schedule.due(self.step) or self._dumps.collects(self.step)
        if self._due and not self._steps.attached:
            self._attach()
        elif not self._due and self._steps.attached:
            self._detach()
        self.collector.begin(self.step)
        self._dumps.prepare(self.step, gradients_due=self._due and self._config.wg_distribution)

    def _attach(self) -> None:
        config = self._config
        self._steps.attach()
        if config.wg_distribution:
            self._gradients.attach(self._steps, per_micro_step=config.monitor_mbs_grad)
        if config.xy_distribution:
            self._modules.attach(
                forward=not config.backward_only,
                backward=not config.forward_only,
                micro_steps=self._num_micro_steps,
            )

    def _detach(self) -> None:
        self._steps.detach()
        self._gradients.detach()
        self._modules.detach()

    def _forward_ended(self) -> None:
        self._modules.release()

    def _backward_ended(self) -> None:
        self._modules.forget()
        if self._config.wg_distribution:
            self._gradients.backward_ended(self._steps.backward)

    def _entry(self, _optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._page.beat(self.step, Phase.OPTIMIZER, time.time())
        if not self._due:
            return
        backward_to_come = len(args) > 1 or kwargs.get("closure") is not None
        if self._config.wg_distribution and not backward_to_come:
            self._gradients.at_optimizer_entry(self._steps.backward)
            if self._dumps.replay_armed:
                self._check_gradients()
        if self._config.param_distribution:
            self._parameters.at_entry()

    def _check_gradients(self) -> None:
        nonfinite = self.collector.any_nonfinite(self._gradients.reduced)
        if nonfinite:
            self._page.beat(self.step, Phase.REPLAY, time.time())
        self.collector.muted = self._steps.muted = True
        try:
            self._dumps.checked(self.step, nonfinite=nonfinite)
        finally:
            self.collector.muted = self._steps.muted = False

    def _exit(self, *_: Any) -> None:
        if self._due:
            config = self._config
            if config.param_distribution:
                self._parameters.at_exit()
            if config.mv_distribution:
                self._moments.take_moments()
            if config.ur_distribution:
                self._moments.take_updates()
        now_s = time.perf_counter()
        if self._exited_s and not self.collector.is_empty:
            self.collector.put(self.collector.table.id_of(DURATION), now_s - self._exited_s)
        self._exited_s = now_s
        self.collector.seal()
        self._dumps.finish_step()
        self._steps.new_step()
        self._gradients.new_step()
        self._modules.forget()
        self.step += 1
        self._page.beat(self.step, Phase.STEP, time.time())
        self._between_steps(self.step)
        self._prepare()
