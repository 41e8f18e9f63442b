"""One training step after another: what is attached for it, what is taken when, and what leaves the rank.

    exit of step k-1 ── attach what step k needs ── forward, backward (taps) ── entry of step k: gradients, parameters,
    replay if a gradient is not finite ── optimizer ── exit of step k: moments, parameters; seal, write, beat

Always in place are only the optimizer's two hooks, and one that sees a checkpoint being made. Everything else is
attached on the steps on which it is due.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from trainermon.core.config import MonitorConfig
from trainermon.core.config.schema import GradientSignsConfig
from trainermon.core.control import ControlPage, Phase
from trainermon.core.journal import JournalWriter
from trainermon.core.outbox import Parcel
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.gradient_probe.run_signs import RunSigns
from trainermon.monitor.session.collection import TapContext
from trainermon.monitor.session.due_taps import DueTaps
from trainermon.monitor.session.dumps import RankDumps
from trainermon.monitor.session.gradient_check import FiniteGradientCheck
from trainermon.monitor.session.phases import CurrentStep, QuietSteps, StepPhases
from trainermon.monitor.session.recorded import StepRecorder
from trainermon.monitor.session.script_values import ScriptValues
from trainermon.monitor.session.step_hooks import StepHooks
from trainermon.monitor.session.unseen_changes import OtherSteps, UnseenChanges
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.training import StepOutcome, Training

logger = logging.getLogger("trainermon")

# Backwards without an optimizer step after which nothing is collected any more.
MAX_BACKWARDS = 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """What the monitor of a rank has made before its step loop.

    Attributes:
        training: What is watched.
        groups: Process groups by purpose.
        guard: Contains errors in what torch calls.
        journal: The file for rows and events.
        page: The control page: phases go there and commands arrive there.
        dumps: Replays and ordered dumps.
        structure: Returns the folder for the structure of the model.
        signs: Returns what writes the signs of gradients.
    """

    training: Training
    groups: Mapping[str, Any]
    guard: FaultGuard
    journal: JournalWriter
    page: ControlPage
    dumps: RankDumps
    structure: Callable[[], Parcel]
    signs: Callable[[GradientSignsConfig], RunSigns]


class StepLoop:
    """Runs the monitor from step to step on one rank: calls taps, checks, dumps and journal at the right moments.

    No error leaves a hook.

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
        taps: What is collected.
    """

    def __init__(  # noqa: PLR0913  # what it watches, and whom it tells
        self,
        parts: RankParts,
        config: MonitorConfig,
        *,
        step: int,
        num_micro_steps: int,
        between_steps: Callable[[int], None],
        has_news: Callable[[], bool],
    ) -> None:
        training, guard = parts.training, parts.guard
        self._training = training
        self._step = CurrentStep(step)
        self._dumps = parts.dumps
        self._between_steps, self._has_news = between_steps, has_news
        self._max_backwards = MAX_BACKWARDS * num_micro_steps
        self.phases = StepPhases(parts.page, self._step)
        self._quiet = QuietSteps(self._step, self.phases, has_news)
        self.collector = Collector(training.device, parts.journal)
        self.steps = MicroSteps(
            training,
            guard,
            num_expected=num_micro_steps,
            on_forward_begin=self._forward_begins,
            on_forward_mode=self._forward_has_mode,
            on_forward_end=self._forward_ended,
            on_backward_end=self._backward_ended,
        )
        recorder = StepRecorder(training, self.collector, self.steps, num_micro_steps=num_micro_steps)
        self.values = ScriptValues(recorder, self.collector, self.steps, self._step, self._quiet)
        parts.dumps.replays.configure(config)
        context = TapContext(
            training=training,
            collector=self.collector,
            steps=self.steps,
            guard=guard,
            num_micro_steps=num_micro_steps,
            groups=parts.groups,
            structure=parts.structure,
            signs=parts.signs,
        )
        self.taps = DueTaps(context, config, first=step)
        self._check = FiniteGradientCheck(parts.dumps.replays, self.taps, self._step, self.phases)
        self._unseen = UnseenChanges(training, self.collector, guard)
        self._others = OtherSteps(training, follow=self._follow, miss=self._miss)
        self._blind_since: int | None = None
        self._hooks = StepHooks(training, guard)
        self._prepared: tuple[bool, bool] | None = None  # for what: whether it is due, whether it may be replayed

    @property
    def step(self) -> int:
        """Number of the step that is open."""
        return self._step.number

    def start(self) -> None:
        """Hook the optimizer's step, and prepare the first one."""
        self.phases.beat(Phase.SETUP)
        self._hooks.attach(
            entry=self._entry,
            exit=self._exit,
            quiet=self._quiet,
            others=self._others,
            state_is_read=self.phases.state_is_read,
        )
        self.collector.begin(self.step)
        self._prepare()

    def estimate_rows(self) -> int:
        """Return about how many rows a collected step will have."""
        return self.taps.estimate_rows()

    def expect_micro_steps(self, number: int) -> None:
        """Set how many backwards the running step has."""
        self._quiet.end()
        self.steps.expect(number)

    def detach_taps(self) -> None:
        """Remove every hook except those around the optimizer's step, which torch may be running right now."""
        self._prepared = None
        self.taps.detach()
        self._dumps.detach()
        self._check.watch_decision()

    def detach(self) -> None:
        """Remove all hooks of the monitor, also after a start that was interrupted."""
        self._hooks.detach()
        self.detach_taps()

    def close(self, *, failed: bool = False) -> None:
        """Remove every hook, and write everything that was collected, waiting for the device if need be.

        What has no optimizer step is no step: of the one that is open only what the script recorded is written, unless
        it is what the training `failed` in, or its gradients are not finite.
        """
        self._quiet.end()
        self._others.training_ends()
        self.values.settle(is_over=True)
        self._hooks.detach()
        if self._step.number == self._step.first:
            self._unseen.look_for_step()
        self._check.check_without_step()
        is_thrown_away = self.steps.is_thrown_away
        is_bad = failed or self.collector.any_nonfinite(self.taps.gradients)
        self.detach_taps()
        self.collector.seal_ended()
        if is_thrown_away or self._blind_since is not None:
            self.collector.reset_step()
        elif not is_bad:
            self.collector.reset_step(but=self.values.recorder.filed)
        self.collector.seal()
        self.collector.write_ready(wait=True)

    def reconfigure(self, config: MonitorConfig) -> None:
        """Collect by `config` from the next step on, or from its `start_step` if that is later."""
        self._prepared = None
        self.taps.reconfigure(config, self.step)
        self._dumps.replays.configure(config)

    def _prepare(self) -> None:
        """Attach what the coming step needs, and take away what it does not; nothing if that is as it was."""
        step, ordered = self._step.number, self._dumps.ordered
        needed = self.taps.schedule.due(step), self._dumps.replays.armed
        are_ordered = ordered.are_any
        if needed != self._prepared or are_ordered:
            self._prepared = None if are_ordered else needed
            self.taps.prepare(step, is_ordered=ordered.collects(step))
            self._dumps.prepare(step, gradients_due=self.taps.is_due and self.taps.takes_gradients)
            self._check.watch_decision()
        if not (self.taps.is_due or ordered.are_any or self.collector.has_ended or self._has_news()):
            self._quiet.begin(self.taps.next_due(step), self.values.exited_s, self.values.passed)

    def _forward_begins(self) -> None:
        self.collector.seal_ended()
        if not self.steps.has_backward:
            return
        self._unseen.look_for_step()
        if self.steps.is_thrown_away or self._is_skipped_by_scaler():
            self._skipped()

    def _forward_has_mode(self, is_training: bool) -> None:  # noqa: FBT001  # a callback
        self.phases.forward_began(is_training)
        if is_training and self.taps.is_due:
            self.taps.collection.forward_begins(self._step.number)

    def _is_skipped_by_scaler(self) -> bool:
        """Return whether the step that is complete has no optimizer step as a loss scaler still looks for its scale.

        Scripts may clear gradients later, between forward and backward, or in place. Waits for the device, at most once
        a step, and only where a forward begins behind the step's last backward.
        """
        steps = self.steps
        is_next = steps.in_float16 and steps.backward == steps.expected
        return is_next and self.collector.any_nonfinite(self.taps.gradients)

    def _skipped(self) -> None:
        """Drop what was taken: the script has thrown its gradients away without an optimizer step.

        What it has recorded belongs to the step that comes of it, unless a loss scaler skips that attempt.
        """
        is_attempt = self.steps.in_float16
        if not is_attempt:
            self._check.check_without_step()
        self.collector.reset_step(but=frozenset() if is_attempt else self.values.recorder.filed)
        self._start_counting()
        self._dumps.replays.reset()

    def _forward_ended(self, stage: int, output: Any) -> None:
        self.taps.collection.forward_ended()
        self.values.recorder.find_loss(stage, output)

    def _backward_ended(self) -> None:
        if self.steps.backward >= self._max_backwards:
            self._give_up()
            return
        self.taps.collection.backward_ended()
        self._check.backward_ended()

    def _give_up(self) -> None:
        self._lose(
            f"{self.steps.backward} backward passes since the last step of the watched optimizer: it is not used any "
            "more; call set_monitor with the optimizer that is used"
        )
        self._check.is_pending = False
        self.collector.reset_step()
        self.detach_taps()
        self.phases.beat(Phase.DETACHED)

    def _follow(self, optimizer: Any, num_steps: int) -> bool:
        """Watch `optimizer`, which the script has stepped `num_steps` times in the place of the watched one.

        What was taken meanwhile is of several steps, and left out. Returns whether this optimizer can be watched.
        """
        before = type(self._training.optimizer).__name__
        if not self._training.follow(optimizer):
            return False
        self._quiet.end()
        self.values.settle()
        self.collector.seal_ended()
        self.collector.reset_step()
        self._dumps.replays.reset()
        self._hooks.follow()
        first = self._step.number
        self._start_counting()
        self._step.number += num_steps
        self.collector.tell_gap(
            first,
            first + num_steps - 1,
            f"the script steps another optimizer ({type(optimizer).__name__}) in the place of the watched {before}; it "
            f"is watched from step {self._step.number} on",
        )
        self.taps.renew(self._step.number)
        self._prepared, self._blind_since = None, None
        self._step_began()
        return True

    def _miss(self, optimizer: Any) -> None:
        """Say that another optimizer is stepped, and not the watched one."""
        watched, other = type(self._training.optimizer).__name__, type(optimizer).__name__
        self._lose(
            f"the script steps another optimizer ({other}), which does not hold all that the watched {watched} does; "
            "close() this monitor and call set_monitor of a new one with it"
        )

    def _lose(self, why: str) -> None:
        """Say, once, that nothing is collected from the open step on, until the watched optimizer steps."""
        if self._blind_since is None:
            self._quiet.end()
            self._blind_since = self._step.number
            self.collector.tell_gap(self._step.number, None, why)

    def _entry(self) -> None:
        if self._quiet.are_on and self._quiet.enter():
            return
        self.values.settle()
        self.collector.seal_ended()
        self.phases.optimizer_begins()
        if not self.taps.is_due:
            return
        self.taps.collection.before_optimizer(self._step.number, is_scaled=self.steps.in_float16)
        if self.taps.takes_gradients:
            self._check.is_pending = True
            self._check.check()
        self.steps.stepping = True  # what an optimizer with a closure evaluates again is no step of the script's

    def _exit(self, outcome: StepOutcome) -> None:
        if self._quiet.are_on and self._quiet.leave():
            return
        self.steps.stepping = False
        if self.taps.is_due:
            self.taps.collection.after_optimizer(outcome)
        self._unseen.step_ended()
        self.values.take_duration()
        self._dumps.finish_step()
        self._start_counting()
        if self._blind_since is not None:
            self.collector.tell_gap(self._blind_since, self._step.number, "the watched optimizer is stepped again")
            self._blind_since = None
        self._step.number += 1
        self._step_began()

    def _step_began(self) -> None:
        step = self._step.number
        self.collector.begin(step)
        self.values.step_began()
        self.phases.step_began()
        self._between_steps(step)
        self._prepare()
        if self.taps.is_due:
            self._unseen.look_for_parameters()

    def _start_counting(self) -> None:
        self._check.is_pending = False
        self.steps.new_step()
        self.taps.collection.new_step()
        self.values.recorder.new_step()
