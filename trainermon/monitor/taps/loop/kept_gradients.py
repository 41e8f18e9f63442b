"""Gradients that nothing has cleared between two steps, or that were cleared within one."""

from __future__ import annotations

import functools
import random
from collections import deque

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
_NUM_OTHERS, _NUM_STEPS = 3, 4
"""How many parameters are looked at beside the smallest one, and after how many steps others take their turn."""
_LARGEST = 2**20  # elements: what is found kept is read on every step


class KeptGradients(LoopTap):
    """Looks what every backward finds in `.grad` of a few parameters, before it adds to it.

    torch counts the writes to a tensor. The smallest parameter is always looked at, and three others in turn, so that a
    part of the model that is not cleared is found as well. There are two findings; where neither is made no tensor is
    read, at 2 µs for each backward and parameter that is looked at:

    * `gradient_kept`: a step's first backward finds the very tensor that the last step has left, written to no more
      often, and what backwards add are the only writes until the next step: nothing has cleared it, unless by `.data`.
      From the next such step on what the first backward finds is recorded, a row of the parameter.
    * `gradients_dropped`: a step's later backward finds nothing, so that what those before it had made is lost, and the
      optimizer uses fewer micro steps than the script has told. Their number is a row of the step; the smallest
      parameter shows it. It is none where the parameter was moved in between, as by SAM, where the step uses a gradient
      of another direction than the last backward has left, which the script has put together, and where gradients are
      cleared in place.

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
        smallest, others = _stepped(training) if training.counts_writes else (None, [])
        self._first = None if smallest is None else _Probe(smallest)
        self._waiting = deque(others)
        self._others: list[_Probe] = []
        self._num_steps = 0
        self._guard: FaultGuard | None = None

    def attach(self, guard: FaultGuard) -> None:
        """Hook the gradients before and after something is added to `.grad`."""
        self._guard = guard
        for probe in self._probes():
            self._hook(probe)

    def detach(self) -> None:
        """Remove the hooks."""
        for probe in self._probes():
            probe.forget()
        self._guard = None

    def at_entry(self, step: int) -> None:
        """Tell of micro steps whose gradients the optimizer does not use; call it before its step."""
        del step
        probe = self._first
        if probe is None or not probe.num_held < self._steps.expected <= probe.num_backwards:
            return
        gradient, last = self._training.parameters[probe.index].tensor.grad, probe.last
        if gradient is None or last is None or id(gradient) != (probe.known or (0, 0))[0] or gradient.is_sparse:
            return
        series = self._collector.table.id_of(SeriesKey(Kind.STEP, GRADIENTS_DROPPED))
        number = float(probe.num_backwards - probe.num_held)
        self._collector.take((series,), (_is_a_multiple(gradient, last) * number,))

    def step_ended(self) -> None:
        """Note what the optimizer's step has left, and look at other parameters where their turn comes."""
        if self._guard is None:
            return
        for probe in self._probes():
            probe.step_ended(self._training.parameters[probe.index].tensor.grad)
        if self._num_steps % _NUM_STEPS == 0:
            self._take_turns()
        self._num_steps += 1

    def _probes(self) -> list[_Probe]:
        return [] if self._first is None else [self._first, *self._others]

    def _take_turns(self) -> None:
        """Go on with the next parameters instead of those whose gradients are cleared."""
        for probe in [probe for probe in self._others if not probe.was_kept]:
            probe.forget()
            self._others.remove(probe)
            self._waiting.append(probe.index)
        while self._waiting and len(self._others) < _NUM_OTHERS:
            self._others.append(_Probe(self._waiting.popleft()))
            self._hook(self._others[-1])

    def _hook(self, probe: _Probe) -> None:
        tensor = self._training.parameters[probe.index].tensor
        if self._guard is None or not tensor.requires_grad:  # the script has frozen it since
            return
        probe.handles = [
            hook_leaf(tensor, self._guard.wrap(functools.partial(self._found, probe))),
            hook_accumulated(tensor, self._guard.wrap(functools.partial(self._added, probe))),
        ]

    def _found(self, probe: _Probe, _added: Tensor) -> None:
        if self._steps.muted or probe.index in self._training.unstepped:
            return
        held = self._training.parameters[probe.index]
        gradient = held.tensor.grad
        probe.found(gradient)
        if gradient is not None and probe.finds_as_left and probe.was_kept and not probe.num_backwards:
            series = self._collector.table.id_of(held.key(Kind.STATE, GRADIENT_KEPT), held.placement)
            self._collector.take((series,), (gradient,))

    def _added(self, probe: _Probe, parameter: Tensor) -> None:
        if self._steps.muted or probe.index in self._training.unstepped or parameter.grad is None:
            return
        probe.added(parameter, parameter.grad)
        if probe is self._first:
            probe.last = parameter.grad.detach().clone() if probe.num_held < probe.num_backwards else None


