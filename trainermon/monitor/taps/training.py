"""What the taps need to know of a training set-up; every framework answers it in its own module of `frameworks/`."""

from __future__ import annotations

import abc
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from operator import methodcaller
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey
from trainermon.hooks.guard import ContainedCall, FaultGuard
from trainermon.hooks.replayable import Replayable
from trainermon.hooks.tensor_hooks import hook_accumulated, hook_leaf

GradientVersion = tuple[weakref.ref[Tensor] | None, int]
"""A gradient, which need not live on, and a number that is higher after each write to it; (None, 0) for none."""
_RATE = methodcaller("get", "lr")


class TapHandle(Protocol):
    """Interface of a hook or patch that can be removed again, as torch's hook handles can."""

    def remove(self) -> None:
        """Remove the hook or patch; does nothing the second time."""


class HookMaker(Protocol):
    """Interface of what makes the hooks at both ends of the optimizer's step, each of a function and its guard."""

    def entry(self, guard: FaultGuard, function: Callable[..., Any]) -> ContainedCall:
        """Return the hook at its begin."""

    def exit(self, guard: FaultGuard, function: Callable[..., Any]) -> ContainedCall:
        """Return the hook at its end."""


class WatchedModule(NamedTuple):
    """A module to watch.

    Attributes:
        name: Its plain name in the whole model (global layer and expert numbers).
        module: The module.
        stage: Its virtual pipeline stage.
    """

    name: str
    module: nn.Module
    stage: int = 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeldParameter:
    """A parameter as this rank holds it.

    Attributes:
        name: Plain name in the whole model: wrappers stripped, layer and expert numbers global.
        tensor: The parameter that the user's module holds.
        placement: How the gradient of one backward of this rank (its unreduced gradient) relates to the whole.
        stage: Virtual pipeline stage.
        shard: How what this rank's optimizer holds (reduced gradient, value, state) relates to the whole; None where it
            is the same as `placement`. Its `length` is 0 where the rank's optimizer holds nothing of the parameter.
    """

    name: str
    tensor: nn.Parameter
    placement: Placement
    stage: int = 0
    shard: Placement | None = None

    @property
    def owned(self) -> Placement:
        """How what this rank's optimizer holds (reduced gradient, value, state) relates to the whole parameter."""
        return self.shard or self.placement

    def key(self, kind: Kind, slot: str = "", micro_step: int | None = None) -> SeriesKey:
        """Return the key of this parameter's series of `kind`."""
        return SeriesKey(kind, self.name, slot, micro_step=micro_step, stage=self.stage)


