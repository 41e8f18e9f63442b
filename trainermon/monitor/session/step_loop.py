"""One training step after another: what is attached for it, what is taken when, and what leaves the rank.

    exit of step k-1 ── attach what step k needs ── forward, backward (taps) ── entry of step k: gradients, parameters,
    replay if a gradient is not finite ── optimizer ── exit of step k: moments, parameters; seal, write, beat

Always in place are only the optimizer's two hooks, and one that sees a checkpoint being made. Everything else is
attached on the steps on which it is due.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainermon.core.catalogue import STEP_TIME_SERIES
from trainermon.core.config import MonitorConfig
from trainermon.core.control import ControlPage, Phase
from trainermon.core.journal import JournalWriter
from trainermon.core.outbox import Parcel
from trainermon.core.schedule import Schedule
from trainermon.core.values import Kind, SeriesKey, StatBlock
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.names import chosen
from trainermon.monitor.session.collection import TapCollection
from trainermon.monitor.session.dumps import RankDumps
from trainermon.monitor.session.recorded import StepRecorder
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.training import StepOutcome, TapHandle, Training

logger = logging.getLogger("trainermon")

DURATION = SeriesKey(Kind.STEP, STEP_TIME_SERIES)
# Steps that stay open for a loss that is recorded after them, until it is known where in the loop the script records.
STEPS_TO_LEARN = 2
# Phases that end when the model is trained again.
_PAUSES = (Phase.CHECKPOINT, Phase.EVALUATION)
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
        dumps: RankDumps,
        guard: FaultGuard,
        between_steps: Callable[[int], None],
        groups: Mapping[str, Any],
        structure: Callable[[], Parcel],
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
        self._groups = groups
        self._structure = structure
        self._handles: list[TapHandle] = []
        self._decision: list[TapHandle] | None = None
        self._due = self._unchecked = self._knows_replaced = self._knows_unseen = False
        self._num_writes = training.num_writes()
        self._place = RecordPlace.UNKNOWN
        self._exited_s = self._duration_s = 0.0
        self._phase = Phase.SETUP
        self._marked: Phase | None = None
        self.collector = Collector(training.device, journal)
        self._steps = MicroSteps(
            training,
            guard,
            num_expected=num_micro_steps,
            on_forward_begin=self._forward_begins,
            on_forward_mode=self._forward_is,
            on_forward_end=self._forward_ended,
            on_backward_end=self._backward_ended,
        )
        self._recorded = StepRecorder(training, self.collector, self._steps, num_micro_steps=num_micro_steps)
        dumps.replays.configure(config)
        self._collection = self._make_collection()

    def _make_collection(self) -> TapCollection:
        return TapCollection(
            self._training,
            self._config,
            collector=self.collector,
            steps=self._steps,
            guard=self._guard,
            num_micro_steps=self._num_micro_steps,
            groups=self._groups,
            structure=self._structure(),
        )

    def start(self) -> None:
        """Watch the optimizer's step and prepare the first one."""
        self._beat(Phase.SETUP)
        self._handles = self._training.watch_step(self._guard, entry=self._entry, exit=self._exit)
        self._handles.extend(self._watch_checkpoints())
        self.collector.begin(self.step)
        self._prepare()

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Tell the agent that the script is busy with `phase` meanwhile."""
        marked = self._marked
        self._marked = phase
        self._beat(phase)
        try:
            yield
        finally:
            self._marked = marked
            self._beat(marked or self._works())

    def _beat(self, phase: Phase) -> None:
        self._phase = phase
        self._page.beat(self.step, phase, time.time())

    def _watch_checkpoints(self) -> list[TapHandle]:
        """Follow the state of one module of each stage being read, with which every kind of checkpoint begins."""
        hook = self._guard.wrap(self._saves)
        owners = map(_first_owner, self._training.roots)
        return [
            owner.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
            for owner in owners
            if not isinstance(owner, torch.jit.ScriptModule)  # which refuses hooks of this kind
        ]

    def let_go(self) -> None:
        """Take every hook away but those around the optimizer's step, through which torch may be walking right now."""
        self._detach()
        self._dumps.abandon()
        self._watch_decision()

    def remove(self) -> None:
        """Take away every hook, whatever may have been put in place."""
        self._leave_step()
        self.let_go()

    def _leave_step(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self, *, failed: bool = False) -> None:
        """Take every hook away, and write everything that was taken, waiting for the device if need be.

        What has no optimizer step is no step: of the one that is open only what the script recorded is written, unless
        it is what the training `failed` in, or its gradients are not finite.
        """
        self._leave_step()
        if self.step == self._first_step:
            self._look_for_unseen_step()
        if not self._guard.tripped and not self._dumps.replays.joint:
            self._check_gradients()
        is_thrown_away = self._steps.has_backward and self._training.gradients_are_gone()
        is_bad = failed or self.collector.any_nonfinite(self._collection.gradients.series)
        self.let_go()
        self.collector.seal_ended()
        if is_thrown_away:
            self.collector.discard()
        elif not is_bad:
            self.collector.discard(but=self._recorded.filed)
        self.collector.seal()
        self.collector.write_ready(wait=True)

    def reconfigure(self, config: MonitorConfig) -> None:
        """Collect by `config` from the next step on, or from its `start_step` if that is later."""
        self._detach()
        self._config = config
        first_step = max(config.start_step, self.step)
        self._schedule = Schedule(first_step, config.step_interval, config.collect_times)
        self._dumps.replays.configure(config)
        self._collection = self._make_collection()

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

    def file(self, values: Mapping[str, Tensor | float]) -> None:
        """File `values` under the step that runs, wherever in its loop the script records."""
        for name, value in values.items():
            self._recorded.file(name, value)

    def record(self, values: Mapping[str, Tensor | float]) -> None:
        """File `values` under the step they belong to: the one that runs, or, after its end, the one that has ended.

        Where in its loop the script records is learnt from its first call.
        """
        has_ended_one = self.step > self._first_step
        if self._place is RecordPlace.UNKNOWN:
            is_after = has_ended_one and not self._steps.has_begun
            self._place = RecordPlace.AFTER if is_after else RecordPlace.BEFORE
        if self._place is RecordPlace.AFTER and has_ended_one and not self._steps.has_begun:
            with self.collector.late(self.step - 1):
                self.file(values)
                self._recorded.file_rate(self._duration_s)
            self._recorded.new_step()
        else:
            self.collector.seal_ended()
            self.file(values)

    def scale_found_loss(self, factor: float) -> None:
        """Multiply losses that are found in what the model returns by `factor` from now on."""
        self._recorded.found_loss_factor = factor

    def expect(self, micro_steps: int) -> None:
        """Count on so many backwards in the step that runs."""
        self._steps.expect(micro_steps)

    def latest(self) -> StatBlock | None:
        """Return the newest step that has ended. Waits for the device."""
        self.collector.seal_ended()
        self.collector.write_ready(wait=True)
        return self.collector.latest

    def _prepare(self) -> None:
        """Attach what the coming step needs, and take away what it does not."""
        self._due = self._schedule.due(self.step) or self._dumps.ordered.collects(self.step)
        if self._due and not self._steps.attached:
            self._attach()
        elif not self._due and self._steps.attached:
            self._detach()
        self._dumps.prepare(self.step, gradients_due=self._due and self._config.wg_distribution)
        self._watch_decision()

    def _watch_decision(self) -> None:
        """Have the framework tell what it reduced, on the steps on which a replay may be made."""
        if self._dumps.replays.keeping and self._decision is None:
            self._decision = self._training.watch_decision(self._guard, self._replay_if)
        elif not self._dumps.replays.keeping and self._decision is not None:
            for handle in self._decision:
                handle.remove()
            self._decision = None

    def _attach(self) -> None:
        self._collection.attach()
        self._steps.attach()

    def _detach(self) -> None:
        self._steps.detach()
        self._collection.detach()

    def _saves(self, *_about: Any) -> None:
        if self._phase is not Phase.OPTIMIZER:
            self._beat(self._marked or Phase.CHECKPOINT)

    def _forward_is(self, training: bool) -> None:  # noqa: FBT001  # a callback
        if not training:
            self._beat(self._marked or Phase.EVALUATION)
        elif self._phase in _PAUSES and self._marked is None:
            self._beat(self._works())

    def _works(self) -> Phase:
        """Return the phase of a step: the first one may compile and connect."""
        return Phase.SETUP if self.step == self._first_step else Phase.STEP

    def _forward_begins(self) -> None:
        self.collector.seal_ended()
        if not self._steps.has_backward:
            return
        self._look_for_unseen_step()
        if self._training.gradients_are_gone():
            self._skipped()

    def _skipped(self) -> None:
        """Drop what was taken: the script has thrown its gradients away without an optimizer step."""
        if not self._steps.in_float16 and not self._dumps.replays.joint:
            self._check_gradients()
        self.collector.discard()
        self._start_counting()
        self._dumps.replays.forget()

    def _forward_ended(self, stage: int, output: Any) -> None:
        self._collection.forward_ended()
        self._recorded.find_loss(stage, output)

    def _backward_ended(self) -> None:
        if self._steps.backward >= MAX_BACKWARDS * self._num_micro_steps:
            self._give_up()
            return
        self._collection.backward_ended()
        self._unchecked = self._config.wg_distribution and not self._training.reads_at_entry

    def _give_up(self) -> None:
        logger.warning(
            "%d backward passes since the last step of the watched optimizer: it is not used any more, and nothing is "
            "collected until it steps; call set_monitor with the optimizer that is used",
            self._steps.backward,
        )
        self._unchecked = False
        self.collector.discard()
        self.let_go()
        self._beat(Phase.DETACHED)

    def _entry(self) -> None:
        self.collector.seal_ended()
        self._beat(Phase.OPTIMIZER)
        if not self._due:
            return
        self._collection.before_optimizer(self.step, is_scaled=self._steps.in_float16)
        if self._config.wg_distribution:
            self._unchecked = True
            self._check_gradients()
        self._steps.stepping = True  # what an optimizer with a closure evaluates again is no step of the script's

    def _check_gradients(self) -> None:
        """Replay the step if its gradients are the first that are not finite; once per backward at most.

        Nothing is checked where the framework itself tells, later in its step.
        """
        if not (self._unchecked and self._dumps.replays.armed) or self._decision:
            return
        self._unchecked = False
        reduced = self._collection.gradients.reduced
        nonfinite = self.collector.any_nonfinite(reduced)
        self._replay_if(nonfinite or (self._dumps.replays.gradients_vanished() and self.collector.any_nonzero(reduced)))

    def _replay_if(self, nonfinite: bool) -> None:  # noqa: FBT001  # the framework calls it
        if not self._dumps.replays.armed:
            return
        if nonfinite:
            self._beat(Phase.REPLAY)
        self.collector.muted = self._steps.replaying = True
        try:
            self._dumps.replays.checked(self.step, nonfinite=nonfinite)
        finally:
            self.collector.muted = self._steps.replaying = False

    def _exit(self, outcome: StepOutcome) -> None:
        self._steps.stepping = False
        if self._due:
            self._collection.after_optimizer(outcome)
        self._num_writes = self._training.num_writes()
        self._take_duration()
        self._dumps.finish_step()
        self._start_counting()
        self.step += 1
        self.collector.begin(self.step)
        is_young = self.step - self._first_step <= STEPS_TO_LEARN
        is_learning = is_young and self._place is RecordPlace.UNKNOWN
        if self._place is not RecordPlace.AFTER and not is_learning:
            self.collector.seal_ended()
        self._beat(self._marked or Phase.STEP)
        self._between_steps(self.step)
        self._prepare()
        if self._due and not self._knows_replaced:
            self._look_for_replaced()

    def _look_for_unseen_step(self) -> None:
        if self._knows_unseen or self._guard.tripped or self._num_writes == self._training.num_writes():
            return
        self._knows_unseen = True
        self.collector.tell(
            "parameters were written to since the last step of the watched optimizer that was seen: steps inside of "
            "torch.compile are not seen, and nothing is collected of them; leave optimizer.step() out of what is "
            "compiled (it is no fault if the script itself writes to parameters between steps)"
        )

    def _look_for_replaced(self) -> None:
        name = self._training.replaced_parameter()
        if name:
            self._knows_replaced = True
            self.collector.tell(
                f"the model holds another parameter in the place of {name} than at set_monitor (a module was replaced, "
                "or load_state_dict(assign=True)): what is shown of it is the old one; close() this monitor and call "
                "set_monitor again"
            )

    def _take_duration(self) -> None:
        now_s = time.perf_counter()
        self._duration_s = now_s - self._exited_s if self._exited_s else 0.0
        self._exited_s = now_s
        if self._duration_s and not self.collector.is_empty:
            self.collector.put(self.collector.table.id_of(DURATION), self._duration_s)
            self._recorded.file_rate(self._duration_s)

    def _start_counting(self) -> None:
        self._unchecked = False
        self._steps.new_step()
        self._collection.new_step()
        self._recorded.new_step()


def _first_owner(root: nn.Module) -> nn.Module:
    """Return the first module that holds a parameter itself: it is asked for its state with each one above it."""
    return next((module for module in root.modules() if next(module.parameters(recurse=False), None) is not None), root)
