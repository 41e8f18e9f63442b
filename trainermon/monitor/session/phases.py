"""Which step is open, and what the agent is told the rank is busy with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from trainermon.core.control import ControlPage, Phase

# Phases that end when the model is trained again.
_PAUSES = (Phase.CHECKPOINT, Phase.EVALUATION)

LOOK_S = 0.02
"""On quiet steps a rank looks for commands, and tells the agent where it is, no more often than this.

On the others it tells that of each step, and of the optimizer's part of it no more often than this.
"""


class CurrentStep:
    """The number of the step that is open; shared by the parts of a session.

    Attributes:
        first: The first step that is watched.
        number: The one that is open.
    """

    __slots__ = ("first", "number")

    def __init__(self, first: int) -> None:
        self.first = self.number = first


class StepPhases:
    """Tells the agent, through the control page in shared memory, what this rank is doing now.

    Attributes:
        phase: What it is doing.
    """

    def __init__(self, page: ControlPage, step: CurrentStep) -> None:
        self._page = page
        self._step = step
        self.phase = Phase.SETUP
        self._told_s = 0.0
        self._marked: Phase | None = None

    def beat(self, phase: Phase) -> None:
        """Send the agent a heartbeat that says that `phase` (step, optimizer, checkpoint …) begins now."""
        self.phase = phase
        self._told_s = time.time()
        self._page.beat(self._step.number, phase, self._told_s)

    def optimizer_begins(self) -> None:
        """Tell the agent that the optimizer's part of a step begins, unless it was told something just now.

        Where that part of a short step hangs, the agent takes it for another part of the same step, whose limits are
        the same.
        """
        if 0 <= time.time() - self._told_s < LOOK_S:
            self.phase = Phase.OPTIMIZER
        else:
            self.beat(Phase.OPTIMIZER)

    @contextlib.contextmanager
    def marked(self, phase: Phase) -> Iterator[None]:
        """Return a context during which the agent knows that the script is busy with `phase`."""
        marked = self._marked
        self._marked = phase
        self.beat(phase)
        try:
            yield
        finally:
            self._marked = marked
            self.beat(marked or self._working())

    def step_began(self) -> None:
        """Tell the agent that a step begins after one that has ended."""
        self.beat(self._marked or Phase.STEP)

    def state_is_read(self, *_about: Any) -> None:
        """Tell the agent that a checkpoint begins, as the model's state is read.

        Not if it is the optimizer that reads it.
        """
        if self.phase is not Phase.OPTIMIZER:
            self.beat(self._marked or Phase.CHECKPOINT)

    def forward_began(self, training: bool) -> None:  # noqa: FBT001  # a callback
        """Tell the agent that an evaluation begins (not `training`), or that a pause is over."""
        if not training:
            self.beat(self._marked or Phase.EVALUATION)
        elif self.phase in _PAUSES and self._marked is None:
            self.beat(self._working())

    def _working(self) -> Phase:
        """Return the phase of a step: the first one may compile and connect."""
        return Phase.SETUP if self._step.number == self._step.first else Phase.STEP


class QuietSteps:
    """Lets steps pass on which nothing is collected, ordered or recorded: they are only counted.

    The steps are quiet from `begin` until `end`, or until one that is known at the beginning. Meanwhile a rank looks
    for commands and tells the agent where it is every 20 ms at most: on a short step, the system calls for that would
    cost more than all the rest.

    Args:
        step: The step that is open.
        phases: What the agent is told.
        has_news: Tells whether a command has come, or something else that is looked for between steps.
    """

    def __init__(self, step: CurrentStep, phases: StepPhases, has_news: Callable[[], bool]) -> None:
        self.are_short = self.are_on = False
        self.step = step
        self.until = self.look_at_s = self.began_s = self.before_s = 0.0
        self._phases = phases
        self._has_news = has_news
        self._ended: Callable[[int, float, float], None] | None = None

    def begin(self, until: float, began_s: float, ended: Callable[[int, float, float], None]) -> None:
        """Let the open step pass, which began at `began_s` of `time.perf_counter`, and those after it before `until`.

        `ended` is called when they end, with the number of the open step, the time at which it began, and how long the
        one before it took in seconds. A time that is not known is 0.
        """
        self.are_on, self.until, self._ended = True, until, ended
        self.began_s, self.before_s = began_s, 0.0

    def end(self) -> None:
        """Let no step pass any more, the open one included."""
        if self.are_on and self._ended is not None:
            self.are_on = self.are_short = False
            self._ended(self.step.number, self.began_s, self.began_s - self.before_s if self.before_s else 0.0)

    def enter(self) -> bool:
        """Return whether the optimizer's step that begins is a quiet one; the agent is told so."""
        if self.are_on:
            self._phases.beat(Phase.OPTIMIZER)
        return self.are_on

    def passes(self) -> bool:
        """Return whether the step that ends is a short quiet one that nobody need be told of; then the next is open."""
        now_s, coming = time.perf_counter(), self.step.number + 1
        if not self.are_short or now_s >= self.look_at_s or coming >= self.until:
            return False
        self.step.number, self.before_s, self.began_s = coming, self.began_s, now_s
        return True

    def leave(self) -> bool:
        """Return whether the step that ends is quiet, and so is the next, which is open then; the agent is told so."""
        if self.are_on and (self.step.number + 1 >= self.until or self._has_news()):
            self.end()
        if self.are_on:
            self.step.number += 1
            last_s = self.began_s - self.before_s
            self.before_s, self.began_s = self.began_s, time.perf_counter()
            self.are_short = min(last_s, self.began_s - self.before_s) < LOOK_S
            self.look_at_s = self.began_s + LOOK_S
            self._phases.step_began()
        return self.are_on
