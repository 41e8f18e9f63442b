"""Warnings of changes to the model that no hook sees."""

from __future__ import annotations

from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.training import Training


class UnseenChanges:
    """Warns of changes that the hooks do not see: optimizer steps inside of `torch.compile`, and other parameters.

    Once of each.
    """

    def __init__(self, training: Training, collector: Collector, guard: FaultGuard) -> None:
        self._training = training
        self._collector = collector
        self._guard = guard
        self._num_writes = training.num_writes()
        training.look_for_changes()  # later looks compare with what is there now
        self._has_told_of_step = False

    def step_ended(self) -> None:
        """Begin to count writes to parameters anew, after a step that the hooks have seen."""
        self._num_writes = self._training.num_writes()

    def look_for_step(self) -> None:
        """Warn if parameters were written to since the last step that was seen."""
        if self._has_told_of_step or self._guard.tripped or self._num_writes == self._training.num_writes():
            return
        self._has_told_of_step = True
        self._collector.tell(
            "parameters were written to since the last step of the watched optimizer that was seen, and nothing is "
            "collected of that: another optimizer took over or steps too (call set_monitor with the one that is used), "
            "optimizers step in hooks of the backward, or a wrapper (as SAM) does without their step(); steps inside "
            "of torch.compile are not seen, so leave optimizer.step() out of what is compiled (it is no fault if the "
            "script itself writes to parameters between steps)"
        )

    def look_for_parameters(self) -> None:
        """Warn of parameters that the model or the optimizer holds now, and that are not watched; once of each."""
        message = self._training.look_for_changes()
        if message:
            self._collector.tell(message)
