"""Inputs and outputs of modules, and the gradients of both, without changing a bit of the run.

Gradients are seen by tensor hooks on the very tensors that flow: a full backward hook or an alias would change the
order in which gradients are added, that is, the run. An input's gradient is therefore that of the tensor, summed over
all its consumers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.guard import Guard
from trainermon.monitor.taps.micro_steps import MicroSteps, in_backward
from trainermon.monitor.taps.tree import tensors_of
from trainermon.monitor.values import Kind, SeriesKey

# A module's output is its parent's output and the next module's input: a short memory is enough not to read it again.
MEMORY = 4


class Module(NamedTuple):
    """A module to watch: its plain name, itself, and its virtual pipeline stage."""

    name: str
    module: nn.Module
    stage: int = 0


class _Seen(NamedTuple):
    tensor: Tensor
    version: int
    row: int
    gradient_series: list[int]


class ModuleTaps:
    """Takes what goes into and comes out of `modules` in training forwards, and the gradients of both.

    Calls of one module within a micro step are told apart by number. Evaluation and recomputation are not counted.
    """

    def __init__(self, modules: Sequence[Module], collector: Collector, steps: MicroSteps, guard: Guard) -> None:
        self._modules = modules
        self._collector = collector
        self._steps = steps
        self._guard = guard
        self._handles: list[RemovableHandle] = []
        self._calls: dict[tuple[int, bool], int] = {}
        self._seen: list[_Seen] = []
        self._seen_gradients: list[tuple[Tensor, int, int]] = []
        self._forward = self._backward = True
        self._several_micro_steps = False

    def attach(self, *, forward: bool, backward: bool, micro_steps: int) -> None:
        """Put a hook before and one behind each module; `forward` and `backward` say what is taken."""
        self._forward, self._backward, self._several_micro_steps = forward, backward, micro_steps > 1
        for index, watched in enumerate(self._modules):
            before = self._guard.wrap(functools.partial(self._before, index))
            behind = self._guard.wrap(functools.partial(self._behind, index))
            self._handles.append(watched.module.register_forward_pre_hook(before, with_kwargs=True))
            # non-reentrant checkpointing leaves a recomputed forward by an exception
            self._handles.append(watched.module.register_forward_hook(behind, always_call=True))

    def detach(self) -> None:
        """Take every hook away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.forget()

    def release(self) -> None:
        """Release the tensors that were seen last."""
        self._seen.clear()
        self._seen_gradients.clear()

    def forget(self) -> None:
        """Release the tensors that were seen last, and start counting calls from zero: a micro step has ended."""
        self.release()
        self._calls.clear()

    def _before(self, index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._watching():
            return
        recomputing = in_backward()
        call = self._calls.get((index, recomputing), -1) + 1
        self._calls[index, recomputing] = call
        self._look(index, call, "input", args, recomputing=recomputing)
        if kwargs:
            self._look(index, call, "input", kwargs, recomputing=recomputing)

    def _behind(self, index: int, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if not self._watching() or output is None:
            return
        recomputing = in_backward()
        self._look(index, self._calls.get((index, recomputing), 0), "output", output, recomputing=recomputing)

    def _watching(self) -> bool:
        return not self._collector.muted and (self._steps.counting or in_backward())

    def _look(self, index: int, call: int, side: str, value: Any, *, recomputing: bool) -> None:
        backward = self._backward and torch.is_grad_enabled()
        forward = self._forward and not recomputing
        for path, tensor in tensors_of(value):
            slot = f"{side}{path or '.0'}"
            seen = self._remember(tensor)
            if forward:
                series = self._series(Kind.ACTV, index, slot, call)
                if seen.row >= 0:
                    self._collector.share(series, seen.row)
                else:
                    self._seen[-1] = seen = seen._replace(row=self._collector.take((series,), (tensor,)))
            if backward and tensor.requires_grad:
                if not seen.gradient_series:
                    hook = functools.partial(self._gradient, seen.gradient_series)
                    tensor.register_hook(self._guard.wrap(hook))  # type: ignore[no-untyped-call]
                seen.gradient_series.append(self._series(Kind.ACTV_GRAD, index, slot, call))

    def _remember(self, tensor: Tensor) -> _Seen:
        for position, seen in enumerate(self._seen):
            if seen.tensor is tensor and seen.version == tensor._version:
                self._seen.append(self._seen.pop(position))
                return seen
        fresh = _Seen(tensor, tensor._version, -1, [])
        self._seen = [*self._seen[-MEMORY + 1 :], fresh]
        return fresh

    def _gradient(self, series: list[int], gradient: Tensor) -> None:
        if self._collector.muted:
            return
        row = next(
            (row for seen, version, row in self._seen_gradients if seen is gradient and version == gradient._version),
            -1,
        )
        if row < 0:
            row = self._collector.take(series[:1], (gradient,))
            self._seen_gradients = [*self._seen_gradients[-MEMORY + 1 :], (gradient, gradient._version, row)]
        for number in series:
            self._collector.share(number, row)

    def _series(self, kind: Kind, index: int, slot: str, call: int) -> int:
        watched = self._modules[index]
        micro_step = self._steps.forward if self._several_micro_steps else None
        key = SeriesKey(kind, watched.name, slot, call, micro_step, watched.stage)
        return self._collector.table.id_of(key)
