"""Keeps, for the micro steps of one training step, what is needed to run their forwards and backwards again."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from trainermon.hooks.guard import ContainedCall
from trainermon.hooks.replayable import Replayable
from trainermon.hooks.tensor_hooks import hook_gradient
from trainermon.hooks.tracing import is_traced
from trainermon.hooks.tree import tensors_of
from trainermon.replay.attributes import restore_generator
from trainermon.replay.graph import has_reentrant_checkpoint
from trainermon.replay.state import AutocastState, BufferKeeper, KeptBuffer, NotCoveredError, RandomState, accelerators
from trainermon.replay.suitability import ModelStage, stage_of

_TENSORS = {Tensor}
# Called by `map`, which saves the interpreter's share of the time.
_VERSION, _SIZE, _TRAINS = map(operator.attrgetter, ("_version", "size_bytes", "training"))


class HandedValue(NamedTuple):
    """A value that a framework puts into a module's attribute before a forward, as a later pipeline stage's input.

    Attributes:
        module: The module.
        name: The attribute.
        value: What it is set to.
    """

    module: nn.Module
    name: str
    value: Any


@dataclasses.dataclass(slots=True, eq=False)
class KeptForward:
    """All that is needed to run one forward of a root again: arguments, the state before it, output gradients.

    Arguments and gradients are kept by reference. `stage` counts the roots; `leaves` and `tree` are the arguments, so
    that a forward that takes something out of a list or dictionary gets it again. `handed` is what else it was given,
    and `generators` puts back the generators that are the framework's own or were given. `versions` and
    `parameter_versions` count writes to arguments and parameters, to notice a change. `random`, `autocast` and
    `training` are random generators, automatic casts and training flags, `buffers` the model's buffers. `gradients` has
    one place per returned tensor that requires a gradient, in the order of `tensors_of`; `outputs` are those tensors
    with their versions, as long as the budget allows.
    """

    stage: int
    leaves: list[Any]
    tree: pytree.TreeSpec
    handed: list[HandedValue]
    generators: Callable[[], None]
    versions: tuple[int, ...]
    random: RandomState
    autocast: AutocastState
    training: tuple[bool, ...]
    buffers: list[KeptBuffer]
    parameter_versions: int
    gradients: list[Tensor | None] = dataclasses.field(default_factory=list)
    outputs: list[tuple[Tensor, int]] = dataclasses.field(default_factory=list)
    size_bytes: int = 0

    @property
    def has_gradient(self) -> bool:
        """Whether a backward has come through this forward, so that gradients of its outputs are kept."""
        return any(gradient is not None for gradient in self.gradients)

    def original_outputs(self) -> list[Tensor]:
        """Return the tensors that the forward returned in the step.

        [] if they were not kept or were written to since.
        """
        intact = all(tensor._version == version for tensor, version in self.outputs)
        return [tensor for tensor, _ in self.outputs] if intact else []

    def forget_outputs(self) -> None:
        """Release the tensors that the forward returned: a replay can do without them."""
        self.size_bytes -= size_bytes([tensor for tensor, _ in self.outputs])
        self.outputs = []

    def given(self) -> tuple[Any, ...]:
        """Return all inputs of the root: arguments, and values set in attributes."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.tree)
        return args, kwargs, [handed.value for handed in self.handed]

    def check(self) -> None:
        """Raise an error if something that is kept by reference was changed since.

        Raises:
            NotCoveredError: It was.
        """
        if self.versions != versions_of(self.given()):
            raise NotCoveredError("an input of the model was overwritten after the forward")
        for buffer in self.buffers:
            buffer.check()


class _KeptRoot:
    """What is looked at in a root at each of its forwards; `handed` are the attributes in which it is given values."""

    def __init__(self, model: nn.Module, handed: Iterable[tuple[nn.Module, str]]) -> None:
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())
        self.buffers = BufferKeeper(model)
        self.handed = list(handed)

    def handed_values(self) -> list[HandedValue]:
        return [HandedValue(module, name, getattr(module, name, None)) for module, name in self.handed]


