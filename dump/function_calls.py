"""Captures what every call of a torch function takes and returns, and the gradients of both.

A function mode sees the calls; nothing of torch is replaced for that. Collectives and functions that the user names
are no torch functions in that sense: those are followed by a patch that is taken back.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from trainermon.dump.capture import ModuleCapture
from trainermon.dump.encode import Leaf, encode, encode_output
from trainermon.dump.function_modes import put_in, take_out
from trainermon.dump.function_names import FunctionName, name_of, unreplaced
from trainermon.dump.gradients import Backward, GradientHooks
from trainermon.dump.records import BACKWARD, EXTRA, FORWARD
from trainermon.dump.stacks import call_stack
from trainermon.dump.writer import DumpWriter
from trainermon.monitor.taps.guard import Contained
from trainermon.monitor.taps.patch import CallPatch

DISTRIBUTED = "Distributed"
# isend and irecv are left alone: P2POp refuses a function that was replaced.
COLLECTIVES = [
    "send",
    "recv",
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all_single",
    "all_to_all",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "batch_isend_irecv",
]


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """One call of a function: its key without direction, what it took, and where its gradients go."""

    stem: str
    value: dict[str, Any]
    parent: str | None
    stack: tuple[str, ...]
    backward: Backward | None
    operands: tuple[Any, ...] = ()


class FunctionCapture(TorchFunctionMode):
    """Records calls of torch functions by the thread that entered it, until it is left.

    Only the outermost call is recorded, and none inside a backward, so that recomputation (activation checkpointing) is
    not counted. In-place functions are recorded before and after. With `modules` the parent of a call is the module
    that runs. Gradients are those of the tensors, summed over all their consumers.

    Args:
        writer: Where entries go.
        modules: The capture of modules in the same dump, if there is one.
        namespaces: Of custom operators (`torch.ops.<namespace>`) that are recorded; none: all.
    """

    def __init__(
        self, writer: DumpWriter, modules: ModuleCapture | None = None, namespaces: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.writer = writer
        self.tripped = False
        self._modules = modules
        self._namespaces = frozenset(namespaces)
        self._calls: Counter[str] = Counter()
        self._backwards: list[Backward] = []
        self._gradients = GradientHooks(writer, self._contain)
        self._begins = self._contain(self._begin)
        self._ends = self._contain(self._end)
        self._is_on = False
        self._pending: dict[int, tuple[Any, _Call]] = {}
        self._patches = list(self._collectives()) if dist.is_available() and dist.is_initialized() else []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` once, with what it was called with, and return what it returns."""
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        func = unreplaced(func, caller)
        call = self._begins(func, args, kwargs, caller)
        result = func(*args, **kwargs)
        if call is not None:
            self._ends(call, result)
        return result

    def attach(self) -> None:
        """Begin to record."""
        for patch in self._patches:
            patch.put()
        self._is_on = True
        put_in(self)

    def detach(self) -> None:
        """Record nothing any more, and write the entries whose gradients did not all arrive."""
        if self._is_on:
            self._is_on = False
            take_out(self)
        for patch in self._patches:
            patch.remove()
        for _, call in self._pending.values():
            self._contain(self._finish)(call, None)
        self._pending.clear()
        for backward in self._backwards:
            self._contain(backward.write)()
        self._contain(self._gradients.close)()
        self._backwards.clear()
        self.tripped = True

    def go_on_from(self, earlier: FunctionCapture) -> None:
        """Number calls on from where `earlier` ended, which wrote into the same dump."""
        self._calls = earlier._calls

    def trip(self, error: BaseException) -> None:
        """Count what was lost."""
        self.writer.count_error(error)

    def follow(self, owner: Any, name: str, prefix: str) -> None:
        """Record the calls of the function `name` of `owner` too, as `<prefix>.<name>`; before `attach`."""
        self._patches.append(self._patch(owner, name, prefix))

    def _patch(self, owner: Any, name: str, prefix: str) -> CallPatch:
        begins = self._contain(self._enter, FunctionName(prefix, name))
        return CallPatch(owner, name, begins=begins, ends=self._contain(self._leave))

    def _collectives(self) -> Iterator[CallPatch]:
        for name in COLLECTIVES:
            if name in vars(dist):
                yield self._patch(dist, name, DISTRIBUTED)
        for work in subclasses(dist.Work):
            if "wait" in vars(work):
                waits = self._contain(lambda args, _kwargs: self._pending.pop(id(args[0]), None))
                yield CallPatch(work, "wait", begins=waits, ends=self._contain(self._waited))

    def _begin(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], caller: Any
    ) -> _Call | None:
        named = name_of(function, args, caller)
        if named is None or torch._C._current_graph_task_id() != -1:
            return None
        if named.prefix not in ("Tensor", "Torch", "Functional") and self._namespaces:
            return self._open(named, args, kwargs) if named.prefix in self._namespaces else None
        return self._open(named, args, kwargs)

    def _open(self, named: FunctionName, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        stem = f"{named.stem}.{self._calls[named.stem]}"
        self._calls[named.stem] += 1
        parent = self._modules.running if self._modules is not None else None
        if not self.writer.wants(f"{stem}.{FORWARD}"):
            self.writer.add(f"{stem}.{FORWARD}", {}, parent=parent)
            return None
        leaves: list[Leaf] = []
        value = {
            "input_args": [encode(item, f"input.{index}", leaves) for index, item in enumerate(args)],
            "input_kwargs": {name: encode(item, f"kwargs.{name}", leaves) for name, item in kwargs.items()},
        }
        self.writer.record(f"{stem}.{FORWARD}", leaves)
        call = _Call(stem, value, parent, call_stack(), None)
        if torch.is_grad_enabled() and any(leaf.tensor.requires_grad for leaf in leaves):
            key = f"{stem}.{BACKWARD}"
            call.backward = Backward(key, functools.partial(self.writer.add, parent=_backward_of(parent)))
            # the hooks on the outputs may be the only ones that ever fire: nothing is complete before they are there
            call.backward.missing += 1
            self._gradients.watch_inputs(call.backward, leaves)
        return call

    def _end(self, call: _Call, result: Any) -> None:
        leaves: list[Leaf] = []
        outputs = encode_output(tuple(result) if isinstance(result, list) else result, leaves)
        key = f"{call.stem}.{FORWARD}"
        self.writer.record(key, leaves)
        value = {**call.value, "output": outputs, EXTRA: {"order": self.writer.next_order()}}
        self.writer.add(key, value, parent=call.parent, stack=call.stack)
        if call.backward is not None:
            self._gradients.watch_outputs(call.backward, leaves)
            call.backward.missing -= 1
            self._backwards.append(call.backward)

    def _enter(self, named: FunctionName, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        if torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling():
            return None
        with torch._C.DisableTorchFunction():
            call = self._open(named, args, kwargs)
        if call is not None and named.prefix == DISTRIBUTED:
            call.operands = (*args, *kwargs.values())
        return call

    def _leave(self, call: _Call, result: Any) -> None:
        if isinstance(result, dist.Work):
            self._pending[id(result)] = (result, call)
        else:
            self._finish(call, result)

    def _waited(self, token: tuple[Any, _Call], _result: Any) -> None:
        self._finish(token[1], None)

    def _finish(self, call: _Call, result: Any) -> None:
        """End a followed call; of a collective, what counts is what is in its operands now."""
        operands = tuple(item for item in call.operands if isinstance(item, torch.Tensor | list))
        call.operands = ()
        for operand in operands:
            self.writer.forget(operand if isinstance(operand, list) else [operand])
        with torch._C.DisableTorchFunction():
            self._end(call, operands or result)

    def _contain(self, function: Callable[..., Any], *bound: Any) -> Contained:
        return Contained(self, function, bound)


def subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield `cls` and everything that inherits from it."""
    yield cls
    for subclass in cls.__subclasses__():
        yield from subclasses(subclass)


def _backward_of(parent: str | None) -> str | None:
    return None if parent is None else parent.replace(f".{FORWARD}.", f".{BACKWARD}.")
