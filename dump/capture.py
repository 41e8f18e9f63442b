"""Captures what every module takes and returns, and the gradients of both, while the model runs as it would anyway.

Decides which calls are recorded and under which key. Nothing is added to the autograd graph, nothing is replaced, and
whatever goes wrong in here is counted in the dump and costs one entry.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainermon.dump.encode import Leaf, encode, encode_output, tensor_form
from trainermon.dump.gradients import Backward, GradientHooks
from trainermon.dump.records import BACKWARD, EXTRA, FORWARD
from trainermon.dump.stacks import call_stack
from trainermon.dump.writer import DumpWriter
from trainermon.monitor.taps.guard import Contained
from trainermon.monitor.taps.names import chosen, plain_name

ROOT_NAME = "root"


@dataclasses.dataclass(slots=True, eq=False)
class _Watched:
    """A module with the first part of its keys (`Module.<name>.<Class>`)."""

    module: nn.Module
    stem: str
    is_root: bool
    calls: list[_Call] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """One forward call; recomputations find the call that they repeat by the order of its children."""

    watched: _Watched
    number: int
    parent: _Call | None
    value: dict[str, Any]
    stack: tuple[str, ...]
    backward: Backward
    has_gradients: bool
    children: list[_Call] = dataclasses.field(default_factory=list)
    next_child: int = 0
    recomputed: bool = False

    def key(self, direction: str) -> str:
        return f"{self.watched.stem}.{direction}.{self.number}"


class ModuleCapture:
    """Records every call of the modules of `root` into `writer` between `attach` and `detach`.

    `root` is the unwrapped model (not DDP). `scope` are names or patterns of modules (none: all); the root itself is
    always recorded, for the ends of the chain. Recomputed forwards (activation checkpointing) are not counted again,
    but give the gradients where only they can. `micro_step` is written into the entries while it is set.
    """

    def __init__(self, root: nn.Module, writer: DumpWriter, *, scope: Sequence[str] = ()) -> None:
        self.micro_step: int | None = None
        self.writer = writer
        self._border = _Border(writer)
        self._handles: list[RemovableHandle] = []
        self._stack: list[tuple[nn.Module, _Call | None]] = []
        self._backwards: list[Backward] = []
        self._gradients = GradientHooks(writer, self._contain)
        self._watched = [
            _Watched(module, _stem(name, module), is_root=module is root)
            for name, module in root.named_modules()
            if module is root or chosen(plain_name(name), scope)
        ]

    def attach(self) -> None:
        """Put the hooks in place; they are behind all hooks that the script has registered so far."""
        for watched in self._watched:
            before = self._contain(self._before, watched)
            behind = self._contain(self._behind)
            self._handles.append(watched.module.register_forward_pre_hook(before, with_kwargs=True))
            # non-reentrant checkpointing leaves a recomputed forward by an exception
            self._handles.append(watched.module.register_forward_hook(behind, always_call=True))
        owners: dict[nn.Parameter, list[tuple[str, str]]] = {}
        for watched in self._watched:
            for name, parameter in watched.module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    owners.setdefault(parameter, []).append((watched.stem, name))
        self._gradients.watch_parameters(owners)

    def detach(self) -> None:
        """Take every hook away and write the entries whose gradients did not all arrive."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for backward in self._backwards:
            self._contain(backward.write)()
        self._contain(self._gradients.close)()
        self._border.tripped = True
        self._stack.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside."""
        before, self._border.tripped = self._border.tripped, True
        try:
            yield
        finally:
            self._border.tripped = before

    def _before(self, watched: _Watched, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recomputing = torch._C._current_graph_task_id() != -1
        self._stack.append((module, None))
        leaves: list[Leaf] = []
        inputs = [encode(value, f"input.{index}", leaves) for index, value in enumerate(args)]
        named = {name: encode(value, f"kwargs.{name}", leaves) for name, value in kwargs.items()}
        if recomputing:
            call = self._recomputed(watched)
        else:
            call = self._new_call(watched, {"input_args": inputs, "input_kwargs": named})
            self._record(call.key(FORWARD), leaves)
        self._stack[-1] = (module, call)
        if call is not None and not call.has_gradients and torch.is_grad_enabled():
            self._gradients.watch_inputs(call.backward, leaves)

    def _behind(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        call = self._leave(module)
        if call is None or (output is None and sys.exc_info()[0] is not None):
            return
        leaves: list[Leaf] = []
        outputs = encode_output(output, leaves)
        if torch._C._current_graph_task_id() == -1:
            self._finish(call, outputs, leaves)
        if not call.has_gradients and torch.is_grad_enabled():
            call.has_gradients = True
            self._gradients.watch_outputs(call.backward, leaves)

    def _new_call(self, watched: _Watched, value: dict[str, Any]) -> _Call:
        parent = next((call for _, call in reversed(self._stack) if call is not None), None)
        call = _Call(
            watched=watched,
            number=len(watched.calls),
            parent=parent,
            value=value,
            stack=() if watched.is_root else call_stack(),
            backward=Backward("", self._sink(watched, parent)),
            has_gradients=False,
        )
        call.backward.key = call.key(BACKWARD)
        call.backward.extra = self._extra()
        watched.calls.append(call)
        self._backwards.append(call.backward)
        if parent is not None:
            parent.children.append(call)
        return call

    def _recomputed(self, watched: _Watched) -> _Call | None:
        """Find the call that is being repeated: within its parent in order, at the top the latest one first."""
        parent = next((call for _, call in reversed(self._stack) if call is not None), None)
        if parent is None:
            repeated = next((call for call in reversed(watched.calls) if not call.recomputed), None)
        else:
            rest = enumerate(parent.children[parent.next_child :], parent.next_child + 1)
            position, repeated = next(
                ((index, call) for index, call in rest if call.watched is watched), (parent.next_child, None)
            )
            parent.next_child = position
        if repeated is not None:
            repeated.recomputed = True
        return repeated

    def _finish(self, call: _Call, outputs: Any, leaves: list[Leaf]) -> None:
        parameters = {}
        for name, parameter in call.watched.module.named_parameters(recurse=False):
            parameters[name] = tensor_form(parameter)
            leaves = [*leaves, Leaf(f"parameters.{name}", parameter, parameters[name])]
        key = call.key(FORWARD)
        self._record(key, leaves)
        value = {**call.value, "output": outputs, "parameters": parameters}
        value[EXTRA] = {"order": self.writer.next_order(), **self._extra()}
        call.value = {}
        if call.watched.is_root:
            self.writer.add_root(key, value)
        else:
            self.writer.add(key, value, parent=_parent_key(call.parent, FORWARD), stack=call.stack)

    def _sink(self, watched: _Watched, parent: _Call | None) -> Callable[[str, dict[str, Any]], None]:
        if watched.is_root:
            return self.writer.add_root
        return functools.partial(self.writer.add, parent=_parent_key(parent, BACKWARD))

    def _leave(self, module: nn.Module) -> _Call | None:
        """Pop the stack down to the call of `module`; what lies above was left by an exception."""
        for position in range(len(self._stack) - 1, -1, -1):
            if self._stack[position][0] is module:
                call = self._stack[position][1]
                del self._stack[position:]
                return call
        return None

    def _extra(self) -> dict[str, Any]:
        return {} if self.micro_step is None else {"micro_step": self.micro_step}

    def _record(self, key: str, leaves: Sequence[Leaf]) -> None:
        with torch.no_grad():
            self.writer.record(key, leaves)

    def _contain(self, function: Callable[..., None], *bound: Any) -> Contained:
        return Contained(self._border, function, bound)


class _Border:
    """Where a fault costs one entry; `tripped` while nothing is to be recorded."""

    def __init__(self, writer: DumpWriter) -> None:
        self.tripped = False
        self._writer = writer

    def trip(self, error: BaseException) -> None:
        self._writer.count_error(error)


def _stem(name: str, module: nn.Module) -> str:
    return f"Module.{plain_name(name) or ROOT_NAME}.{type(module).__name__}"


def _parent_key(parent: _Call | None, direction: str) -> str | None:
    """Return the key of the nearest enclosing call that the files know: not the root."""
    return None if parent is None or parent.watched.is_root else parent.key(direction)
