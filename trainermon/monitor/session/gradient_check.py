"""When the gradients of a step are checked, and the step replayed if they are not finite."""

from __future__ import annotations

from trainermon.core.control import Phase
from trainermon.monitor.session.due_taps import DueTaps
from trainermon.monitor.session.phases import CurrentStep, StepPhases
from trainermon.monitor.session.step_replays import StepReplays
from trainermon.monitor.taps.training import TapHandle


class FiniteGradientCheck:
    """Checks whether gradients are finite, once per backward at most, and has the step replayed if they are not.

    Only while a replay may follow. Nothing is checked where the framework itself tells, later in its step.

    Attributes:
        is_pending: Whether there are gradients that were not checked.
    """

    def __init__(self, replays: StepReplays, taps: DueTaps, step: CurrentStep, phases: StepPhases) -> None:
        self._replays = replays
        self._taps = taps
        self._context = taps.context
        self._step = step
        self._phases = phases
        self._decision: list[TapHandle] | None = None
        self.is_pending = False

    @property
    def step(self) -> int:
        """Number of the step that is open."""
        return self._step.number

    def watch_decision(self) -> None:
        """Watch the framework's own verdict on gradients, on the steps on which a replay may be made."""
        if self._replays.keeping and self._decision is None:
            context = self._context
            self._decision = context.training.watch_decision(context.guard, self.replay_if)
        elif not self._replays.keeping and self._decision is not None:
            for handle in self._decision:
                handle.remove()
            self._decision = None

    def backward_ended(self) -> None:
        """Check the gradients of the backward that has ended, if they are final now, before they are dropped."""
        self.is_pending = self._taps.takes_gradients and not self._context.training.reads_at_entry

    def check(self) -> None:
        """Check the gradients; replay the step if they are the first that are not finite."""
        if not (self.is_pending and self._replays.armed) or self._decision:
            return
        self.is_pending = False
        collector, reduced = self._context.collector, self._taps.collection.gradients.reduced
        nonfinite = collector.any_nonfinite(reduced)
        self.replay_if(nonfinite or (self._replays.gradients_vanished() and collector.any_nonzero(reduced)))

    def check_without_step(self) -> None:
        """Check gradients that no optimizer step will use; not after a fault, nor where a replay takes all ranks."""
        if not self._context.guard.tripped and not self._replays.joint:
            self.check()

    def replay_if(self, nonfinite: bool) -> None:  # noqa: FBT001  # the framework calls it
        """Replay the step if `nonfinite`; nothing is collected meanwhile."""
        if not self._replays.armed:
            return
        if nonfinite:
            self._phases.beat(Phase.REPLAY)
        collector, steps = self._context.collector, self._context.steps
        collector.muted = steps.replaying = True
        try:
            self._replays.checked(self.step, nonfinite=nonfinite)
        finally:
            collector.muted = steps.replaying = False
