"""Parameters that had a gradient on every step and have none any more, although their modules compute as before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainermon.core.catalogue import FROZEN_LATER, GRADIENT_LOST
from trainermon.core.values import Kind
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.gradients import GradientTaps
from trainermon.monitor.taps.loop.loop_taps import LoopTap
from trainermon.monitor.taps.micro_steps import MicroSteps
from trainermon.monitor.taps.training import TapHandle, Training

STEADY, AFTER = 20, 10
"""Steps in a row with a gradient, and then without one, before anything is looked at."""


class LostGradients(LoopTap):
    """Finds parameters whose gradient stays away while the rest of the training goes on.

    After `AFTER` steps without one the modules that hold the parameter are hooked for one step. Where one of them runs
    in training, and the parameter is in a group of the optimizer and still requires a gradient, its graph is cut: from
    then on a row tells for how many steps, `gradient_lost`. Of one that requires no gradient any more there is one row,
    `frozen_later`: mostly that is meant, but nothing else that is recorded shows it. A module that does not run is left
    out on purpose, as a layer that is dropped, an expert without tokens, the head of another task or language. Nothing
    is said of what came back before, nor of what went on the very step on which another gradient came: they take turns.

    No tensor is read. It costs nothing while every parameter has a gradient, and some microseconds a step while a
    parameter has none.

    Args:
        training: Whose gradients.
        collector: Takes the rows.
        steps: Knows whether a replay runs.
        gradients: Know which parameters have none.
    """

    looks_for = "gradients that stay away"

    def __init__(self, training: Training, collector: Collector, steps: MicroSteps, gradients: GradientTaps) -> None:
        self._training, self._collector, self._steps, self._gradients = training, collector, steps, gradients
        self._num_steps = 0
        self._missing: frozenset[int] = frozenset()
        self._came: dict[int, int] = {}  # the step from which on it has a gradient again
        self._went: dict[int, int] = {}  # the first step without one
        self._by_turns: set[int] = set()
        self._suspects: frozenset[int] = frozenset()  # whose modules are hooked
        self._cut: set[int] = set()
        self._handles: list[TapHandle] = []

    def attach(self, guard: FaultGuard) -> None:
        """Hook the modules that hold those parameters of which it is to be found out, if there are any."""
        self._guard = guard
        self._hook_suspects()

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def at_entry(self, step: int) -> None:
        """Look which parameters have no gradient in this step; nothing where none has one."""
        del step
        missing = self._gradients.missing
        if missing is None:
            return
        self._num_steps += 1
        if self._suspects:
            self.detach()
            self._suspects = frozenset()
        if missing != self._missing:
            self._changed(missing)
        for i in sorted(self._cut):
            if self._is_trained(i):
                self._tell(i, GRADIENT_LOST)
        due = [i for i, since in self._went.items() if self._num_steps - since == AFTER - 1]
        if due:
            for i in due:
                if not self._training.parameters[i].tensor.requires_grad:
                    self._tell(i, FROZEN_LATER)
            self._suspects = frozenset(filter(self._is_trained, due))
            self._hook_suspects()

    def _tell(self, index: int, slot: str) -> None:
        held = self._training.parameters[index]
        series = self._collector.table.id_of(held.key(Kind.STATE, slot), held.placement)
        self._collector.put(series, float(self._num_steps - self._went[index] + 1))

    def _hook_suspects(self) -> None:
        numbers = {id(self._training.parameters[i].tensor): i for i in self._suspects}
        modules = (*self._training.roots, *(watched.module for watched in self._training.modules)) if numbers else ()
        for module in modules:
            own = frozenset(numbers[id(p)] for p in module._parameters.values() if id(p) in numbers)
            if own:
                self._handles.append(module.register_forward_pre_hook(self._guard.wrap(self._ran, own)))

    def _changed(self, missing: frozenset[int]) -> None:
        went, came = missing - self._missing, self._missing - missing
        self._missing = missing
        self._by_turns.update(self._went.keys() & came)
        for i in came:
            self._went.pop(i, None)
            self._came[i] = self._num_steps
        self._cut -= came
        if not came:
            steady = (i for i in went - self._by_turns if self._num_steps - self._came.get(i, 1) >= STEADY)
            self._went.update(dict.fromkeys(steady, self._num_steps))

    def _is_trained(self, index: int) -> bool:
        tensor = self._training.parameters[index].tensor
        if not tensor.requires_grad:
            return False
        groups = getattr(self._training.optimizer, "param_groups", ())
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        return id(tensor) in stepped or not any(id(p.tensor) in stepped for p in self._training.parameters)

    def _ran(self, own: frozenset[int], module: nn.Module, _args: Any) -> None:
        if not self._steps.muted and (module.training or torch.is_grad_enabled()):
            self._cut |= own
