"""One step of MindSpore after another: what is attached for it, what is taken when, and what leaves the rank.

    exit of step k-1 ── attach what step k needs ── forward, backward (activations) ── entry of step k: gradients, as
    the optimizer is called with them, parameters ── optimizer ── exit of step k: states, parameters; seal, write

The hooks of the optimizer are always in place, and those that see a forward begin. Of a compiled step Python sees
nothing: a `WatchedOptimizer` keeps its rows, and they are read when the script next calls the monitor.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import nn

from trainermon.core.config import MonitorConfig
from trainermon.core.config.schema import GradientSignsConfig
from trainermon.core.control import ControlPage, Phase
from trainermon.core.journal import JournalWriter
from trainermon.core.outbox import Parcel
from trainermon.core.schedule import Schedule
from trainermon.hooks.containment import PlainFaultGuard
from trainermon.hooks.mindspore import hooks
from trainermon.hooks.names import chosen
from trainermon.monitor.gradient_probe.records import SignsReaderFactory
from trainermon.monitor.gradient_probe.run_signs import RunSigns
from trainermon.monitor.mindspore.dumps import CellDumps
from trainermon.monitor.mindspore.gradient_readings import CellGradientReader
from trainermon.monitor.mindspore.graph import RowsOfGraph, WatchedOptimizer
from trainermon.monitor.mindspore.micro_steps import CellSteps
from trainermon.monitor.mindspore.rows import HostSlabRing
from trainermon.monitor.mindspore.structure import CellStructure
from trainermon.monitor.mindspore.taps import ActivationTaps, OptimizerTaps
from trainermon.monitor.mindspore.training import CellTraining
from trainermon.monitor.session.ordered_dumps import OrderedDumps
from trainermon.monitor.session.phases import CurrentStep, QuietSteps, StepPhases
from trainermon.monitor.session.recorded import StepRecorder
from trainermon.monitor.session.script_values import ScriptValues
from trainermon.monitor.taps.row_collector import RowCollector
from trainermon.statistics.mindspore.moments import MomentsOfTensors

logger = logging.getLogger("trainermon")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CellParts:
    """What the monitor of a rank has made before its step loop.

    Attributes:
        training: What is watched.
        guard: Contains errors in what MindSpore calls.
        journal: The file for rows and events.
        page: The control page: phases go there and commands arrive there.
        dumps: Makes the dumps that commands order.
        moments: Computes rows.
        is_alone: Whether no other rank takes part in the training.
        structure: Makes the folder for the model's structure.
        signs: Makes what writes signs of gradients, of what makes their reader, and by a configuration.
    """

    training: CellTraining
    guard: PlainFaultGuard
    journal: JournalWriter
    page: ControlPage
    dumps: CellDumps
    moments: MomentsOfTensors
    is_alone: bool
    structure: Callable[[], Parcel]
    signs: Callable[[SignsReaderFactory, GradientSignsConfig], RunSigns]


class CellLoop:
    """Runs the monitor from step to step on one rank. No error leaves a hook.

    Args:
        parts: What was made before.
        config: The configuration.
        step: Number of the first step.
        num_micro_steps: Backwards per step.
        between_steps: Called with the number of each step before it begins; while nothing is due, only when there are
            news.
        has_news: Tells whether it would find anything.

    Attributes:
        collector: Rows of the open step.
        steps: Forwards and backwards of the open step.
        phases: What the agent is told the rank is busy with.
        values: What the script records.
        orders: What commands ask for.
        watched: What compiled steps call in the optimizer's place; None: they are not compiled.
        is_due: Whether the open step is collected.
    """

    def __init__(  # noqa: PLR0913  # what it watches, and whom it tells
        self,
        parts: CellParts,
        config: MonitorConfig,
        *,
        step: int,
        num_micro_steps: int,
        between_steps: Callable[[int], None],
        has_news: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._config = config
        self._num_micro_steps = num_micro_steps
        self._between_steps, self._has_news = between_steps, has_news
        self._step = CurrentStep(step)
        self.orders = OrderedDumps(parts.dumps, parts.journal, parts.page)
        self._handles: list[hooks.HookHandle] = []
        self._graph: RowsOfGraph | None = None
        self.watched: WatchedOptimizer | None = None
        self._is_attached = self._is_silence_told = self._is_sink_told = False
        self._signs_reader: CellGradientReader | None = None
        self.is_due = False
        self.phases = StepPhases(parts.page, self._step)
        self._quiet = QuietSteps(self._step, self.phases, has_news)
        self.collector = RowCollector(HostSlabRing(parts.moments), parts.journal)
        self.steps = CellSteps(
            parts.training,
            parts.guard,
            num_expected=num_micro_steps,
            on_forward=self._forward_begins,
            on_output=self._forward_ended,
        )
        recorder = StepRecorder(parts.training, self.collector, self.steps, num_micro_steps=num_micro_steps)
        self.values = ScriptValues(recorder, self.collector, self.steps, self._step, self._quiet)
        self._become(config, step)

    @property
    def step(self) -> int:
        """Number of the step that is open."""
        return self._step.number

    def start(self) -> None:
        """Hook the optimizer and the model, and prepare the first step."""
        self.phases.beat(Phase.SETUP)
        self.steps.attach()
        self._hook_optimizer()
        self.collector.begin(self.step)
        self._prepare()

    def estimate_rows(self) -> int:
        """Return about how many rows a collected step will have."""
        config, training = self._config, self._parts.training
        parameters = sum(chosen(p.name, config.targets, p.stage) for p in training.parameters)
        per_step = config.wg_distribution * (2 + config.monitor_mbs_grad * self._num_micro_steps)
        per_step += 2 * config.param_distribution + 2 * config.mv_distribution + config.mg_direction
        per_step += 2 * config.ur_distribution
        cells = len(self._cells()) * config.xy_distribution
        directions = 2 - (config.forward_only or config.backward_only)
        return parameters * per_step + cells * 2 * directions * self._num_micro_steps + 2

    def expect_micro_steps(self, number: int) -> None:
        """Set how many backwards the running step has."""
        self.steps.expected = number

    def reconfigure(self, config: MonitorConfig) -> None:
        """Collect by `config` from the next step on, or from its `start_step` if that is later."""
        self._quiet.end()
        self._detach_taps()
        self._become(config, max(config.start_step, self.step))

    def watch(self, optimizer: nn.Cell) -> WatchedOptimizer:
        """Return what takes the optimizer's place in steps that are compiled; its rows replace those of the hooks."""
        self._quiet.end()
        self.watched = WatchedOptimizer(optimizer, with_parameters=self._config.param_distribution)
        self._graph = RowsOfGraph(self.watched)
        self._unhook_optimizer()
        self._detach_taps()
        self._parts.dumps.are_compiled = True
        return self.watched

    def poll(self) -> None:
        """End the steps that were compiled, if any has run since the last call. Waits for the step."""
        if self._graph is None or self._parts.guard.tripped:
            return
        num_steps = self._graph.new_steps()
        if not num_steps:
            return
        if num_steps > 1:
            self._step.number += num_steps - 1
            self.collector.begin(self.step)
            if not self._is_sink_told:
                self._is_sink_told = True
                self.collector.tell(
                    f"{num_steps} steps ended with step {self.step} before the monitor was called again (sink mode, or "
                    "no record after each step): only the last of them has rows; this is told once"
                )
        gradients, parameters = self._graph.read()
        if self._schedule.due(self.step) or self.orders.collects(self.step):
            self._optimizer_taps.put_rows(gradients, parameters)
            self._optimizer_taps.after_step()
        self._finish_step()

    def detach_taps(self) -> None:
        """Remove every hook except those around the optimizer's step, which MindSpore may be running right now."""
        self._detach_taps()
        self.steps.detach()
        self.orders.finish_step()

    def detach(self) -> None:
        """Remove all hooks of the monitor."""
        self._unhook_optimizer()
        self.detach_taps()

    def close(self, *, failed: bool = False) -> None:
        """Remove every hook, and write everything that was collected.

        Of a step that the optimizer has not ended only what the script recorded is written, unless the training
        `failed` in it.
        """
        self._quiet.end()
        self._parts.guard.wrap(self.poll)()
        self.detach()
        self.collector.seal_ended()
        if not failed:
            self.collector.reset_step(but=self.values.recorder.filed)
        self.collector.seal()
        self.collector.write_ready(wait=True)

    def _become(self, config: MonitorConfig, first: int) -> None:
        parts = self._parts
        self._config = config
        self._schedule = Schedule(max(config.start_step, first), config.step_interval, config.collect_times)
        self._activations = ActivationTaps(self._cells(), self.collector, self.steps, parts.guard)
        self._structure = CellStructure(
            self._cells(),
            self.steps,
            parts.guard,
            parts.structure(),
            structure=config.print_struct,
            stacks=config.stack_info,
        )
        self._optimizer_taps = OptimizerTaps(
            parts.training,
            config,
            self.collector,
            parts.guard,
            is_alone=parts.is_alone,
            micro_steps=self._num_micro_steps,
        )
        self._signs_reader = None
        self._signs = parts.signs(self._make_signs_reader, config.gradient_signs)

    def _make_signs_reader(self, *, params: Sequence[str], bounds: Sequence[float]) -> CellGradientReader:
        self._signs_reader = CellGradientReader(self._parts.training, params=params, bounds=bounds)
        return self._signs_reader

    def _cells(self) -> list[Any]:
        config = self._config
        return [m for m in self._parts.training.modules if config.all_xy or chosen(m.name, config.targets, m.stage)]

    def _hook_optimizer(self) -> None:
        optimizer, guard = self._parts.training.optimizer, self._parts.guard
        self._handles += [
            hooks.before(optimizer, guard.wrap(self._entry)),
            hooks.behind(optimizer, guard.wrap(self._exit)),
        ]

    def _unhook_optimizer(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _prepare(self) -> None:
        """Attach what the coming step needs, and take away what it does not."""
        self.is_due = self.orders.collects(self.step) or self._schedule.due(self.step)
        if self.is_due and not self._is_attached and self._graph is None:
            self._is_attached = True
            self._optimizer_taps.attach()
            self._structure.attach()
            if self._config.xy_distribution:
                self._activations.attach(
                    forward=not self._config.backward_only,
                    backward=not self._config.forward_only,
                    micro_steps=self._num_micro_steps,
                )
        elif not self.is_due and self._is_attached:
            self._detach_taps()
        self.orders.prepare(self.step)

    def _detach_taps(self) -> None:
        self._is_attached = False
        self._activations.detach()
        self._structure.detach()
        self._optimizer_taps.detach()

    def _forward_begins(self, is_training: bool) -> None:  # noqa: FBT001  # a callback
        self.phases.forward_began(is_training)
        self.collector.seal_ended()
        if is_training and self.steps.is_thrown_away:
            self.collector.reset_step()
            self._start_counting()
        self._activations.forget_seen()

    def _forward_ended(self, stage: int, output: Any) -> None:
        if self.is_due:
            self.values.recorder.find_loss(stage, output)

    def _entry(self, _optimizer: Any, args: Sequence[Any]) -> None:
        if self._quiet.are_short or self._quiet.enter():
            return
        self.collector.seal_ended()
        self.phases.beat(Phase.OPTIMIZER)
        if self.is_due:
            self._activations.forget_seen()
            self._optimizer_taps.before_step(args[0])
        if self._signs_reader is not None:
            self._signs_reader.gradients = args[0]
            self._signs.at_entry(self.step)
            self._signs_reader.gradients = ()

    def _exit(self, _optimizer: Any, _args: Any, _output: Any) -> None:
        if self._quiet.passes() or self._quiet.leave():
            self.steps.new_step()
            return
        if self.is_due:
            self._optimizer_taps.after_step()
            self._tell_of_silence()
            self._structure.step_ended()
        self._finish_step()

    def _finish_step(self) -> None:
        self.values.take_duration()
        self.orders.finish_step()
        self._start_counting()
        self._step.number += 1
        self.collector.begin(self.step)
        self.values.step_began()
        self.phases.step_began()
        self.orders.poll_commands(self.step, self._parts.page.epoch())
        self._between_steps(self.step)
        self._prepare()
        is_seen = self.is_due or self._graph is not None or self._signs_reader is not None
        if not (is_seen or self.orders.are_any or self.collector.has_ended or self._has_news()):
            due = self._schedule.next_due(self.step)
            self._quiet.begin(math.inf if due is None else due, self.values.exited_s, self.values.passed)

    def _start_counting(self) -> None:
        self.steps.new_step()
        self._activations.new_step()
        self._optimizer_taps.new_step()
        self.values.recorder.new_step()

    def _tell_of_silence(self) -> None:
        """Warn once if the hooks of cells were not called in a step for which they were attached."""
        wants_calls = self._config.xy_distribution or not self._structure.is_done
        if self._is_silence_told or not wants_calls or not self._is_attached:
            return
        self._is_silence_told = True
        if not (self._activations.num_seen or self._structure.has_seen):
            self.collector.tell(
                "no hook of a cell was called in this step, so it has nothing of what cells take and give: MindSpore "
                "calls none in what it compiles (graph mode, jit); train in PyNative mode, or set xy_distribution, "
                "print_struct and stack_info to false"
            )
