"""Which step is open, and what the agent is told the rank is busy with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from trainermon.core.control import ControlPage, Phase

# Phases that end when the model is trained again.
_PAUSES = (Phase.CHECKPOINT, Phase.EVALUATION)


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
    """Tells the agent, through the control page in shared memory, what this rank is doing now."""

    def __init__(self, page: ControlPage, step: CurrentStep) -> None:
        self._page = page
        self._step = step
        self._phase = Phase.SETUP
        self._marked: Phase | None = None

    def beat(self, phase: Phase) -> None:
        """Send the agent a heartbeat that says that `phase` (step, optimizer, checkpoint …) begins now."""
        self._phase = phase
        self._page.beat(self._step.number, phase, time.time())

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
        if self._phase is not Phase.OPTIMIZER:
            self.beat(self._marked or Phase.CHECKPOINT)

    def forward_began(self, training: bool) -> None:  # noqa: FBT001  # a callback
        """Tell the agent that an evaluation begins (not `training`), or that a pause is over."""
        if not training:
            self.beat(self._marked or Phase.EVALUATION)
        elif self._phase in _PAUSES and self._marked is None:
            self.beat(self._working())

    def _working(self) -> Phase:
        """Return the phase of a step: the first one may compile and connect."""
        return Phase.SETUP if self._step.number == self._step.first else Phase.STEP
