"""Plain PyTorch: modules and a torch optimizer in one process; nothing is reduced, nothing is sharded."""

from __future__ import annotations

import inspect
import logging
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates, Placement
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.names import plain_name
from trainermon.hooks.tensor_hooks import hook_accumulated
from trainermon.monitor.frameworks.held_places import HeldPlaces, unstepped
from trainermon.monitor.taps.training import (
    GradientVersion,
    HeldParameter,
    HookMaker,
    OptimizerState,
    StepOutcome,
    TapHandle,
    Training,
    WatchedModule,
    groups_of,
)

logger = logging.getLogger("trainermon")

_LOOKS = 32
# Called by `map`, which saves the interpreter's share of the time.
_GRADIENT, _VERSION = operator.attrgetter("tensor.grad"), operator.attrgetter("_version")
_NUM_WRITES = operator.attrgetter("tensor._version")
_SCRIPTED = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]
_READABLE = (torch.strided, torch.sparse_coo)
# The code of what torch puts around the step of every class of optimizers; it calls the hooks.
_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


class PlainTraining(Training):
    """How a model is watched whose parameters are whole on each rank and are stepped directly by a torch optimizer."""

    framework = "plain"
    final_when_accumulated = True
    counts_writes = True
    of_late = ""
    keeps_parameters: ClassVar[bool] = True
    optimizer: torch.optim.Optimizer
    _held: HeldPlaces | None = None
    _gone: frozenset[int] = frozenset()
    _taken_out: frozenset[int] = frozenset()
    _groups: Sequence[object] = ()

    def watch_step(
        self,
        guard: FaultGuard,
        *,
        entry: Callable[[], None],
        exit: Callable[[StepOutcome], None],
        hooks: HookMaker | None = None,
    ) -> list[TapHandle]:
        """Call `entry` and `exit(outcome)` from the optimizer's own step hooks, and return these.

        With a closure, `entry` comes after its first call, when gradients exist.
        """
        contained, untold = guard.wrap(entry), StepOutcome()

        may_nest = _may_nest(self.optimizer)

        def begins(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if may_nest and _is_nested(optimizer):
                return None
            if kwargs or len(args) > 1:
                return _enter(contained, args, kwargs)
            return entry()

        def ends(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not (may_nest and _is_nested(optimizer)):
                exit(untold)

        if hooks is None or may_nest:
            before, after = guard.wrap(begins), guard.wrap(ends)
        else:
            before, after = hooks.entry(guard, begins), hooks.exit(guard, ends)
        return [self.optimizer.register_step_pre_hook(before), self.optimizer.register_step_post_hook(after)]

    def follow(self, optimizer: Any) -> bool:
        """Take `optimizer` for the outer one from now on, unless it steps a share of its parameters only."""
        if is_sharding(optimizer):
            return False
        self.optimizer = optimizer
        if self._held is not None:
            self._held.follow(optimizer)
        return True

    def is_stepping(self) -> bool:
        """Return whether the optimizer's `step` is running now."""
        return next(_steps_of(self.optimizer, sys._getframe()), None) is not None

    def watch_accumulation(self, guard: FaultGuard, reached: Callable[[int], None]) -> list[TapHandle]:
        """Call `reached(stage)` whenever a backward adds to a gradient of that virtual stage; return the hooks.

        They are on every parameter, as the script may train other ones from step to step.
        """

        def hook_of(stage: int) -> Callable[[Tensor], None]:
            return guard.wrap(lambda _parameter: reached(stage))

        hooks = [hook_of(stage) for stage in range(len(self.roots))]
        held = {id(p): (p, hooks[stage]) for stage, root in enumerate(self.roots) for p in root.parameters()}
        return [hook_accumulated(p, hook) for p, hook in held.values() if p.is_floating_point() or p.is_complex()]

    def gradients_are_gone(self) -> bool:
        """Return whether the script has dropped all gradients: no parameter has one.

        Usually looks at one parameter only; not at those that another optimizer steps.
        """
        others = self.unstepped
        own = (p for i, p in enumerate(self.parameters) if i not in others)
        return all(p.tensor.grad is None for p in (*own, *self.late))

    def look_for_changes(self) -> str:
        """Return, in words, which parameters were replaced, added or unfrozen since the last look; "" for none.

        Some microseconds. What was replaced has no gradient and no value from now on; see `late` for what is new.
        """
        if not self.keeps_parameters:
            return ""
        if self._held is None:
            self._find_unstepped()
            self._held = HeldPlaces(self.parameters, self.roots, self.optimizer, self.of_late)
        found = self._held.look()
        self._gone, self.late, self.successors = self._held.gone, self._held.late, self._held.successors
        return found

    def num_writes(self) -> int | None:
        """Return how often 32 of the parameters were written to so far; a fused optimizer's writes are not counted."""
        return sum(map(_NUM_WRITES, self.parameters[:_LOOKS])) if self.keeps_parameters else None

    def reduced_gradients(self) -> list[Tensor | None]:
        """Return `.grad` of each parameter; None where it has none, or the optimizer does not step it."""
        self._find_unstepped()
        return self._without_absent([*map(_GRADIENT, self.parameters)])

    def gradient_versions(self) -> list[GradientVersion]:
        """Return by parameter its gradient and the counter of writes of that. 0.8 µs each.

        A write through `.data` is not counted.
        """
        gradients = [*map(_GRADIENT, self.parameters)]
        try:
            return [*zip(map(weakref.ref, gradients), map(_VERSION, gradients), strict=True)]
        except TypeError:  # one is None
            return [(None, 0) if found is None else (weakref.ref(found), found._version) for found in gradients]

    def values(self) -> list[Tensor | None]:
        """Return the parameters themselves, which the optimizer steps."""
        return self._without_absent([parameter.tensor for parameter in self.parameters])

    def used_weights(self) -> list[Tensor | None]:
        """Return by parameter the model's own tensor where the optimizer never stepped it; None if it was replaced."""
        found = super().used_weights()
        for i in self._gone | self._taken_out:
            found[i] = None
        return found

    def states(self) -> list[OptimizerState | None]:
        """Return by parameter its `OptimizerState`; None before its first step."""
        return states_of(self.optimizer, self.parameters)

    def _find_unstepped(self) -> None:
        """Find out which parameters are in no group, if the groups have changed; else 1 µs."""
        if not self.keeps_parameters or self.shows_unstepped:
            return
        groups = groups_of(self.optimizer)
        if groups != self._groups:
            now = unstepped(self.optimizer, self.parameters)
            self._taken_out = (now - self.unstepped | self._taken_out) & now if self._groups else frozenset()
            self.unstepped, self._groups = now, groups

    def _without_absent(self, found: list[Tensor | None]) -> list[Tensor | None]:
        for i in self._gone | self.unstepped if self._gone else self.unstepped:
            found[i] = None
        return found


def recognises(chunks: Sequence[nn.Module], optimizer: object) -> bool:
    """Return whether this is a torch optimizer over parameters that are whole on this rank.

    Raises:
        AttachError: The parameters are sharded in a way that no other module here recognised.
    """
    for chunk in chunks:
        sharded = next((type(p) for p in chunk.parameters() if hasattr(p, "placements")), None)
        if sharded is not None:
            raise AttachError(
                f"model: found parameters of {sharded.__module__}.{sharded.__qualname__}, which plain training has not"
            )
    return isinstance(optimizer, torch.optim.Optimizer)


def describe(chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, coordinates: Coordinates) -> Training:
    """Return how the training of `chunks` (one module, or virtual pipeline stages in order), unwrapped, is watched."""
    training = PlainTraining(
        model=chunks[0],
        roots=tuple(chunks),
        modules=modules_of(chunks),
        parameters=parameters_of(chunks),
        optimizer=optimizer,
    )
    if training.parameters:
        require_stepped(training)
    if coordinates.world_size > 1 and torch.distributed.is_available() and torch.distributed.is_initialized():
        # the script may reduce gradients itself, which nothing but the optimizer's step is certain to come after
        training.final_when_accumulated, training.reads_at_entry = False, True
        logger.warning(
            "%s that reduces gradients, and there are %d ranks: gradients are read when the optimizer steps, so that "
            "reductions by the script itself are in them, and its clipping too; whether ranks hold copies of a "
            "parameter is not known, so they are not compared",
            _unwrapped(chunks),
            coordinates.world_size,
        )
    return training


def _unwrapped(chunks: Sequence[nn.Module]) -> str:
    """Return in words what of the model is in a wrapper."""
    modules = [(name, module) for chunk in chunks for name, module in chunk.named_modules()]
    wrapped = [name for name, module in modules if isinstance(module, DistributedDataParallel)]
    return f"only {', '.join(wrapped)} is in a wrapper" if wrapped else "the model is in no wrapper"


def is_sharding(optimizer: object) -> bool:
    """Return whether each rank's step of this optimizer moves a share of its parameters only."""
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)


def modules_of(chunks: Sequence[nn.Module]) -> tuple[WatchedModule, ...]:
    """Return every module below the roots, each once, by the name that the user's model gives it.

    Where a wrapper inside of the model (activation checkpointing, FSDP1) has the plain name of what it wraps, that one
    is meant. What torch.jit.script made takes no hooks and is left out, which the log says.

    Raises:
        AttachError: A root itself is scripted.
    """
    if any(isinstance(chunk, _SCRIPTED) for chunk in chunks):
        raise AttachError(
            "model: found a torch.jit.script module, which takes no hooks; put it into a torch.nn.Module that calls it"
        )
    found = {
        (stage, plain_name(name)): WatchedModule(plain_name(name), module, stage)
        for stage, chunk in enumerate(chunks)
        for name, module in chunk.named_modules()
        if plain_name(name)
    }
    scripted = [module.name for module in found.values() if isinstance(module.module, _SCRIPTED)]
    if scripted:
        logger.warning("torch.jit.script modules take no hooks: %d are not watched (%s …)", len(scripted), scripted[0])
    return tuple(module for module in found.values() if not isinstance(module.module, _SCRIPTED))


def states_of(optimizer: torch.optim.Optimizer, parameters: Sequence[HeldParameter]) -> list[OptimizerState | None]:
    """Return what `optimizer` keeps of each parameter; None where it has nothing yet or steps others only.

    A parameter that the script took out of its group may have left its state behind: it is stepped no more.
    """
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = optimizer.state
    return [
        OptimizerState(p.tensor, state, group_of[id(p.tensor)])
        if (state := found.get(p.tensor)) and id(p.tensor) in group_of
        else None
        for p in parameters
    ]


def parameters_of(
    chunks: Sequence[nn.Module], *, replicated_over: tuple[str, ...] = (), in_global_norm: bool = True
) -> tuple[HeldParameter, ...]:
    """Return every parameter that requires a gradient; a shared one once, under its first name.

    Raises:
        AttachError: A parameter has no shape yet (a lazy module), or a layout that cannot be read.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and parameter.layout not in _READABLE:
                raise AttachError(
                    f"model: parameter {name} is {parameter.layout}, expected torch.strided or torch.sparse_coo; set "
                    "requires_grad to False, or train its dense form"
                )
            if nn.parameter.is_lazy(parameter):
                raise AttachError(f"model: parameter {name} has no shape yet; run one forward before set_monitor")
    return tuple(
        HeldParameter(
            plain_name(name),
            parameter,
            Placement(
                dtype=str(parameter.dtype).removeprefix("torch."),
                shape=tuple(parameter.shape),
                replicated_over=replicated_over,
                in_global_norm=in_global_norm,
            ),
            stage,
        )
        for stage, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    )


def require_stepped(training: Training) -> None:
    """Raise an error if the optimizer steps no parameter of the model.

    Raises:
        AttachError: It does not: it is another model's.
    """
    stepped = {id(p) for group in training.optimizer.param_groups for p in group["params"]}
    if not any(id(parameter.tensor) in stepped for parameter in training.parameters):
        raise AttachError(
            f"optimizer: {type(training.optimizer).__name__} steps none of the model's {len(training.parameters)} "
            "parameters: it is another model's, or was made before the model was moved, wrapped or sharded; make it of "
            "the parameters that the model has now, and pass both"
        )


def _may_nest(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of `optimizer` may call another one of it: its class's the one of another class."""
    steps = (vars(cls).get("step") for cls in type(optimizer).__mro__ if cls is not torch.optim.Optimizer)
    return len({inspect.unwrap(step) for step in steps if callable(step)}) > 1


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return, in a hook of a step of `optimizer`, whether that step was called by another one of it: its subclass's.

    torch calls hooks around both. The stack tells, and no counter, which a step that raises would leave behind. 1 µs.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    return frame is not None and next(_steps_of(optimizer, frame.f_back), None) is not None


def _steps_of(optimizer: torch.optim.Optimizer, frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames from `frame` outwards in which a step of `optimizer` runs."""
    while frame is not None:
        if frame.f_code is _STEP and frame.f_locals.get("self") is optimizer:
            yield frame
        frame = frame.f_back


def _enter(
    entry: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call `entry` now, or, where the step was given a closure, return arguments with one that calls it.

    An optimizer's step may take something else in that place.
    """
    is_positional = len(args) > 1 and callable(args[1])
    closure = args[1] if is_positional else kwargs.get("closure")
    if not callable(closure):
        entry()
        return None
    is_first = True

    def watched_closure() -> Any:
        nonlocal is_first
        loss = closure()
        if is_first:
            is_first = False
            entry()
        return loss

    if is_positional:
        return (args[0], watched_closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": watched_closure}
