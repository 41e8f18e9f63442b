"""Gradients that nothing has cleared between two steps, or that were cleared within one."""

from __future__ import annotations

import torch
from torch import Tensor

from trainermon.core.catalogue import GRADIENT_KEPT, GRADIENTS_DROPPED
from trainermon.core.values import Kind, SeriesKey
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.tensor_hooks import hook_accumulated, hook_leaf
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.loop.loop_taps import LoopTap
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.training import TapHandle, Training

_SAME_DIRECTION = 1e-5  # one less the cosine by which clipping turns a gradient in bfloat16, and some


class KeptGradients(LoopTap):
    """Looks what every backward finds in `.grad` of one small parameter, before it adds to it.

    torch counts the writes to a tensor. There are two findings; where neither is made no tensor is read, at 2 µs for
    each backward:

    * `gradient_kept`: a step's first backward finds the very tensor that the last step has left, written to no more
      often, and what backwards add are the only writes until the next step: nothing has cleared it, unless by `.data`.
      From the next such step on what the first backward finds is recorded, a row of the parameter.
    * `gradients_dropped`: a step's later backward finds nothing, so that what those before it had made is lost, and the
      optimizer uses fewer micro steps than the script has told. Their number is a row of the step. It is none where
      the parameter was moved in between, as by SAM, where the step uses a gradient of another direction than the last
      backward has left, which the script has put together, and where gradients are cleared in place.

    `torch.autograd.grad` adds to nothing, and does not count.

    Args:
        training: Whose gradients; nothing is looked at where it does not tell writes (`counts_writes`).
        collector: Takes the rows.
        steps: Knows whether a replay runs, and how many backwards a step has.
    """

    looks_for = "gradients that nothing clears between steps, or that are cleared within one"

    def __init__(self, training: Training, collector: Collector, steps: MicroSteps) -> None:
        self._training = training
        self._collector = collector
        self._steps = steps
        self._parameter = _smallest(training)
        self._handles: list[TapHandle] = []
        self._known: tuple[int, int] | None = None  # id and writes of the gradient as it was left
        self._num_backwards = self._num_held = 0  # since the step; those whose gradients `.grad` holds
        self._finds_nothing = self._finds_as_left = False
        self._is_kept = self._was_kept = False
        self._num_moves = 0  # writes to the parameter, at its last backward
        self._last: Tensor | None = None  # the gradient as the last backward has left it, where some were dropped

    def attach(self, guard: FaultGuard) -> None:
        """Hook the parameter's gradient before and after it is added to `.grad`."""
        if self._parameter is not None and self._training.counts_writes:
            tensor = self._training.parameters[self._parameter].tensor
            self._handles = [
                hook_leaf(tensor, guard.wrap(self._found)),
                hook_accumulated(tensor, guard.wrap(self._added)),
            ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._known, self._last, self._is_kept, self._was_kept = None, None, False, False
        self._num_backwards = self._num_held = 0

    def at_entry(self, step: int) -> None:
        """Tell of micro steps whose gradients the optimizer does not use; call it before its step."""
        del step
        if not self._num_held < self._steps.expected <= self._num_backwards or self._parameter is None:
            return
        gradient, last = self._training.parameters[self._parameter].tensor.grad, self._last
        if gradient is None or last is None or id(gradient) != (self._known or (0, 0))[0] or gradient.is_sparse:
            return
        series = self._collector.table.id_of(SeriesKey(Kind.STEP, GRADIENTS_DROPPED))
        number = float(self._num_backwards - self._num_held)
        self._collector.take((series,), (_is_a_multiple(gradient, last) * number,))

    def step_ended(self) -> None:
        """Note what the optimizer's step has left."""
        if not self._handles or self._parameter is None:
            return
        gradient = self._training.parameters[self._parameter].tensor.grad
        left = None if gradient is None else (id(gradient), gradient._version)
        is_the_same = left is not None and self._known is not None and left[0] == self._known[0]
        self._was_kept = self._is_kept and self._num_backwards > 0 and is_the_same
        self._known, self._last, self._num_backwards, self._num_held = left, None, 0, 0

    def _found(self, _added: Tensor) -> None:
        if self._steps.muted or self._parameter is None or self._parameter in self._training.unstepped:
            return
        held = self._training.parameters[self._parameter]
        gradient = held.tensor.grad
        self._finds_nothing = gradient is None
        self._finds_as_left = gradient is not None and self._known == (id(gradient), gradient._version)
        if gradient is not None and self._finds_as_left and self._was_kept and not self._num_backwards:
            series = self._collector.table.id_of(held.key(Kind.STATE, GRADIENT_KEPT), held.placement)
            self._collector.take((series,), (gradient,))

    def _added(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if self._steps.muted or self._parameter in self._training.unstepped or gradient is None:
            return
        if self._num_moves != parameter._version:
            self._num_backwards = 0 if self._finds_nothing else self._num_backwards
            self._num_moves = parameter._version
        self._is_kept = self._finds_as_left and (self._is_kept or not self._num_backwards)
        self._num_held = 1 if self._finds_nothing else self._num_held + 1
        self._num_backwards += 1
        self._known = id(gradient), gradient._version
        self._last = gradient.detach().clone() if self._num_held < self._num_backwards else None


def _smallest(training: Training) -> int | None:
    """Return which of the parameters that the optimizer steps is the smallest; None without any."""
    groups = getattr(training.optimizer, "param_groups", ())
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    sizes = {i: p.tensor.numel() for i, p in enumerate(training.parameters) if id(p.tensor) in stepped}
    return min((i for i, size in sizes.items() if size), key=sizes.__getitem__, default=None)


@torch.no_grad()
def _is_a_multiple(gradient: Tensor, other: Tensor) -> Tensor:
    """Return on their device 1 where they differ by a factor alone, as by clipping or a loss scale, else 0."""
    one, two = (torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in (gradient, other))
    one, two = one.double().flatten(), two.double().flatten()
    is_one: Tensor = one.dot(two) >= (1 - _SAME_DIRECTION) * one.norm() * two.norm()
    return is_one.double()
