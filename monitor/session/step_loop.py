"""One training step after another: what is attached for it, what is taken when, and what leaves the rank.

    exit of step k-1 ── attach what step k needs ── forward, backward (taps) ── entry of step k: gradients, parameters,
    replay if a gradient is not finite ── optimizer ── exit of step k: moments, parameters; seal, write, beat

Always in place are only the optimizer's two hooks. Everything else is attached on the steps on which it is due.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainermon.monitor.catalogue import LOSS_SERIES, STEP_TIME_SERIES
from trainermon.monitor.config import MonitorConfig
from trainermon.monitor.control import ControlPage, Phase
from trainermon.monitor.journal import JournalWriter
from trainermon.monitor.schedule import Schedule
from trainermon.monitor.session.dumps import Dumps
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.gradients import GradientTaps
from trainermon.monitor.taps.guard import Guard
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.modules import ModuleTaps
from trainermon.monitor.taps.names import chosen
from trainermon.monitor.taps.optimizer import ParameterTaps, StateTaps
from trainermon.monitor.taps.training import Handle, Outcome, Training
from trainermon.monitor.values import Kind, SeriesKey

logger = logging.getLogger("trainermon")

DURATION = SeriesKey(Kind.STEP, STEP_TIME_SERIES)
# Steps that stay open for a loss that is recorded after them, until it is known where in the loop the script records.
STEPS_TO_LEARN = 2
# Backwards without an optimizer step after which nothing is collected any more.
MAX_BACKWARDS = 1000


class RecordPlace(enum.Enum):
    """Where in its loop the script calls `record`: before or after `optimizer.step()`."""

    UNKNOWN = 0
    BEFORE = 1
    AFTER = 2


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
        self._first_step = step
        self._training = training
        self._config = config
        self._schedule = Schedule(config.start_step, config.step_interval, config.collect_times)
        self._num_micro_steps = num_micro_steps
        self._page = page
        self._dumps = dumps
        self._guard = guard
        self._between_steps = between_steps
        self._handles: list[Handle] = []
        self._due = self._unchecked = self._is_ended_step_open = False
        self._place = RecordPlace.UNKNOWN
        self._exited_s = 0.0
        self._times_recorded: dict[str, int] = {}
        self._is_loss_recorded = False
        self._losses_found: set[int] = set()
        self.collector = Collector(training.device, journal)
        self._steps = MicroSteps(
            training,
            guard,
            on_forward_begin=self._forward_begins,
            on_forward_end=self._forward_ended,
            on_backward_end=self._backward_ended,
        )
        dumps.configure(config)
        self._make_taps()

    def _make_taps(self) -> None:
        training, config, collector = self._training, self._config, self.collector
        indices = [i for i, p in enumerate(training.parameters) if chosen(p.name, config.targets)]
        modules = [m for m in training.modules if config.all_xy or chosen(m.name, config.targets)]
        self._gradients = GradientTaps(
            training, indices, collector, self._steps, micro_steps=self._num_micro_steps, guard=self._guard
        )
        self._modules = ModuleTaps(modules, collector, self._steps, self._guard)
        self._parameters = ParameterTaps(training, indices, collector)
        self._states = StateTaps(training, indices, collector)

    def start(self) -> None:
        """Watch the optimizer's step and prepare the first one."""
        self._handles = self._training.watch_step(self._guard, entry=self._entry, exit=self._exit)
        self.collector.begin(self.step)
        self._prepare()

    def let_go(self) -> None:
        """Take every hook away but those around the optimizer's step, through which torch may be walking right now."""
        self._detach()
        self._dumps.abandon()

    def finish(self) -> None:
        """Take every hook away, and write everything that was taken, waiting for the device if need be."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not self._guard.tripped:
            self._check_gradients()
        self.let_go()
        self.collector.seal()
        self.collector.write_ready(wait=True)

    def reconfigure(self, config: MonitorConfig) -> None:
        """Collect by `config` from the next step on, or from its `start_step` if that is later."""
        self._detach()
        self._config = config
        first_step = max(config.start_step, self.step)
        self._schedule = Schedule(first_step, config.step_interval, config.collect_times)
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
        """File `values` under the step they belong to: the one that runs, or, after its end, the one that has ended.

        Where in its loop the script records is learnt from its first call.
        """
        has_ended_one = self.step > self._first_step
        if self._place is RecordPlace.UNKNOWN:
            is_after = has_ended_one and not self._steps.has_begun
            self._place = RecordPlace.AFTER if is_after else RecordPlace.BEFORE
        late = self._place is RecordPlace.AFTER and has_ended_one and not self._steps.has_begun
        if late and not self._is_ended_step_open:
            self.collector.begin(self.step - 1)
        elif not late:
            self._seal_ended_step()
        for name, value in values.items():
            self._file(name, value)
        if late:
            self._is_ended_step_open = True
            self._seal_ended_step()

    def _file(self, name: str, value: Tensor | float) -> None:
        """Take a number under its name; several calls in a step are its micro steps, in order."""
        if name == LOSS_SERIES and not self._is_loss_recorded:
            self._is_loss_recorded = True
            self._drop_losses_found()
        number = self._times_recorded.get(name, 0) if self._num_micro_steps > 1 else 0
        self._times_recorded[name] = number + 1
        if number == 1:
            self.collector.move(self._series_of(name, None), self._series_of(name, 0))
        series = self._series_of(name, number if number else None)
        if isinstance(value, Tensor):
            self.collector.take((series,), (value,))
        else:
            self.collector.put(series, value)

    def _series_of(self, name: str, micro_step: int | None) -> int:
        kind = Kind.LOSS if name == LOSS_SERIES else Kind.STEP
        return self.collector.table.id_of(SeriesKey(kind, name, micro_step=micro_step))

    def _find_loss(self, stage: int, output: Any) -> None:
        """Take the loss out of what the model returned, as long as the script records none."""
        if self._is_loss_recorded or stage != len(self._training.roots) - 1:
            return
        loss = self._training.loss_of(output)
        if loss is not None:
            micro_step = self._steps.micro_step(stage) if self._num_micro_steps > 1 else None
            series = self._series_of(LOSS_SERIES, micro_step)
            self._losses_found.add(series)
            self.collector.take((series,), (loss,))

    def _drop_losses_found(self) -> None:
        for series in self._losses_found:
            self.collector.move(series, None)

    def _seal_ended_step(self) -> None:
        """Write the step that has ended, if it was kept open for what the script may record after it."""
        if self._is_ended_step_open:
            self._is_ended_step_open = False
            self.collector.seal()
            self.collector.begin(self.step)

    def _prepare(self) -> None:
        """Attach what the coming step needs, and take away what it does not."""
        self._due = self._schedule.due(self.step) or self._dumps.collects(self.step)
        if self._due and not self._steps.attached:
            self._attach()
        elif not self._due and self._steps.attached:
            self._detach()
        self._dumps.prepare(self.step, gradients_due=self._due and self._config.wg_distribution)

    def _attach(self) -> None:
        config = self._config
        if config.wg_distribution:
            self._gradients.attach(per_micro_step=config.monitor_mbs_grad)
        self._steps.attach()
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

    def _forward_begins(self) -> None:
        self._seal_ended_step()
        if self._steps.has_backward and self._training.gradients_are_gone():
            self._skipped()

    def _skipped(self) -> None:
        """Drop what was taken: the script has thrown its gradients away without an optimizer step."""
        if not self._steps.in_float16:
            self._check_gradients()
        self.collector.discard()
        self._start_counting()
        self._dumps.forget()

    def _forward_ended(self, stage: int, output: Any) -> None:
        self._modules.release()
        self._find_loss(stage, output)

    def _backward_ended(self) -> None:
        self._modules.forget()
        if self._steps.backward >= MAX_BACKWARDS * self._num_micro_steps:
            self._give_up()
        elif self._config.wg_distribution:
            self._gradients.backward_ended()
            self._unchecked = not self._training.reads_at_entry

    def _give_up(self) -> None:
        logger.warning(
            "%d backward passes since the last step of the watched optimizer: it is not used any more, and nothing is "
            "collected until it steps; call set_monitor with the optimizer that is used",
            self._steps.backward,
        )
        self._unchecked = False
        self.collector.discard()
        self.let_go()

    def _entry(self) -> None:
        self._seal_ended_step()
        self._page.beat(self.step, Phase.OPTIMIZER, time.time())
        if not self._due:
            return
        if self._config.param_distribution:
            self._parameters.at_entry(self.step)
        if self._config.mg_direction:
            self._states.take_direction()
        if self._config.wg_distribution:
            self._gradients.complete()
            self._unchecked = True
            self._check_gradients()

    def _check_gradients(self) -> None:
        """Replay the step if its gradients are the first that are not finite; once per backward at most."""
        if not (self._unchecked and self._dumps.replay_armed):
            return
        self._unchecked = False
        nonfinite = self.collector.any_nonfinite(self._gradients.reduced)
        if nonfinite:
            self._page.beat(self.step, Phase.REPLAY, time.time())
        self.collector.muted = self._steps.muted = True
        try:
            self._dumps.checked(self.step, nonfinite=nonfinite)
        finally:
            self.collector.muted = self._steps.muted = False

    def _exit(self, outcome: Outcome) -> None:
        if self._due:
            self._take_after_step(outcome)
        now_s = time.perf_counter()
        if self._exited_s and not self.collector.is_empty:
            self.collector.put(self.collector.table.id_of(DURATION), now_s - self._exited_s)
        self._exited_s = now_s
        self._dumps.finish_step()
        self._start_counting()
        self.step += 1
        self._is_ended_step_open = True
        is_learning = self._place is RecordPlace.UNKNOWN and self.step - self._first_step <= STEPS_TO_LEARN
        if self._place is not RecordPlace.AFTER and not is_learning:
            self._seal_ended_step()
        self._page.beat(self.step, Phase.STEP, time.time())
        self._between_steps(self.step)
        self._prepare()

    def _take_after_step(self, _outcome: Outcome) -> None:
        config = self._config
        if config.param_distribution:
            self._parameters.at_exit(self.step)
        if config.mv_distribution:
            self._states.take_states()
        if config.ur_distribution:
            self._states.take_updates()

    def _start_counting(self) -> None:
        self._unchecked = False
        self._steps.new_step()
        self._gradients.new_step()
        self._modules.new_step()
        self._times_recorded.clear()
