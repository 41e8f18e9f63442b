"""Captures what every module takes and returns, and the gradients of both, while the model runs as it would anyway.

Decides which calls are recorded and under which key. Nothing is added to the autograd graph, nothing is replaced, and
whatever goes wrong in here is counted in the dump and costs one entry.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainermon.dump.encode import encode, encode_output, tensor_form
from trainermon.dump.facts.module_attributes import COUNTER, ConstructedModule, further_tensors, has_further
from trainermon.dump.facts.stacks import call_stack
from trainermon.dump.files.records import BACKWARD, BUFFERS, EXTRA, FORWARD, PARAMETERS_GRAD, RECOMPUTED
from trainermon.dump.forms import TensorLeaf
from trainermon.dump.gradients import BackwardEntry, GradientHooks
from trainermon.dump.writer import DumpWriter
from trainermon.hooks.guard import ContainedCall
from trainermon.hooks.module_hooks import hook_forward, unhook_forward
from trainermon.hooks.names import chosen
from trainermon.hooks.names import plain_name as found_plain_name

ROOT_NAME = "root"
# A wrapper module that a model in it is full of; it says the same as what is in it.
FSDP1 = "FullyShardedDataParallel"
FLAT = "_flat_param"
# The modules of a model have the same names in every dump.
plain_name = functools.lru_cache(maxsize=65536)(found_plain_name)


@dataclasses.dataclass(slots=True, eq=False)
class _CapturedModule:
    """A module with the first part of its keys (`Module.<name>.<Class>`)."""

    module: nn.Module
    stem: str
    is_root: bool
    stage: int
    attributes: ConstructedModule
    calls: list[_ForwardCall] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class _ForwardCall:
    """One forward call; recomputations find the call that they repeat by the order of its children."""

    watched: _CapturedModule
    number: int
    parent: _ForwardCall | None
    value: dict[str, Any]
    stack: tuple[str, ...]
    backward: BackwardEntry
    has_gradients: bool
    children: list[_ForwardCall] = dataclasses.field(default_factory=list)
    next_child: int = 0
    recomputed: bool = False

    def key(self, direction: str) -> str:
        return f"{self.watched.stem}.{direction}.{self.number}"


class ForwardCalls:
    """Keeps the stack of running module calls, numbers each module's calls, and finds what a recomputation repeats.

    A recomputation is the second forward that activation checkpointing makes in the backward.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[nn.Module, _ForwardCall | None]] = []
        self._numbers: Counter[str] = Counter()
        self._part = 0
        self._latest: tuple[_ForwardCall | None, int] = (None, -1)

    @property
    def is_running(self) -> bool:
        """Whether any module is in its forward now, be it recorded or not."""
        return bool(self._stack)

    def go_on_from(self, earlier: ForwardCalls) -> None:
        """Continue the numbers of calls from where `earlier` ended."""
        self._numbers, self._part = earlier._numbers, earlier._part

    @property
    def part(self) -> int:
        """Number, from 1, of the part of the model (what one checkpoint spans) that runs again, or did last."""
        return self._part

    def next_number(self, stem: str) -> int:
        """Return how often the module `stem` (`Module.h.0.Linear`) was called before, and count this call."""
        number = self._numbers.get(stem, 0)
        self._numbers[stem] = number + 1
        return number

    def enter(self, module: nn.Module) -> None:
        """Push `module`, whose forward begins, on the stack of running modules.

        `set_innermost` then says which call it is.
        """
        self._stack.append((module, None))

    def set_innermost(self, call: _ForwardCall | None) -> None:
        """Set the call of the innermost running module; None: one that is not recorded."""
        self._stack[-1] = (self._stack[-1][0], call)

    def leave(self, module: nn.Module) -> _ForwardCall | None:
        """Take `module`, whose forward ended, off the stack.

        Return its call, or None if it is not recorded or not there. What lies above it on the stack goes as well: an
        exception left those modules.
        """
        for position in range(len(self._stack) - 1, -1, -1):
            if self._stack[position][0] is module:
                call = self._stack[position][1]
                del self._stack[position:]
                return call
        return None

    def innermost(self) -> _ForwardCall | None:
        """Return the innermost recorded call that is running; None if there is none."""
        for _, call in reversed(self._stack):
            if call is not None:
                return call
        return None

    def repeated(self, watched: _CapturedModule) -> _ForwardCall | None:
        """Return the earlier call of a module that its present, recomputed forward repeats; None if there is none.

        Inside another repeated call, calls are taken in the order in which they first ran; at the top, the latest not
        yet repeated.
        """
        parent = self.innermost()
        if parent is None:
            repeated = next((call for call in reversed(watched.calls) if not call.recomputed), None)
            self._begin_part(repeated)
        else:
            rest = enumerate(parent.children[parent.next_child :], parent.next_child + 1)
            position, repeated = next(
                ((index, call) for index, call in rest if call.watched is watched), (parent.next_child, None)
            )
            parent.next_child = position
        if repeated is not None:
            repeated.recomputed = True
        return repeated

    def _begin_part(self, call: _ForwardCall | None) -> None:
        """Count another part, unless `call` follows in the same module on the one that was repeated before it.

        Backwards run in the opposite order, so of two checkpoints the later one is repeated first.
        """
        around = call.parent if call is not None else None
        place = around.children.index(call) if call is not None and around is not None else -1
        if around is None or around is not self._latest[0] or place <= self._latest[1]:
            self._part += 1
        self._latest = around, place

    def reset(self) -> None:
        """Empty the stack of running modules; the counts of calls stay."""
        self._stack.clear()