class OptimizerState(NamedTuple):
    """What the optimizer keeps for one parameter.

    Attributes:
        value: The tensor that it steps (the fp32 main copy or shard where there is one): what a moment has to have the
            shape of.
        state: Tensors and numbers by name (`exp_avg`, `step` …).
        group: Hyperparameters of the parameter's group (`lr` …).
    """

    value: Tensor
    state: Mapping[str, Any]
    group: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of one outer optimizer step, by the framework's own account; None where it does not tell.

    Attributes:
        skipped: The step changed nothing (a gradient was not finite under a loss scale).
        grad_norm: L2 norm of all gradients over the job before clipping, unscaled.
        max_norm: Norm that gradients are clipped to.
        loss_scale: What the loss was multiplied by in this step.
    """

    skipped: bool | None = None
    grad_norm: float | Tensor | None = None
    max_norm: float | None = None
    loss_scale: float | Tensor | None = None


class Training(abc.ABC):
    """A model and its optimizer as a framework holds them.

    Methods that return lists return one entry per `parameters`, in that order, None where this rank holds nothing.
    They hand out the framework's own tensors or views of them: no copy, no collective, no synchronisation. Methods
    named `watch_…` attach something and return what takes it away again; what they attach is contained by `guard`.

    Attributes:
        framework: Its name, for people.
        model: The model as the training loop calls it; the first of its stages.
        roots: One module per virtual pipeline stage, below any wrapper that communicates.
        modules: Every module below the roots, in definition order.
        parameters: Every parameter that required a gradient when they were listed; it may be frozen since.
        optimizer: The outer optimizer: the one whose step ends a training step.
        keeps_parameters: The model holds the same parameters before and after a step, unless the script changes them.
        reads_at_entry: Reduced gradients are final at the entry of the outer step, unclipped. False: at the end of the
            step's last backward (where the user clips by himself before the step).
        final_when_accumulated: Nothing touches a gradient between the moment at which the step's last backward has
            accumulated it and the script's own clipping; then it is read at that moment, while it is in the cache.
        counts_writes: Backwards add to `.grad` of the parameters themselves, and nothing else writes to it unseen.
        holds_replicas: At entry of the outer step the model's own parameters are there, whole, wherever their placement
            says that other ranks hold copies. False: they are sharded then.
        reduces: Gradients are reduced over ranks, so that an unreduced gradient is something else than a reduced one.
        waits_in_backward: The host waits for other ranks at the end of a backward, in no call that is seen.
        is_pipelined: Each forward is a micro step of its own, and several may have begun before the first has its
            backward. False: all forwards before a backward belong to one micro step.
        reduced_by_script: Positions of the parameters that the framework's reduction leaves out: only the script can
            reduce their gradients, so these are final at the entry of the outer step.
        unreduced_once: `watch_unreduced` reports once per step, not once per backward.
        coordinates: Where this rank stands, if the framework knows better than the launcher; else None.
        unstepped: Positions of the parameters that are in no group of the outer optimizer, if that can be told: another
            one may step them, at other times, so their gradients belong to no step of this one.
        late: Parameters that the script has put in, or unfrozen, since `parameters` were listed, and that are stepped;
            only their gradients are read.
        successors: By position, what the model holds now in the place of a parameter; None for nothing. Only of those
            that were replaced; another mapping whenever that changes.
        shows_unstepped: Whether these are shown all the same, with the step of the outer one.
        communicates: Which axes the forward communicates over ("tp", "cp", "ep", "dp" …): a replay needs all ranks of
            them. Empty: one rank can replay alone.
    """

    framework: ClassVar[str]
    keeps_parameters: ClassVar[bool] = False
    reads_at_entry: bool = False
    final_when_accumulated: bool = False
    counts_writes: bool = False
    holds_replicas: bool = True
    reduces: bool = False
    waits_in_backward: bool = False
    is_pipelined: bool = False
    reduced_by_script: frozenset[int] = frozenset()
    unreduced_once: bool = False
    coordinates: Coordinates | None = None
    unstepped: frozenset[int] = frozenset()
    late: Sequence[HeldParameter] = ()
    successors: Mapping[int, Tensor | None] = MappingProxyType({})
    shows_unstepped: bool = False
    communicates: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        model: nn.Module,
        roots: Sequence[nn.Module],
        modules: Sequence[WatchedModule],
        parameters: Sequence[HeldParameter],
        optimizer: Any,
    ) -> None:
        self.model = model
        self.roots = tuple(roots)
        self.modules = tuple(modules)
        self.parameters = tuple(parameters)
        self.optimizer = optimizer

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, where statistics are computed and kept."""
        return self.parameters[0].tensor.device

    def process_groups(self) -> Mapping[str, Any]:
        """Return the framework's process groups of this rank by purpose ("dp", "tp", "pp", "ep", "cp" …)."""
        return {}

    # ------------------------------------------------------------------ the step

    @abc.abstractmethod
    def watch_step(
        self,
        guard: FaultGuard,
        *,
        entry: Callable[[], None],
        exit: Callable[[StepOutcome], None],  # the counterpart of entry
        hooks: HookMaker | None = None,
    ) -> list[TapHandle]:
        """Call `entry` before the outer optimizer step and `exit(outcome)` after it; return the hooks.

        `hooks` makes them; by default `guard` does.
        """

    def follow(self, optimizer: Any) -> bool:
        """Take `optimizer` for the outer one from now on; return False, and change nothing, where that cannot be done.

        It holds all that the one before holds and that still needs a gradient.
        """
        del optimizer
        return False

    def is_stepping(self) -> bool:
        """Return whether the outer step that has begun still runs; it may have been left by an exception."""
        return True

    def allows_uneven_steps(self) -> bool:
        """Return whether ranks may take different numbers of steps now, so that equal numbers mean different steps."""
        return False

    def gradient_versions(self) -> list[GradientVersion]:
        """Return by parameter its gradient and how often that was written to so far; empty if not known."""
        return []

    def gradient_sharers(self) -> list[int]:
        """Return by parameter how many gradients share one counter of writes: one write to each counts so often."""
        return [1] * len(self.parameters)

    def watch_decision(self, guard: FaultGuard, decide: Callable[[bool], None]) -> list[TapHandle]:
        """Call `decide(nonfinite)` inside the outer step, once the framework itself knows whether gradients are finite.

        It knows by its global norm or found-inf. The value is the same on all ranks, because the framework reduced it,
        and no parameter has been written yet. Returns the hooks; an empty list where a framework has no such place.
        """
        del guard, decide
        return []

    def replayable(self) -> Replayable:
        """Return whether and how a step is replayed with this framework.

        By default not at all, if the model communicates.
        """
        if not self.communicates:
            return Replayable()
        axes = ", ".join(self.communicates)
        return Replayable(refusal=f"the forward of {self.framework} training communicates over {axes}")

    # ------------------------------------------------------------------ gradients

    def watch_accumulation(self, guard: FaultGuard, reached: Callable[[int], None]) -> list[TapHandle]:
        """Call `reached(stage)` whenever a backward adds to a gradient of that virtual stage; return the hooks."""

        def hook_of(stage: int) -> Callable[[Tensor], None]:
            return guard.wrap(lambda _parameter: reached(stage))

        hooks = {stage: hook_of(stage) for stage in {p.stage for p in self.parameters}}
        return [hook_accumulated(p.tensor, hooks[p.stage]) for p in self.parameters]

    def watch_unreduced(self, guard: FaultGuard, see: Callable[[int, Tensor], None]) -> list[TapHandle]:
        """Call `see(index, gradient)` with the gradient that this rank accumulated, before it is reduced over ranks.

        `index` is the parameter's position in `parameters`; `guard` contains errors of `see`. Returns the hooks; an
        empty list where no such gradient exists (reduced in every micro step).
        """
        del guard, see
        return []

    def watch_micro_gradients(self, guard: FaultGuard, see: Callable[[int, Tensor], None]) -> list[TapHandle]:
        """Call `see(index, gradient)` with what each backward of this rank adds to a gradient; return the hooks."""

        def hook_of(index: int) -> Callable[[Tensor], None]:
            return guard.wrap(lambda gradient: None if gradient is None else see(index, gradient))

        return [hook_leaf(p.tensor, hook_of(index)) for index, p in enumerate(self.parameters)]

    def is_reduced_now(self) -> bool:
        """Return, at the end of a backward, whether its gradients were reduced over ranks."""
        return False

    tells_last: Callable[[], bool | None] = staticmethod(lambda: None)
    """Returns whether the backward that runs is the step's last, where the loop's library tells; else None."""

    def gradients_are_gone(self) -> bool:
        """Return whether the script has thrown the accumulated gradients away (`zero_grad`) without a step."""
        return False

    def look_for_changes(self) -> str:
        """Return, in words, which parameters the model or the optimizer holds that are not watched, else "".

        Looks at a few of them a call, so that it costs some microseconds; "" without `keeps_parameters`.
        """
        return ""

    def num_writes(self) -> int | None:
        """Return how often some of the parameters were written to; None where the framework writes to them itself."""
        return None

    @abc.abstractmethod
    def reduced_gradients(self) -> list[Tensor | None]:
        """Return, by parameter, the part of its reduced gradient that this rank's optimizer is about to use.

        None for nothing.
        """

    # ------------------------------------------------------------------ optimizer

    @abc.abstractmethod
    def values(self) -> list[Tensor | None]:
        """Return, by parameter, the tensor that this rank's optimizer steps; None where there is none.

        These are main copies or shards where there are any.
        """

    def used_weights(self) -> list[Tensor | None]:
        """Return by parameter the model's own tensor, None where this rank's optimizer steps that very tensor.

        Meant for the entry of the step: the forward has used them. They are another tensor where the optimizer keeps a
        main copy, or steps a part of them or nothing. None too of what is sharded, unless the framework knows better.
        """
        if not self.holds_replicas:
            return [None] * len(self.parameters)
        pairs = zip((parameter.tensor for parameter in self.parameters), self.values(), strict=True)
        return [None if own is stepped or _is_same(own, stepped) else own for own, stepped in pairs]

    @abc.abstractmethod
    def states(self) -> list[OptimizerState | None]:
        """Return by parameter its `OptimizerState`; None before its first step, or if this rank steps no part of it."""

    # ------------------------------------------------------------------ what is recorded without being asked

    def loss_of(self, output: Any) -> Tensor | None:
        """Return the loss in what the root returned: a scalar, or its `loss`; None if there is none."""
        if type(output) is Tensor:  # the usual case: to find that it has no `loss` takes 4 µs
            found: Any = output
        else:
            found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        return found if isinstance(found, Tensor) and found.numel() == 1 and found.is_floating_point() else None

    def learning_rates(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group; a tensor where the optimizer keeps it on the device.

        A group whose `lr` is neither, as optimizers with a rate of their own making have, is left out.
        """
        rates = [*map(_RATE, self.optimizer.param_groups)]
        if {*map(type, rates)} == {float}:  # the usual case: to ask for a `Real` takes a while
            return rates
        return [rate if isinstance(rate, Tensor) else float(rate) for rate in rates if isinstance(rate, Tensor | Real)]

    def settings(self) -> Sequence[Mapping[str, Any]]:
        """Return what is set for each parameter group, by torch's names of it."""
        found: Sequence[Mapping[str, Any]] = self.optimizer.param_groups
        return found


def groups_of(optimizer: Any) -> list[tuple[int, ...]]:
    """Return what is another list, in all likelihood, once other parameters are in the groups of a torch optimizer."""
    held = [group["params"] for group in optimizer.param_groups]
    return [(id(params), len(params), *map(id, params[:1]), *map(id, params[-1:])) for params in held]


def _is_same(own: Tensor, stepped: Tensor | None) -> bool:
    """Return whether `own` has no elements, or those of `stepped`."""
    if stepped is None:
        return own.numel() == 0
    return own.numel() == 0 or (own.data_ptr() == stepped.data_ptr() and own.numel() == stepped.numel())