class ForwardKeeper:
    """Keeps what is needed to replay the forwards of the current step, within `memory_bytes`.

    `stages` are the roots that the training loop calls, `replayable` says what the framework requires. Beyond the
    budget the oldest forwards are released: the fault that shows at the end of a step is likeliest in what is still
    there, and `dropped` counts the rest, root by root. `is_differentiated` says that a backward of the step was
    recorded (`create_graph`), so that there may have been a backward through it; `is_transformed`, that a forward ran
    in a transform of torch.func, which keeps it to itself. Forwards without gradient are never kept. Arguments,
    outputs and gradients are kept by reference, generators and changing buffers as copies.
    """

    tripped = False  # a fault costs one forward, not those that follow

    def __init__(
        self, stages: Sequence[ModelStage] | nn.Module, replayable: Replayable | None = None, *, memory_bytes: int
    ) -> None:
        self.stages = [stage_of(stages)] if isinstance(stages, nn.Module) else list(stages)
        self.forwards: list[KeptForward] = []
        self.dropped = [0] * len(self.stages)
        self.muted = False
        self.error = ""
        self.is_differentiated = self.is_transformed = False
        self._replayable = replayable or Replayable()
        self._memory_bytes = memory_bytes
        self.devices = sorted({device for stage in self.stages for device in accelerators(stage.model)}, key=str)
        self._roots = [
            _KeptRoot(stage.model, self._replayable.handed(number)) for number, stage in enumerate(self.stages)
        ]
        self._can_repeat: bool | None = None
        self._handles: list[RemovableHandle] = []
        self._current: tuple[KeptForward, Sequence[Tensor]] | None = None  # with the tensors that it was given

    @property
    def attached(self) -> bool:
        """Whether its hooks are on the model."""
        return bool(self._handles)

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that are kept alive: arguments, copies of buffers, gradients."""
        return sum(map(_SIZE, self.forwards))

    def attach(self) -> None:
        """Watch the forwards from now on: before all other pre hooks, behind all other hooks."""
        if self._handles:
            return
        behind = ContainedCall(self, self._behind)
        for number, stage in enumerate(self.stages):
            before = ContainedCall(self, self._before, (number,))
            self._handles.append(stage.entry.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(stage.entry.register_forward_hook(behind))

    def detach(self) -> None:
        """Remove the hooks; what was kept stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._current = None

    def reset(self) -> None:
        """Release everything that was kept: the step is over."""
        self.forwards.clear()
        self.dropped = [0] * len(self.stages)
        self.error = ""
        self.is_differentiated = self.is_transformed = False
        self._current = None

    def take_over(self, forwards: Sequence[KeptForward], dropped: int) -> None:
        """Keep, instead of own ones, the forwards of a step that another process kept on disk, of a single root.

        `dropped` is how many before them were not kept.
        """
        self.reset()
        self.forwards = list(forwards)
        self.dropped = [dropped]

    def trip(self, error: BaseException) -> None:
        """Remember why a forward was not kept, or not fully; called in place of raising into training."""
        self.error = f"{type(error).__name__}: {error}"

    def complete(self, stage: int) -> list[KeptForward]:
        """Return the kept forwards of the root `stage` through which a backward has come, in order."""
        return [kept for kept in self.forwards if kept.stage == stage and kept.has_gradient]

    def _before(self, stage: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._current = None
        if self.muted or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        if is_traced():  # what is copied here would become part of the trace
            self.is_transformed |= torch._C._functorch.peek_interpreter_stack() is not None
            return
        root = self._roots[stage]
        handed = root.handed_values() if root.handed else []
        # a walk takes as long as all else here
        is_plain = not kwargs and not handed and set(map(type, args)) == _TENSORS
        leaves, tree = (list(args), _tree_of(len(args))) if is_plain else pytree.tree_flatten((args, kwargs))
        given = leaves if is_plain else _tensors((args, kwargs, [each.value for each in handed]))
        kept = KeptForward(
            stage=stage,
            leaves=leaves,
            tree=tree,
            handed=handed,
            generators=self._replayable.generators() if is_plain else self._generators(leaves),
            versions=_versions(given),
            random=RandomState.current(self.devices),
            autocast=AutocastState.current(self.devices),
            training=tuple(map(_TRAINS, root.modules)),
            buffers=root.buffers.keep(),
            parameter_versions=sum(map(_VERSION, root.parameters)) if self._replayable.shadowed else 0,
        )
        self._current = kept, given

    def _generators(self, leaves: Sequence[Any]) -> Callable[[], None]:
        """Return what puts back the generators that are the framework's own, or among `leaves`."""
        return _all_of([self._replayable.generators(), *map(restore_generator, leaves)])

    def _behind(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        current, self._current = self._current, None
        if current is not None:
            self._keep(*current, output)

    def _keep(self, kept: KeptForward, given: Sequence[Tensor], output: Any) -> None:
        returned = differentiable(output)
        if not returned:
            return
        root = self._roots[kept.stage]
        # not where they are gathered for each forward, and so written to
        if self._replayable.shadowed and sum(map(_VERSION, root.parameters)) != kept.parameter_versions:
            # as an embedding with max_norm does; a replay would do it once more
            self.error = "the model writes to its parameters in its forward"
            return
        if self._can_repeat is None:
            self._can_repeat = self._is_repeatable(returned)
        if not self._can_repeat:
            self.error = "reentrant activation checkpointing cannot be asked for single gradients"
            return
        clones: list[Tensor] = []
        if kept.buffers:
            kept.buffers = root.buffers.learn(kept.buffers)
            clones = [buffer.clone for buffer in kept.buffers if buffer.clone is not None]
        kept.gradients = [None] * len(returned)
        for index, tensor in enumerate(returned):
            hook_gradient(tensor, ContainedCall(self, self._gradient, (kept, index)))
        kept.outputs = [(tensor.detach(), tensor._version) for tensor in returned]
        kept.size_bytes = size_bytes([*given, *clones, *returned])
        self.forwards.append(kept)
        self._hold_budget()

    def _is_repeatable(self, returned: list[Tensor]) -> bool:
        """Return whether a replay can run the backward of what was returned; looked at in the first forward."""
        asks = not self._replayable.shadowed and not self._replayable.accumulates
        return not (asks and has_reentrant_checkpoint(returned))

    def _gradient(self, kept: KeptForward, index: int, gradient: Tensor | None) -> None:
        if gradient is None or self.muted:  # None: another output of the same node was used, not this one
            return
        if torch.is_grad_enabled():  # only where the backward itself is recorded
            self.is_differentiated = True
        before = kept.gradients[index]
        kept.gradients[index] = gradient.detach() if before is None else before + gradient.detach()
        if before is None:
            kept.size_bytes += size_bytes([gradient])
        self._hold_budget()

    def _hold_budget(self) -> None:
        if sum(map(_SIZE, self.forwards)) <= self._memory_bytes:
            return
        for kept in self.forwards:
            kept.forget_outputs()
        while self.forwards and self.size_bytes > self._memory_bytes:
            self.dropped[self.forwards.pop(0).stage] += 1


@functools.cache
def _tree_of(num_args: int) -> pytree.TreeSpec:
    """Return the structure of so many arguments by position."""
    return pytree.tree_flatten(((0,) * num_args, {}))[1]


def _all_of(actions: Iterable[Callable[[], Any] | None]) -> Callable[[], None]:
    chosen = [action for action in actions if action is not None]

    def act() -> None:
        for action in chosen:
            action()

    return act


def differentiable(output: Any) -> list[Tensor]:
    """Return the distinct tensors in what a module returned through which a backward can come."""
    if type(output) is Tensor:
        return [output] if output.grad_fn is not None else []
    found: list[Tensor] = []
    for _, tensor in tensors_of(output):
        if tensor.grad_fn is not None and not any(tensor is other for other in found):
            found.append(tensor)
    return found


def versions_of(given: Any) -> tuple[int, ...]:
    """Return, for each tensor among what a module was given, torch's counter of writes to it."""
    return _versions(_tensors(given))


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    try:
        return (*map(_VERSION, tensors),)
    except RuntimeError:  # an inference tensor counts no writes
        return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _tensors(given: Any) -> list[Tensor]:
    return [tensor for _, tensor in tensors_of(given)]


def size_bytes(tensors: Sequence[Tensor]) -> int:
    """Return how many bytes the elements of `tensors` take."""
    return sum(map(operator.mul, map(Tensor.numel, tensors), map(Tensor.element_size, tensors)))