class MicroStepCounts:
    """Counts how often each root (the model, or one stage of a virtual pipeline) was called: that is its micro step.

    Args:
        stages: The number of each root, by the first part of its modules' keys.

    Attributes:
        is_on: Whether calls of roots are micro steps, and counted.
    """

    def __init__(self, stages: Mapping[str, int]) -> None:
        self.is_on = False
        self._stages = stages
        self._root_calls: Counter[int] = Counter()

    def go_on_from(self, earlier: MicroStepCounts) -> None:
        """Continue the counts from where `earlier` ended."""
        self._root_calls = earlier._root_calls

    def next_of(self, stage: int) -> int:
        """Return the number of the micro step that a forward of root `stage` begins, from 0, and count it."""
        self._root_calls[stage] += 1
        return self._root_calls[stage] - 1

    def stage_of(self, stem: str) -> int:
        """Return the number of the root (pipeline stage) in which the module with the key `stem` is; 0 if unknown."""
        return self._stages.get(stem, 0)


class ModuleCapture:
    """Records every call of the modules of `roots` into `writer` between `attach` and `detach`.

    A root is an unwrapped model (not DDP), or a stage of a virtual pipeline. `scope` are names or patterns of modules
    (none: all); a root itself is always recorded, for the ends of the chain. Recomputed forwards (activation
    checkpointing) are not counted again, but give the gradients where only they can.

    Args:
        roots: One module or several.
        writer: Where entries go.
        scope: What is recorded.
        names: Names of modules, where the path below the root is not what they are to be called.
        gathered: Parameters are gathered for each forward: only then are they what gradients arrive at.

    Attributes:
        micro_step: Written into the entries while it is set; so is `stage`, the number of the root.
        handed: What the root that runs next is given beside its arguments, by name.
        quiet: A function mode is to see nothing of what the capture itself calls; to be set before `attach`.
    """

    def __init__(
        self,
        roots: nn.Module | Sequence[nn.Module],
        writer: DumpWriter,
        *,
        scope: Sequence[str] = (),
        names: Mapping[nn.Module, str] | None = None,
        gathered: bool = False,
    ) -> None:
        self.micro_step: int | None = None
        self.stage: int | None = None
        self.handed: Mapping[str, Any] = {}
        self.writer = writer
        self._gathered = gathered
        self.quiet = False
        self._border = _EntryBorder(writer)
        self._hooked: list[tuple[nn.Module, ContainedCall, ContainedCall]] = []
        self._calls = ForwardCalls()
        self._gradients = GradientHooks(writer, self._border, self._extra_of_gradients)
        self._watched = [
            watched
            for stage, root in enumerate([roots] if isinstance(roots, nn.Module) else roots)
            for watched in _watched_below(root, scope, names or {}, stage)
        ]
        writer.take_classes({type(watched.module) for watched in self._watched})
        self._micro_steps = MicroStepCounts({watched.stem: watched.stage for watched in self._watched})

    def name_roots(self, names: Mapping[nn.Module, str]) -> None:
        """Give the roots names, under which they are recorded like any other module; call it before `attach`."""
        for watched in self._watched:
            if watched.is_root:
                watched.stem, watched.is_root = _stem(names[watched.module], watched.module), False

    def count_micro_steps(self) -> None:
        """Set `micro_step` and `stage` at each call of a root from now on, counting the calls of each root from 0."""
        self._micro_steps.is_on = True

    @property
    def is_running(self) -> bool:
        """Whether a module of the captured model is in its forward now, the root included."""
        return self._calls.is_running

    @property
    def running(self) -> str | None:
        """Key of the innermost recorded module call that is running; None outside of all and directly in the root."""
        return _parent_key(self._calls.innermost(), FORWARD)

    def attach(self) -> None:
        """Attach the hooks, after all hooks that the script has registered so far."""
        for watched in self._watched:
            before = (
                self._contain(_quietly, self._before, watched) if self.quiet else self._contain(self._before, watched)
            )
            behind = self._contain(_quietly, self._behind) if self.quiet else self._contain(self._behind)
            hook_forward(watched.module, before, behind)
            self._hooked.append((watched.module, before, behind))
        if not self._gathered:
            self._gradients.watch_parameters(_owners(self._watched, gathered=False))

    def detach(self) -> None:
        """Remove every hook and write the entries whose gradients did not all arrive."""
        for hooked in self._hooked:
            unhook_forward(*hooked)
        self._hooked.clear()
        self._gradients.close()
        self._border.tripped = True
        self._calls.reset()

    def release(self) -> None:
        """Forget everything: calls refer to each other, and would stay until the garbage collector finds them."""
        for call in [call for watched in self._watched for call in watched.calls]:
            call.children.clear()
            call.watched.calls.clear()
        vars(self).clear()

    def stop_in_child(self) -> None:
        """Stop recording in a forked child process, and write nothing there: the files belong to the parent."""
        self._border.tripped = True

    def go_on_from(self, earlier: ModuleCapture) -> None:
        """Continue the numbers of calls from where `earlier` ended, which wrote into the same dump."""
        self._calls.go_on_from(earlier._calls)
        self._micro_steps.go_on_from(earlier._micro_steps)
        self._gradients.go_on_from(earlier._gradients)

    def _before(
        self, watched: _CapturedModule, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        recomputing = torch._C._current_graph_task_id() != -1
        self._calls.enter(module)
        leaves: list[TensorLeaf] = []
        inputs = [encode(value, f"input.{index}", leaves) for index, value in enumerate(args)]
        if watched.is_root and self.handed:
            kwargs = {**kwargs, **self.handed}
        named = {name: encode(value, f"kwargs.{name}", leaves) for name, value in kwargs.items()}
        if self._gathered and torch.is_grad_enabled():
            self._gradients.watch_parameters(_owners([watched], gathered=True))
        if recomputing:
            call = self._calls.repeated(watched)
            if call is not None:
                call.backward.extra[RECOMPUTED] = self._calls.part
        else:
            value: dict[str, Any] = {"input_args": inputs, "input_kwargs": named}
            if self._gathered:  # by the time the module returns they may be scattered again
                value["parameters"] = _parameters(watched.module, leaves, gathered=True)
            call = self._new_call(watched, value)
            if call.number == 0 and module._buffers:
                value[EXTRA] = {BUFFERS: _buffers(module, leaves)}
            self.writer.record(call.key(FORWARD), leaves)
        self._calls.set_innermost(call)
        if call is not None and not call.has_gradients and torch.is_grad_enabled():
            self._gradients.watch_inputs(call.backward, leaves)

    def _behind(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        call = self._calls.leave(module)
        # non-reentrant checkpointing leaves a recomputed forward by an exception
        if call is None or (output is None and sys.exc_info()[0] is not None):
            return
        leaves: list[TensorLeaf] = []
        outputs = encode_output(output, leaves)
        if torch._C._current_graph_task_id() == -1:
            self._finish(call, outputs, leaves)
        if not call.has_gradients and torch.is_grad_enabled():
            call.has_gradients = True
            self._gradients.watch_outputs(call.backward, leaves)

    def _new_call(self, watched: _CapturedModule, value: dict[str, Any]) -> _ForwardCall:
        parent = self._calls.innermost()
        if watched.is_root and self._micro_steps.is_on:
            self.stage, self.micro_step = watched.stage, self._micro_steps.next_of(watched.stage)
        call = _ForwardCall(
            watched=watched,
            number=self._calls.next_number(watched.stem),
            parent=parent,
            value=value,
            stack=() if watched.is_root else call_stack(),
            backward=BackwardEntry("", self._sink(watched, parent)),
            has_gradients=False,
        )
        call.backward.key = call.key(BACKWARD)
        call.backward.extra = self._extra()
        watched.calls.append(call)
        self._gradients.await_gradients(call.backward)
        if parent is not None:
            parent.children.append(call)
        return call

    def _finish(self, call: _ForwardCall, outputs: Any, leaves: list[TensorLeaf]) -> None:
        key = call.key(FORWARD)
        value, call.value = call.value, {}
        value["output"] = outputs
        leaves = [*leaves]
        if not self._gathered:
            value["parameters"] = _parameters(call.watched.module, leaves, gathered=False)
        facts = _facts(call.watched, leaves)
        self.writer.record(key, leaves)
        value[EXTRA] = {"order": self.writer.next_order(), **self._extra(), **facts, **value.get(EXTRA, {})}
        if call.watched.is_root:
            self.writer.add_root(key, value)
        else:
            self.writer.add(key, value, parent=_parent_key(call.parent, FORWARD), stack=call.stack)

    def _sink(self, watched: _CapturedModule, parent: _ForwardCall | None) -> Callable[[str, dict[str, Any]], None]:
        if watched.is_root:
            return self.writer.add_root
        return functools.partial(self.writer.add, parent=_parent_key(parent, BACKWARD))

    def _extra(self) -> dict[str, Any]:
        extra = {} if self.micro_step is None else {"micro_step": self.micro_step}
        if self.stage is not None:
            extra["stage"] = self.stage
        return extra

    def _extra_of_gradients(self, key: str) -> dict[str, Any]:
        """Return micro step and stage of a parameter's gradients; where micro steps are counted, the stage alone.

        Another micro step's forward may have begun by then.
        """
        if not self._micro_steps.is_on:
            return self._extra()
        return {"stage": self._micro_steps.stage_of(key.rpartition(f".{PARAMETERS_GRAD}.")[0])}

    def _contain(self, function: Callable[..., None], *bound: Any) -> ContainedCall:
        return ContainedCall(self._border, function, bound)


def _quietly(function: Callable[..., Any], *args: Any) -> None:
    with torch._C.DisableTorchFunction():
        function(*args)


class _EntryBorder:
    """Where a fault costs one entry; `tripped` while nothing is to be recorded."""

    def __init__(self, writer: DumpWriter) -> None:
        self.tripped = False
        self._writer = writer

    def trip(self, error: BaseException) -> None:
        self._writer.count_error(error)


def _watched_below(
    root: nn.Module, scope: Sequence[str], names: Mapping[nn.Module, str], stage: int
) -> Iterator[_CapturedModule]:
    for path, module in root.named_modules():
        name = names.get(module, plain_name(path))
        if module is root or (chosen(name, scope) and type(module).__name__ != FSDP1):
            stem = _stem("" if module is root else name, module)
            yield _CapturedModule(module, stem, module is root, stage, ConstructedModule(module))


def _own_parameters(module: nn.Module, *, gathered: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters; gathered by FSDP1 they may be plain attributes, cut out of a flat one."""
    for name, parameter in module._parameters.items():
        if parameter is not None and name != FLAT:
            yield name, parameter
    for name, value in vars(module).items() if gathered else ():
        if isinstance(value, Tensor) and value.grad_fn is not None and name not in module._parameters:
            yield name, value


def _parameters(module: nn.Module, leaves: list[TensorLeaf], *, gathered: bool) -> dict[str, Any]:
    """Return, by name, the forms of a module's own parameters, which join `leaves`; of a DTensor its local part."""
    forms = {}
    for name, parameter in _own_parameters(module, gathered=gathered):
        forms[name] = tensor_form(parameter)
        leaves.append(TensorLeaf(f"parameters.{name}", parameter, forms[name]))
    return forms


def _buffers(module: nn.Module, leaves: list[TensorLeaf]) -> dict[str, Any]:
    """Return, by name, the forms of a module's own buffers that a checkpoint has, which join `leaves`.

    Those that it has not are made anew from the model's settings. A count of batches depends on how many a step has.
    """
    forms = {}
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in (COUNTER, *module._non_persistent_buffers_set):
            forms[name] = tensor_form(buffer)
            leaves.append(TensorLeaf(f"{BUFFERS}.{name}", buffer, forms[name]))
    return forms


def _facts(watched: _CapturedModule, leaves: list[TensorLeaf]) -> dict[str, Any]:
    """Return what else the forward of one of torch's own modules depends on; the tensors in it join `leaves`."""
    text = watched.attributes.text()
    if text is None:
        return {}
    forms = {}
    for name, tensor in further_tensors(watched.module) if has_further(watched.module) else ():
        forms[name] = tensor_form(tensor)
        leaves.append(TensorLeaf(f"tensors.{name}", tensor, forms[name]))
    return {"attributes": text, "tensors": forms} if forms else {"attributes": text}


def _owners(watched: Sequence[_CapturedModule], *, gathered: bool) -> dict[Tensor, list[tuple[str, str]]]:
    """Return, by parameter, (key stem, name in it) of each module that owns it; those without gradient are left out."""
    owners: dict[Tensor, list[tuple[str, str]]] = {}
    for each in watched:
        for name, parameter in _own_parameters(each.module, gathered=gathered):
            if parameter.requires_grad:
                owners.setdefault(parameter, []).append((each.stem, name))
    return owners


def _stem(name: str, module: nn.Module) -> str:
    return f"Module.{plain_name(name) or ROOT_NAME}.{type(module).__name__}"


def _parent_key(parent: _ForwardCall | None, direction: str) -> str | None:
    """Return the key of the nearest enclosing call that the files know: not the root."""
    return None if parent is None or parent.watched.is_root else parent.key(direction)
