"""Steps of other optimizers, and warnings of changes to the model that no hook sees."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.frameworks.held_places import HeldModules, num_stepped
from trainermon.monitor.frameworks.optimizer_wrappers import held_optimizers
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.compiled_regions import has_compiled
from trainermon.monitor.taps.loop.left_out import other_optimizers
from trainermon.monitor.taps.training import TapHandle, Training
from trainermon.replay.absent import has_own_hook

STEPS_IN_A_ROW = 2
MISSED_STEPS = 100

_NOTHING_FOUND = "the script itself writes to them, which is no fault, or does without the optimizer's step()"


class OtherSteps:
    """Looks at the steps of other optimizers over what the watched one holds, while that one does not step itself.

    torch calls it after each step of every optimizer of the process: 0.5 µs for the watched one, 1.6 µs for one of
    other parameters. One that holds all that still needs a gradient, and that is stepped twice in a row, is in the
    place of the watched one: of two that are used in turn, none is.

    Args:
        training: What is watched.
        follow: Watches the optimizer, after so many steps that were not seen, or returns False.
        miss: Called once with one that cannot be followed, after 100 steps that were not seen.
    """

    def __init__(self, training: Training, *, follow: Callable[[Any, int], bool], miss: Callable[[Any], None]) -> None:
        self._training = training
        self._follow, self._miss = follow, miss
        self._num_steps = self._num_in_a_row = 0
        self._most = 1  # between two steps of the watched one
        self._last: weakref.ref[Any] | None = None
        self._strangers: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()

    def attach(self, guard: FaultGuard) -> list[TapHandle]:
        """Have torch call this after each step; return the hook, none where the watched optimizer is not torch's."""
        if not isinstance(self._training.optimizer, Optimizer):
            return []
        return [register_optimizer_step_post_hook(guard.wrap(self._stepped))]

    def training_ends(self) -> None:
        """Say what was missed at the end, if that is more than ever between two steps of the watched optimizer."""
        other = self._last() if self._last is not None else None
        if other is not None and self._most < self._num_steps < MISSED_STEPS:
            self._miss(other)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is self._training.optimizer:
            self._most = max(self._most, self._num_steps)
            self._num_steps = self._num_in_a_row = 0
            return
        watched = self._training.optimizer
        numbers = num_stepped(watched), num_stepped(optimizer)
        if self._strangers.get(optimizer) == numbers or self._training.is_stepping():
            return
        needed = {id(p) for group in watched.param_groups for p in group["params"] if p.requires_grad}
        missing = needed.difference(id(p) for group in optimizer.param_groups for p in group["params"])
        if len(missing) == len(needed):
            self._strangers[optimizer] = numbers
            return
        self._num_steps += 1
        is_same = self._last is not None and self._last() is optimizer
        self._num_in_a_row = self._num_in_a_row + 1 if is_same else 1
        self._last = weakref.ref(optimizer)
        if self._num_in_a_row == STEPS_IN_A_ROW and not missing and self._follow(optimizer, self._num_steps):
            self._num_steps = self._num_in_a_row = 0
        elif self._num_steps == MISSED_STEPS:
            self._miss(optimizer)


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
        watched = self._training.optimizer
        others = other_optimizers(self._training, [p.tensor for p in self._training.parameters])
        if any(held is watched for other in others for held in held_optimizers(other).values()):
            return  # the one around it, as a SAM, writes to them for a step of its own
        self._collector.tell(
            f"parameters were written to since the last step of the watched {type(watched).__name__} that was seen, "
            f"and nothing is collected of that: {'; '.join(self._found(others)) or _NOTHING_FOUND}"
        )

    def _found(self, optimizers: Iterable[Optimizer]) -> list[str]:
        """Return in words what may have written to the parameters, of what there is in this process."""
        others = sorted({type(other).__name__ for other in optimizers})
        hooked = any(has_own_hook(parameter.tensor) for parameter in self._training.parameters)
        known = (
            (
                f"another optimizer ({', '.join(others)}) has them, too: if that is stepped in the place of the "
                "watched one and holds all that is trained, it is watched after two steps; else close() this monitor "
                "and call set_monitor of a new one with it",
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