class _Probe:
    """What was seen of the gradient of one parameter, of which `index` is the position.

    Attributes:
        known: Identity and number of writes of the gradient, as it was left.
        num_backwards: How many there were since the step.
        num_held: Those whose gradients `.grad` holds.
        finds_as_left: The backward that runs found the very gradient that was left.
        was_kept: The step before the last one had left it, and nothing had cleared it until the last one.
        last: The gradient as the last backward has left it, where some were dropped.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.handles: list[TapHandle] = []
        self.forget()

    def forget(self) -> None:
        """Remove the hooks, and release what it holds."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.known: tuple[int, int] | None = None
        self.last: Tensor | None = None
        self.num_backwards = self.num_held = self._num_moves = 0
        self.finds_as_left = self.was_kept = self._finds_nothing = self._is_kept = False

    def found(self, gradient: Tensor | None) -> None:
        """Look at what a backward finds."""
        self._finds_nothing = gradient is None
        self.finds_as_left = gradient is not None and self.known == (id(gradient), gradient._version)

    def added(self, parameter: Tensor, gradient: Tensor) -> None:
        """Look at what it has left."""
        if self._num_moves != parameter._version:
            self.num_backwards = 0 if self._finds_nothing else self.num_backwards
            self._num_moves = parameter._version
        self._is_kept = self.finds_as_left and (self._is_kept or not self.num_backwards)
        self.num_held = 1 if self._finds_nothing else self.num_held + 1
        self.num_backwards += 1
        self.known = id(gradient), gradient._version

    def step_ended(self, gradient: Tensor | None) -> None:
        """Look at what the optimizer's step has left."""
        left = None if gradient is None else (id(gradient), gradient._version)
        is_the_same = left is not None and self.known is not None and left[0] == self.known[0]
        self.was_kept = self._is_kept and self.num_backwards > 0 and is_the_same
        self.known, self.last, self.num_backwards, self.num_held = left, None, 0, 0


def _stepped(training: Training) -> tuple[int | None, list[int]]:
    """Return which of the parameters that the optimizer steps is the smallest, and others from all over the model."""
    groups = getattr(training.optimizer, "param_groups", ())
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    sizes = {i: p.tensor.numel() for i, p in enumerate(training.parameters) if id(p.tensor) in stepped}
    smallest = min((i for i, size in sizes.items() if size), key=sizes.__getitem__, default=None)
    others = [i for i, size in sizes.items() if i != smallest and 0 < size <= _LARGEST]
    random.Random(0).shuffle(others)  # noqa: S311 - a part of the model is met soon
    return smallest, others


@torch.no_grad()
def _is_a_multiple(gradient: Tensor, other: Tensor) -> Tensor:
    """Return on their device 1 where they differ by a factor alone, as by clipping or a loss scale, else 0."""
    one, two = (torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in (gradient, other))
    one, two = one.double().flatten(), two.double().flatten()
    is_one: Tensor = one.dot(two) >= (1 - _SAME_DIRECTION) * one.norm() * two.norm()
    return is_one.double()
