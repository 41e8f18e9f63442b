"""Captures what every call of a torch function takes and returns, and the gradients of both.

A function mode sees the calls; nothing of torch is replaced for that. What no mode sees is in `followed_calls`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import MethodWrapperType
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from trainermon.dump.capture import ModuleCapture
from trainermon.dump.encode import encode, encode_output
from trainermon.dump.facts.generator_states import GENERATOR, generator_state
from trainermon.dump.facts.stacks import call_stack
from trainermon.dump.files.records import BACKWARD, EXTRA, FORWARD
from trainermon.dump.followed_calls import DISTRIBUTED, FollowedCalls
from trainermon.dump.forms import TensorLeaf
from trainermon.dump.function_modes import ModeSwitch
from trainermon.dump.function_names import SILENT, FunctionName, name_of, unreplaced
from trainermon.dump.gradients import BackwardEntry, GradientHooks
from trainermon.dump.recomputed_calls import RecomputedCalls
from trainermon.dump.writer import DumpWriter
from trainermon.hooks.consumers import TensorConsumers
from trainermon.hooks.guard import ContainedCall

# It changes its first argument and returns nothing.
_WRITES = "__setitem__"


@dataclasses.dataclass(slots=True, eq=False)
class _FunctionCall:
    """One call of a function: its key without direction, what it took, and where its gradients go.

    Without a `stem` only its gradients are recorded. `written` is the tensor that a call changes which returns nothing.
    """

    stem: str
    value: dict[str, Any]
    parent: str | None
    stack: tuple[str, ...]
    backward: BackwardEntry | None
    how: dict[str, Any] = dataclasses.field(default_factory=dict)
    written: Any = None


class FunctionCapture(TorchFunctionMode):
    """Records calls of torch functions by the thread that entered it, until it is left.

    Only the outermost call is recorded, and of those inside a backward only collectives: recomputation (activation
    checkpointing) is not counted; where only that has gradients, they are given to the call that it repeats. In-place
    functions are recorded before and after. With `modules` the parent of a call is the module that runs. Gradients are
    those of the tensors, summed over all their consumers.

    Args:
        writer: Where entries go.
        modules: The capture of modules in the same dump, if there is one.
        namespaces: Of custom operators (`torch.ops.<namespace>`) that are recorded; none: all.

    Attributes:
        only_inside: Record only what is called while one of `modules` runs.
    """

    def __init__(
        self, writer: DumpWriter, modules: ModuleCapture | None = None, namespaces: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.writer = writer
        self.tripped = False
        self.only_inside = False
        self._modules = modules
        self._namespaces = frozenset(namespaces)
        self._calls: Counter[str] = Counter()
        self._gradients = GradientHooks(writer, self, consumers=TensorConsumers())
        self._begins = self._contain(self._begin)
        self._ends = self._contain(self.end)
        self._followed = FollowedCalls(self, self._contain)
        self._recomputed = RecomputedCalls(self._bind)
        self._switch = ModeSwitch(self, self._contain)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` once, with what it was called with, and return what it returns."""
        kwargs = kwargs or {}
        if type(func) is MethodWrapperType and func.__name__ in SILENT:  # an attribute of a tensor, as `grad`
            return func(*args, **kwargs)
        caller = sys._getframe(1)
        func = unreplaced(func, caller)
        call = self._begins(func, args, kwargs, caller)
        result = func(*args, **kwargs)
        if call is not None:
            self._ends(call, call.written if result is None else result)
        return result

    def attach(self) -> None:
        """Start to record the calls of torch functions."""
        self._followed.attach()
        self._switch.attach()

    def detach(self) -> None:
        """Stop recording, and write the entries whose gradients did not all arrive."""
        self._switch.detach()
        self._followed.detach()
        self._gradients.close()
        self.tripped = True

    def release(self) -> None:
        """Forget everything, which would stay until the garbage collector finds it: this object refers to itself."""
        vars(self).clear()
        self.tripped = True  # hooks on tensors that are still there ask

    def stop_in_child(self) -> None:
        """Stop recording in a forked child process, and write nothing there: the files belong to the parent."""
        self.tripped = True

    def go_on_from(self, earlier: FunctionCapture) -> None:
        """Continue the numbers of calls from where `earlier` ended, which wrote into the same dump."""
        self._calls = earlier._calls

    def trip(self, error: BaseException) -> None:
        """Note in the dump that an entry was lost to `error`; called in place of raising into training."""
        self.writer.count_error(error)

    def follow(self, owner: Any, name: str, prefix: str) -> None:
        """Add the function `name` of `owner` to those recorded, as `<prefix>.<name>`; before `attach`."""
        self._followed.follow(owner, name, prefix)

    def reread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Drop the statistics remembered for these tensors: a function has changed them and torch has not noticed."""
        self.writer.reread(tensors)

    def open(self, named: FunctionName, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _FunctionCall | None:
        """Record the inputs of a call that begins.

        Return an object for it, which `end` takes, or None: it is not recorded. In a backward only collectives are
        recorded; other calls there belong to a recomputation, of which only the gradients are.
        """
        if torch._C._current_graph_task_id() != -1 and named.prefix != DISTRIBUTED:
            return self._repeat(named, args, kwargs)
        function = named.stem
        number = self._calls.get(function, 0)
        self._calls[function] = number + 1
        stem = f"{function}.{number}"
        parent = self._modules.running if self._modules is not None else None
        if named.prefix != DISTRIBUTED:  # that is recorded as often as it is called
            self._recomputed.note(function, (stem, parent))
        is_chosen, watches = self.writer.wants(f"{stem}.{FORWARD}"), self._watches(f"{stem}.{BACKWARD}")
        if not is_chosen:
            self.writer.leave_out(f"{stem}.{FORWARD}", parent=parent)
        if not (is_chosen or watches):
            return None
        value, leaves = _taken(args, kwargs)
        call = _FunctionCall("", {}, None, (), None)
        if is_chosen:
            how = _how(named, leaves)
            facts: list[TensorLeaf] = []
            drawn = generator_state(named.name, args, kwargs, facts)
            if drawn is not None:
                how[GENERATOR] = drawn
            self.writer.record(f"{stem}.{FORWARD}", [*leaves, *facts])
            call = _FunctionCall(stem, value, parent, call_stack(), None, how)
        if named.prefix == DISTRIBUTED:
            self.writer.flush_at_once()
        if watches and any(leaf.tensor.requires_grad for leaf in leaves):
            call.backward = BackwardEntry("", _nowhere)
            self._bind(call.backward, (stem, parent))
            self._watch(call.backward, leaves)
        call.written = args[0] if named.name == _WRITES else None
        return call

    def end(self, call: _FunctionCall, result: Any, *, readable: bool = True) -> None:
        """Record the result of a call that `open` returned.

        Where it is not `readable`, only type and shape of the result.
        """
        leaves: list[TensorLeaf] = []
        outputs = encode_output(tuple(result) if isinstance(result, list) else result, leaves)
        if call.stem:
            key = f"{call.stem}.{FORWARD}"
            self.writer.record(key, leaves if readable else [])
            value = {**call.value, "output": outputs, EXTRA: {"order": self.writer.next_order(), **call.how}}
            self.writer.add(key, value, parent=call.parent, stack=call.stack)
        if call.backward is not None:
            self._gradients.watch_outputs(call.backward, leaves)
            call.backward.missing -= 1
            self._gradients.await_gradients(call.backward)

    def _begin(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], caller: Any
    ) -> _FunctionCall | None:
        if self.only_inside and not (self._modules and self._modules.is_running):
            return None
        named = None if self._followed.running else name_of(function, args, caller)
        if named is None or (self._namespaces and not named.is_torchs and named.prefix not in self._namespaces):
            return None
        return self.open(named, args, kwargs)

    def _watches(self, key: str) -> bool:
        return torch.is_grad_enabled() and self.writer.could_want(key)

    def _repeat(self, named: FunctionName, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _FunctionCall | None:
        """Watch the gradients of a call that a checkpoint repeats; return the call, None if it has no gradients."""
        backward = self._recomputed.repeat(named.stem)
        if backward is None:
            return None
        _, leaves = _taken(args, kwargs)
        if not any(leaf.tensor.requires_grad for leaf in leaves):
            return None
        self._watch(backward, leaves)
        return _FunctionCall("", {}, None, (), backward)

    def _bind(self, backward: BackwardEntry, call: tuple[str, str | None]) -> None:
        stem, parent = call
        backward.key = f"{stem}.{BACKWARD}"
        backward.sink = functools.partial(self.writer.add, parent=_backward_of(parent))

    def _watch(self, backward: BackwardEntry, leaves: Sequence[TensorLeaf]) -> None:
        # the hooks on the outputs may be the only ones that ever fire: nothing is complete before they are there
        backward.missing += 1
        self._gradients.watch_inputs(backward, leaves)

    def _contain(self, function: Callable[..., Any], *bound: Any) -> ContainedCall:
        return ContainedCall(self, function, bound)


def _taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[TensorLeaf]]:
    """Return the form of a call's arguments as a mapping, and the tensors in it."""
    leaves: list[TensorLeaf] = []
    value = {
        "input_args": [encode(item, f"input.{index}", leaves) for index, item in enumerate(args)],
        "input_kwargs": {name: encode(item, f"kwargs.{name}", leaves) for name, item in kwargs.items()},
    }
    return value, leaves


def _how(named: FunctionName, leaves: Sequence[TensorLeaf]) -> dict[str, Any]:
    """Return what a reader needs to call the function again, and cannot tell from the call's key and arguments."""
    how: dict[str, Any] = {"function": named.origin} if named.origin else {}
    if named.prefix == DISTRIBUTED:
        how["world_size"] = dist.get_world_size()
    if torch._C._is_any_autocast_enabled():
        for device in {leaf.tensor.device.type for leaf in leaves}:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                how["autocast"] = str(torch.get_autocast_dtype(device))
    return how


def _nowhere(_key: str, _value: dict[str, Any]) -> None:
    """Drop an entry that was not bound to a call."""


def _backward_of(parent: str | None) -> str | None:
    return None if parent is None else parent.replace(f".{FORWARD}.", f".{BACKWARD}.")
