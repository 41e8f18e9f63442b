"""Warnings of changes to the model that no hook sees."""

from __future__ import annotations

from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.frameworks.held_places import HeldModules
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.compiled_regions import has_compiled
from trainermon.monitor.taps.loop.left_out import other_optimizers
from trainermon.monitor.taps.training import Training
from trainermon.replay.absent import has_own_hook

_NOTHING_FOUND = "the script itself writes to them, which is no fault, or does without the optimizer's step()"


class UnseenChanges:
    """Warns of changes that the hooks do not see: steps of no watched optimizer, and other parameters.

    Once of each.
    """

    def __init__(self, training: Training, collector: Collector, guard: FaultGuard) -> None:
        self._training = training
        self._collector = collector
        self._guard = guard
        self._num_writes = training.num_writes()
        training.look_for_changes()  # later looks compare with what is there now
        self._modules = None if training.keeps_parameters else HeldModules(training.parameters, training.roots)
        self._has_told_of_step = False

    def step_ended(self) -> None:
        """Begin to count writes to parameters anew, after a step that the hooks have seen."""
        self._num_writes = self._training.num_writes()

    def look_for_step(self) -> None:
        """Warn if parameters were written to since the last step that was seen."""
        if self._has_told_of_step or self._guard.tripped or self._num_writes == self._training.num_writes():
            return
        self._has_told_of_step = True
        watched = type(self._training.optimizer).__name__
        self._collector.tell(
            f"parameters were written to since the last step of the watched {watched} that was seen, and nothing is "
            f"collected of that: {'; '.join(self._found()) or _NOTHING_FOUND}"
        )

    def _found(self) -> list[str]:
        """Return in words what may have written to the parameters, of what there is in this process."""
        others = sorted(
            {
                type(other).__name__
                for other in other_optimizers(self._training, [p.tensor for p in self._training.parameters])
            }
        )
        hooked = any(has_own_hook(parameter.tensor) for parameter in self._training.parameters)
        known = (
            (
                f"another optimizer ({', '.join(others)}) has them, too: if that is the one whose step() is called, "
                "close() this monitor and call set_monitor of a new one with it",
                others,
            ),
            ("the script has hooks on accumulated gradients; steps in them are not seen", hooked),
            (
                "the script has compiled code; steps inside of torch.compile are not seen, so leave optimizer.step() "
                "out of what is compiled",
                has_compiled(),
            ),
        )
        return [words for words, is_there in known if is_there]

    def look_for_parameters(self) -> None:
        """Warn of parameters that the model or the optimizer holds now, and that are not watched; once of each."""
        message = self._training.look_for_changes() if self._modules is None else self._modules.look()
        if message:
            self._collector.tell(message)
