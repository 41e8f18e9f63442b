"""The hooks that are always in place: around the optimizer's step, and where a checkpoint begins."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, ParamSpec

import torch
from torch import nn
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.compiler import is_dynamo_compiling

from trainermon.hooks.guard import ContainedCall, FaultGuard, never_compiled
from trainermon.monitor.session.phases import QuietSteps
from trainermon.monitor.session.unseen_changes import OtherSteps
from trainermon.monitor.taps.training import StepOutcome, TapHandle, Training

PROFILER_RANGE = "trainermon.step"
"""Name of the monitor's own work at a step, in traces of torch.profiler."""

_P = ParamSpec("_P")


class StepHooks:
    """Hooks the outer optimizer's step, at its begin and end, and the reading of the model's state (checkpoints)."""

    def __init__(self, training: Training, guard: FaultGuard) -> None:
        self._training = training
        self._guard = guard
        self._handles: list[TapHandle] = []
        self._of_step: list[TapHandle] = []
        self._watch: Callable[[], list[TapHandle]] = list

    def attach(
        self,
        *,
        entry: Callable[[], None],
        exit: Callable[[StepOutcome], None],  # the counterpart of entry
        quiet: QuietSteps,
        others: OtherSteps,
        state_is_read: Callable[..., None],
    ) -> None:
        """Have `entry()` called when the optimizer's step begins, `exit(outcome)` when it ends.

        A short step that is `quiet` is counted instead. `others` looks at other optimizers' steps. `state_is_read` is
        called when the model's `state_dict` is read. A profile that the user takes shows the first two as ranges
        `trainermon.step`.
        """
        self._watch = lambda: self._training.watch_step(
            self._guard, entry=_shown(entry), exit=_shown(exit), hooks=_QuietHooks(quiet)
        )
        self._of_step = self._watch()
        self._handles = [*others.attach(self._guard), *self._watch_checkpoints(state_is_read)]

    def follow(self) -> None:
        """Hook the steps of the optimizer that the training has now, and no more those of the one before."""
        self._remove(self._of_step)
        self._of_step = self._watch()

    def detach(self) -> None:
        """Remove the hooks."""
        self._remove(self._of_step)
        self._remove(self._handles)

    def _remove(self, handles: list[TapHandle]) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    def _watch_checkpoints(self, state_is_read: Callable[..., None]) -> list[TapHandle]:
        """Have every checkpoint noticed: hook the reading of one module's state in each stage; return the hooks."""
        hook = self._guard.wrap(state_is_read)
        owners = map(_first_owner, self._training.roots)
        return [
            owner.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
            for owner in owners
            if not isinstance(owner, torch.jit.ScriptModule)  # which refuses hooks of this kind
        ]


class _QuietHooks:
    """Makes hooks of the optimizer's step that take one function of Python each on a short quiet step."""

    def __init__(self, quiet: QuietSteps) -> None:
        self._quiet = quiet

    def entry(self, guard: FaultGuard, function: Callable[..., Any]) -> ContainedCall:
        """Return the hook at its begin."""
        return _QuietEntry(guard, function, self._quiet)

    def exit(self, guard: FaultGuard, function: Callable[..., Any]) -> ContainedCall:
        """Return the hook at its end."""
        return _QuietExit(guard, function, self._quiet)


class _QuietEntry(ContainedCall):
    __slots__ = ("_quiet",)

    def __init__(self, guard: FaultGuard, function: Callable[..., Any], quiet: QuietSteps) -> None:
        super().__init__(guard, function)
        self._quiet = quiet

    @never_compiled
    def __call__(self, *args: Any) -> Any:
        return None if self._quiet.are_short else ContainedCall.__call__(self, *args)


class _QuietExit(_QuietEntry):
    __slots__ = ()

    @never_compiled
    def __call__(self, *args: Any) -> Any:
        quiet = self._quiet
        if quiet.are_short:
            if is_dynamo_compiling():
                return None
            now_s, coming = perf_counter(), quiet.step.number + 1
            if now_s < quiet.look_at_s and coming < quiet.until:
                quiet.step.number, quiet.before_s, quiet.began_s = coming, quiet.began_s, now_s
                return None
        return ContainedCall.__call__(self, *args)


def _shown(call: Callable[_P, None]) -> Callable[_P, None]:
    """Return `call`, as a range in what torch.profiler records while it does. Cost without one: 0.2 µs."""

    def shown(*args: _P.args, **named: _P.kwargs) -> None:
        if not _profiler_enabled():
            call(*args, **named)
            return
        with torch.profiler.record_function(PROFILER_RANGE):
            call(*args, **named)

    return shown


def _first_owner(root: nn.Module) -> nn.Module:
    """Return the first module that holds a parameter itself: it is asked for its state with each one above it."""
    return next((module for module in root.modules() if next(module.parameters(recurse=False), None) is not None), root)
