"""Sees gradients by hooks on the very tensors that flow, and gathers them into entries; the run keeps every bit.

A full backward hook or an alias in front of a module would change the order in which gradients are added. Without
them an input's gradient is that of the tensor: the sum over all its consumers.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from trainermon.dump.encode import tensor_form
from trainermon.dump.files.records import EXTRA, HOOKED, LATER
from trainermon.dump.forms import TensorForm, TensorLeaf
from trainermon.dump.statistics import TensorMemory
from trainermon.dump.writer import DumpWriter
from trainermon.hooks.consumers import ConsumedTensor, TensorConsumers
from trainermon.hooks.guard import ContainedCall, FaultBorder
from trainermon.hooks.tensor_hooks import hook_gradient
from trainermon.hooks.tracing import is_transformed

Sink = Callable[[str, dict[str, Any]], None]


@dataclasses.dataclass(slots=True, eq=False)
class BackwardEntry:
    """Collects the gradients of one call, which arrive in any order, and writes its backward entry when all are there.

    Attributes:
        key: The entry's key, `Module.h.0.Linear.backward.0`; "": `settle` finds it when the first gradient arrives.
        sink: Writes the finished entry: called with the key and the value.
        inputs: Forms of the gradients of the call's outputs; None: there is no gradient.
        outputs: Forms of the gradients of the call's inputs, likewise.
        kwargs: Forms of the gradients of keyword arguments, by keyword.
        extra: Further items of the entry, such as the micro step.
        missing: Gradients that have not arrived yet.
        arrived: The names of places where gradients have arrived; a later backward pass brings more, which are not
            taken.
        received: Gradients that have arrived, and are some.
        written: Whether the entry was written.
        settle: Called before the first gradient is stored; None: nothing is to be found out.
        taken: The tensors that the call takes, where their consumers are followed.
        backward_pass: That of the gradients so far, by autograd's number; -1: none has arrived.
    """

    key: str
    sink: Sink
    inputs: list[TensorForm | None] = dataclasses.field(default_factory=list)
    outputs: list[TensorForm | None] = dataclasses.field(default_factory=list)
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    missing: int = 0
    arrived: set[str] = dataclasses.field(default_factory=set)
    received: int = 0
    written: bool = False
    settle: Callable[[], None] | None = None
    taken: list[ConsumedTensor] = dataclasses.field(default_factory=list)
    backward_pass: int = -1

    def arrive(self, backward_pass: int, *, is_alone: bool) -> None:
        """Note the pass that a gradient arrives in; an entry of several passes, or one not `is_alone`, is `mixed`."""
        if self.backward_pass not in (-1, backward_pass) or not is_alone:
            self.extra["mixed"] = True
        self.backward_pass = backward_pass

    def store(self, place: GradientPlace, form: TensorForm | None) -> None:
        """Store the gradient that arrived at `place` (None: there is none).

        Write the entry if it was the last one missing.
        """
        self.arrived.add(place.name)
        if form is not None:
            getattr(self, place.side)[place.index] = form
            self.received += 1
            self.extra["order"] = form.order
        self.missing -= 1
        if not self.missing:
            self.write()

    def write(self) -> None:
        """Write the entry with the gradients that have arrived; not a second time, and not if there are none."""
        if self.written or not self.received:
            return
        self.written = True
        value: dict[str, Any] = {"input": self.inputs, "output": self.outputs}
        if self.kwargs:
            value["output_kwargs"] = self.kwargs
        self.sink(self.key, {**value, EXTRA: self.extra})


@dataclasses.dataclass(slots=True, eq=False)
class GradientPlace:
    """Where a gradient belongs.

    Attributes:
        backward: The entry.
        name: The place in it as text, `input.0` (the gradient of an output of the call), `output.1` (of an input),
            `kwargs.mask`; part of the name of the gradient's file.
        side: The entry's forms on that side: `inputs`, `outputs` or `kwargs`.
        index: Which of them it is.
    """

    backward: BackwardEntry
    name: str
    side: str
    index: int | str


@dataclasses.dataclass(slots=True, eq=False)
class _WatchedTensor:
    """A tensor whose gradients are awaited in `places`; `is_leaf` if the graphs of several micro steps share it."""

    places: list[GradientPlace]
    num_hooks: int
    hooked: bool
    is_leaf: bool
    consumed: ConsumedTensor | None = None

    def due(self) -> list[GradientPlace]:
        """Return the places that a gradient of a leaf which arrives now belongs to.

        Those of the oldest micro step, once: pipelines begin the next one's forward before its backward.
        """
        if len(self.places) == 1:
            return [self.places.pop()]
        oldest = min((_micro_step(place) for place in self.places), default=0)
        due = [place for place in self.places if _micro_step(place) == oldest]
        self.places = [place for place in self.places if _micro_step(place) != oldest]
        return due


def _micro_step(place: GradientPlace) -> int:
    return int(place.backward.extra.get("micro_step", 0))


class _OwnedParameter(NamedTuple):
    """A parameter, its (key stem, name) in every module that owns it, and the keys of the hooks it had before."""

    parameter: weakref.ref[Tensor]
    places: list[tuple[str, str]]
    before: frozenset[int]

    def hooked(self) -> bool | str:
        """Return whether the script has hooks on it; `LATER`: one since, which may change what the dump has seen."""
        parameter = self.parameter()
        hooks = (parameter._backward_hooks if parameter is not None else None) or {}
        foreign = {key for key, hook in hooks.items() if is_foreign(hook)}
        return bool(foreign) if foreign <= self.before else LATER


class GradientHooks:
    """Registers gradient hooks on activations and parameters, and records the gradients as backward entries of a dump.

    Of activations inside torch.func's vmap and grad none are awaited: whether a hook on them is called is left to
    chance.

    Args:
        writer: Takes the entries.
        border: Receives the errors of hooks, which never raise into training.
        extra: Given an entry's key, returns what is said of the entry beside its tensors.
        consumers: Follows who takes the tensors, if that is to be written; None: it is not.
    """

    def __init__(
        self,
        writer: DumpWriter,
        border: FaultBorder,
        extra: Callable[[str], dict[str, Any]] = lambda _key: {},
        consumers: TensorConsumers | None = None,
    ) -> None:
        self._writer = writer
        self._border = border
        self._extra = extra
        self._consumers = consumers
        self._differentiable_pass: int | None = None
        self._memory: TensorMemory[_WatchedTensor] = TensorMemory()
        self._off_leaves: list[Callable[[], Any]] = []
        self._watched_parameters: dict[int, weakref.ref[Tensor]] = {}
        self._parameter_calls: Counter[tuple[str, str]] = Counter()
        self._num_parameters: dict[str, int] = {}
        self._open: dict[str, dict[str, list[TensorForm]]] = {}
        self._backwards: list[BackwardEntry] = []

    def await_gradients(self, backward: BackwardEntry) -> None:
        """Register an entry that `close` writes if its gradients have not all arrived by then."""
        self._backwards.append(backward)

    def watch_outputs(self, backward: BackwardEntry, leaves: Sequence[TensorLeaf]) -> None:
        """Hook the tensors in `leaves`, which a call returned: their gradients are the inputs of its backward entry."""
        followed = [(index, leaf.tensor) for index, leaf in enumerate(leaves) if leaf.tensor.requires_grad]
        if not followed or is_transformed():
            return
        backward.inputs = [None] * len(leaves)
        consumed: Sequence[ConsumedTensor | None] = [None] * len(followed)
        if self._consumers is not None:
            consumed, is_entangled = self._consumers.given([tensor for _, tensor in followed], backward.taken)
            if is_entangled:
                backward.extra["entangled"] = True
        for (index, tensor), found in zip(followed, consumed, strict=True):
            self._register(tensor, GradientPlace(backward, f"input.{index}", "inputs", index), found)

    def watch_inputs(self, backward: BackwardEntry, leaves: Sequence[TensorLeaf]) -> None:
        """Hook the tensors in `leaves`, which a call took: their gradients are the outputs of its backward entry."""
        if is_transformed():
            return
        given = leaves
        if leaves and not leaves[-1].slot.startswith("input"):  # keyword arguments come last
            given = [leaf for leaf in leaves if leaf.slot.startswith("input")]
        followed = [(index, leaf.tensor) for index, leaf in enumerate(given) if leaf.tensor.requires_grad]
        backward.outputs = [None] * len(given) if followed else []
        for index, tensor in followed:
            place = GradientPlace(backward, f"output.{index}", "outputs", index)
            self._register(tensor, place, self._taken(tensor, backward))
        for leaf in leaves if given is not leaves else ():
            if leaf.slot.startswith("kwargs") and leaf.tensor.requires_grad:
                place = GradientPlace(backward, leaf.slot, "kwargs", leaf.slot.removeprefix("kwargs."))
                self._register(leaf.tensor, place, self._taken(leaf.tensor, backward))

    def watch_parameters(self, owners: dict[Tensor, list[tuple[str, str]]]) -> None:
        """Watch the gradients of parameters that are not watched yet.

        `owners` lists (key stem, name) of every module that owns one; all parameters of a module are given at a time.
        """
        self._num_parameters |= Counter(stem for places in owners.values() for stem, _ in places)
        for parameter, places in owners.items():
            known = self._watched_parameters.get(id(parameter))
            if known is not None and known() is parameter:
                continue
            reference = self._watched_parameters[id(parameter)] = weakref.ref(parameter)
            owned = _OwnedParameter(reference, places, frozenset(parameter._backward_hooks or ()))
            hook = ContainedCall(self._border, self._parameter_gradient, (owned,))
            self._off_leaves.append(hook_gradient(parameter, hook))

    def go_on_from(self, earlier: GradientHooks) -> None:
        """Continue the numbers of parameter gradients from where `earlier` ended."""
        self._parameter_calls = earlier._parameter_calls

    def close(self) -> None:
        """Write the entries whose gradients did not all arrive, and remove the hooks from all leaves."""
        for backward in self._backwards:
            if not backward.written:
                ContainedCall(self._border, backward.write)()
        self._backwards.clear()
        ContainedCall(self._border, self._close_leaves)()

    def _close_leaves(self) -> None:
        for take_off in self._off_leaves:
            take_off()
        self._off_leaves.clear()
        for key, forms in self._open.items():
            self._add(key, forms)
        self._open.clear()

    def _register(self, tensor: Tensor, place: GradientPlace, consumed: ConsumedTensor | None) -> None:
        # Reading grad_fn brings up to date that of a view whose base was written to through another view; without it
        # torch 2.13 dies of a segmentation fault in register_hook.
        is_leaf = tensor.grad_fn is None
        hooks: dict[int, Any] | None = tensor._backward_hooks
        place.backward.missing += 1
        if hooks:
            watched = self._memory.recall(tensor)
            if watched is not None and watched.num_hooks == len(hooks):
                watched.places.append(place)
                return
            hooked = any(map(is_foreign, hooks.values()))
            if hooked and consumed is not None:
                consumed.hooked = True
            watched = _WatchedTensor([place], len(hooks) + 1, hooked, is_leaf, consumed)
        else:
            watched = _WatchedTensor([place], 1, hooked=False, is_leaf=is_leaf, consumed=consumed)
        hook = ContainedCall(self._border, self._gradient, (watched,))
        take_off = hook_gradient(tensor, hook)
        if is_leaf:  # others go with the graph
            self._off_leaves.append(take_off)
        self._memory.remember(tensor, watched)

    def _taken(self, tensor: Tensor, backward: BackwardEntry) -> ConsumedTensor | None:
        if self._consumers is None:
            return None
        consumed = self._consumers.taken(tensor)
        backward.taken.append(consumed)
        return consumed

    def _gradient(self, watched: _WatchedTensor, gradient: Tensor | None) -> None:
        backward_pass = self._begin_pass()
        for place in watched.due() if watched.is_leaf else watched.places:
            backward = place.backward
            if backward.settle is not None:
                backward.settle()
            if backward.written or place.name in backward.arrived:
                continue
            if self._consumers is not None:
                backward.arrive(backward_pass, is_alone=self._differentiable_pass in (None, backward_pass))
            if gradient is None:  # another output of the same node was used, not this one
                backward.store(place, None)
                continue
            form = self._record(backward.key, place.name, gradient)
            _note_tensor(form, watched, place, backward_pass)
            backward.store(place, form)

    def _begin_pass(self) -> int:
        """Return the number of the backward pass; note one that is differentiated: it adds to the graph unseen."""
        backward_pass = torch._C._current_graph_task_id()
        if self._differentiable_pass is None and torch.is_grad_enabled():
            self._differentiable_pass = backward_pass
        return backward_pass

    def _parameter_gradient(self, owned: _OwnedParameter, gradient: Tensor | None) -> None:
        first = owned.places[0]
        call = self._parameter_calls.get(first, 0)
        self._parameter_calls[first] = call + 1
        if gradient is None:
            return
        for stem, name in owned.places:
            key = f"{stem}.parameters_grad.{call}"
            forms = self._open.setdefault(key, {})
            form = self._record(key, name, gradient)
            if hooked := owned.hooked():
                form.add(HOOKED, hooked)
            forms[name] = [form]
            if len(forms) == self._num_parameters[stem]:
                self._add(key, self._open.pop(key))

    def _add(self, key: str, forms: dict[str, list[TensorForm]]) -> None:
        extra = self._extra(key)
        self._writer.add_gradients(key, {**forms, EXTRA: extra} if extra else {**forms})

    def _record(self, key: str, slot: str, gradient: Tensor) -> TensorForm:
        with DisableTorchFunction():  # a mode that is on in the backward would see every look at the gradient
            form = tensor_form(gradient)
            self._writer.record(key, [TensorLeaf(slot, gradient, form)])
        return form


def _note_tensor(form: TensorForm, watched: _WatchedTensor, place: GradientPlace, backward_pass: int) -> None:
    consumed = watched.consumed
    if watched.hooked or (consumed is not None and consumed.hooked):
        form.add(HOOKED, value=True)
    if consumed is not None:
        form.more += f', "tensor": {consumed.number}'
        if place.side != "inputs":
            form.more += f', "consumers": {consumed.consumers(backward_pass)}'


def is_foreign(hook: Any) -> bool:
    """Return whether `hook`, found on a tensor, was registered by the script or a framework, not by trainermon."""
    return not isinstance(hook, ContainedCall)
