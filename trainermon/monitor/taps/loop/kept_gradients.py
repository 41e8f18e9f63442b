"""Gradients that nothing has cleared between two steps: what a step's first backward finds in `.grad`."""

from __future__ import annotations

from torch import Tensor

from trainermon.core.catalogue import GRADIENT_KEPT
from trainermon.core.values import Kind
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.tensor_hooks import hook_leaf
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.loop.loop_taps import LoopTap
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.training import TapHandle, Training


class KeptGradients(LoopTap):
    """Looks whether `.grad` of one small parameter was cleared since the optimizer's step.

    torch counts the writes to a tensor. Where a backward finds the very tensor that the step has left, written to no
    more often, and what it adds is the only write until the next step, nothing has cleared it, unless by `.data`. From
    the next such step on what the first backward finds is recorded: a row of the parameter, `gradient_kept`. Where
    gradients are cleared no tensor is read. Cost: 1 µs for each backward.

    Args:
        training: Whose gradients; nothing is looked at where it does not tell writes (`counts_writes`).
        collector: Takes the rows.
        steps: Knows whether a replay runs.
    """

    looks_for = "gradients that nothing clears between steps"

    def __init__(self, training: Training, collector: Collector, steps: MicroSteps) -> None:
        self._training = training
        self._collector = collector
        self._steps = steps
        self._parameter = _smallest(training)
        self._handle: TapHandle | None = None
        self._known: tuple[int, int] | None = None  # id and writes of the gradient as it was left
        self._is_first = True  # no backward since the step
        self._is_kept = self._was_kept = False

    def attach(self, guard: FaultGuard) -> None:
        """Hook the parameter's gradient before it is added to `.grad`."""
        if self._parameter is not None and self._training.counts_writes:
            tensor = self._training.parameters[self._parameter].tensor
            self._handle = hook_leaf(tensor, guard.wrap(self._found))

    def detach(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._known, self._is_kept, self._was_kept = None, False, False

    def step_ended(self) -> None:
        """Note what the optimizer's step has left."""
        if self._handle is None or self._parameter is None:
            return
        gradient = self._training.parameters[self._parameter].tensor.grad
        self._known = None if gradient is None else (id(gradient), gradient._version)
        self._was_kept, self._is_first = self._is_kept and not self._is_first, True

    def _found(self, _added: Tensor) -> None:
        if self._steps.muted or self._parameter is None or self._parameter in self._training.unstepped:
            return
        held = self._training.parameters[self._parameter]
        gradient = held.tensor.grad
        if gradient is None:
            self._is_first = self._is_kept = False
            return
        is_as_left = self._known == (id(gradient), gradient._version)
        if self._is_first and self._was_kept and is_as_left:
            series = self._collector.table.id_of(held.key(Kind.STATE, GRADIENT_KEPT), held.placement)
            self._collector.take((series,), (gradient,))
        self._is_kept = is_as_left and (self._is_first or self._is_kept)
        self._is_first = False
        self._known = id(gradient), gradient._version + 1


def _smallest(training: Training) -> int | None:
    """Return which of the parameters that the optimizer steps is the smallest; None without any."""
    groups = getattr(training.optimizer, "param_groups", ())
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    sizes = {i: p.tensor.numel() for i, p in enumerate(training.parameters) if id(p.tensor) in stepped}
    return min((i for i, size in sizes.items() if size), key=sizes.__getitem__, default=None)
