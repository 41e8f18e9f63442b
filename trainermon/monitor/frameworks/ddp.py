"""DistributedDataParallel: every rank holds all parameters, gradients are averaged during the backward."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.tensor_hooks import hook_accumulated
from trainermon.monitor.frameworks import plain
from trainermon.monitor.taps.training import HeldParameter, TapHandle

logger = logging.getLogger("trainermon")

_TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_NAMED = 5  # parameters that a message lists
_BY_DESIGN = "expert"  # part of the names of parameters that each rank may have others of
_ROUNDING_HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


class DdpTraining(plain.PlainTraining):
    """A model in torch's DistributedDataParallel.

    What a rank accumulated is seen in hooks that run before the reduction. All else is as in `PlainTraining`.
    """

    framework = "ddp"
    final_when_accumulated = False
    reduces = True
    of_late = (
        "DistributedDataParallel reduces only what required a gradient when it wrapped the model: of what did not, or "
        "was not there, each rank goes on with a gradient of its own, unless the model is wrapped again"
    )
    wrappers: Sequence[DistributedDataParallel]

    def watch_unreduced(self, guard: FaultGuard, see: Callable[[int, Tensor], None]) -> list[TapHandle]:
        """Call `see(index, gradient)` with each parameter's `.grad` before DDP reduces it; return the hooks.

        `index` is the parameter's position in `parameters`. These are post-accumulate hooks, which run inside the node
        that the reducer hangs behind. `guard` contains errors of `see`.
        """

        def hook_of(index: int) -> Callable[[Tensor], None]:
            return guard.wrap(lambda parameter: None if parameter.grad is None else see(index, parameter.grad))

        return [hook_accumulated(p.tensor, hook_of(i)) for i, p in enumerate(self.parameters)]

    def allows_uneven_steps(self) -> bool:
        """Return whether the model trains under torch's `Join`: ranks with fewer batches only shadow the others."""
        return any(wrapper._join_config.enable for wrapper in self.wrappers)

    def is_reduced_now(self) -> bool:
        """Return, at the end of a backward, whether DDP reduced its gradients: it was outside of `no_sync()`."""
        return any(wrapper.require_backward_grad_sync for wrapper in self.wrappers)


def recognises(chunks: Sequence[nn.Module], optimizer: object) -> bool:
    """Return whether the model is in DistributedDataParallel, possibly compiled around it, or a part of it is.

    Of a part only where it is reduced over all ranks of the job: then they all hold copies of the rest, too.
    """
    if any(_wrapper_of(chunk) is not None for chunk in chunks):
        return True
    inner = _wrappers_within(chunks) if isinstance(optimizer, torch.optim.Optimizer) else []
    return bool(inner) and all(wrapper.process_group.size() == dist.get_world_size() for wrapper in inner)


def describe(chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, coordinates: Coordinates) -> DdpTraining:
    """Return the training set-up of a model in DistributedDataParallel.

    The roots are the modules below the wrapper: their forward communicates nothing, so it can be replayed by one rank.
    Where a part of the model alone is wrapped, they are the whole, and only the script can reduce the gradients of the
    rest.

    Raises:
        AttachError: Some modules of a list are wrapped, others are not.
    """
    wrappers = [wrapper for chunk in chunks if (wrapper := _wrapper_of(chunk)) is not None]
    if not wrappers:
        return _partly_wrapped(chunks, optimizer, coordinates)
    if len(wrappers) < len(chunks):
        bare = next(chunk for chunk in chunks if _wrapper_of(chunk) is None)
        raise AttachError(
            f"model: found a list of DistributedDataParallel and {type(bare).__name__}, expected all of them wrapped "
            "or none: nobody reduces the gradients of what is in no wrapper; wrap it as well, or leave it out"
        )
    return _training(chunks[0], [wrapper.module for wrapper in wrappers], wrappers, optimizer, coordinates)


def _partly_wrapped(
    chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, coordinates: Coordinates
) -> DdpTraining:
    """Return the set-up of a model of which some modules are wrapped, while each rank trains a copy of the others.

    Not of experts: those of each rank may be its own.
    """
    training = _training(chunks[0], chunks, _wrappers_within(chunks), optimizer, coordinates)
    training.communicates = ("dp",)
    training.parameters = tuple(
        _alone(parameter) if i in training.reduced_by_script and _BY_DESIGN in parameter.name else parameter
        for i, parameter in enumerate(training.parameters)
    )
    names = [parameter.name for i, parameter in enumerate(training.parameters) if i in training.reduced_by_script]
    if names:
        logger.warning(
            "%d parameters that are trained are in no DistributedDataParallel, while other modules are: %s%s; only the "
            "script can reduce their gradients. Their copies on all ranks are compared, except of experts",
            len(names),
            ", ".join(names[:_NAMED]),
            " …" if len(names) > _NAMED else "",
        )
    return training


def _training(
    model: nn.Module,
    roots: Sequence[nn.Module],
    wrappers: Sequence[DistributedDataParallel],
    optimizer: torch.optim.Optimizer,
    coordinates: Coordinates,
) -> DdpTraining:
    reduced = {id(p) for w in wrappers for name, p in w.module.named_parameters() if name not in w.parameters_to_ignore}
    found = plain.parameters_of(roots, replicated_over=("dp",), in_global_norm=coordinates.dp == 0)
    if any(map(_is_local, wrappers)):
        found = tuple(map(_alone, found))
        logger.warning(
            "gradients are reduced by post_localSGD_hook, so that ranks part between two averages of the model: what "
            "they hold is not compared"
        )
    elif any(map(_is_lossy, wrappers)):
        found = tuple(map(_compressed, found))
    training = DdpTraining(
        model=model, roots=tuple(roots), modules=plain.modules_of(roots), parameters=found, optimizer=optimizer
    )
    training.wrappers = wrappers
    training.reduced_by_script = frozenset(i for i, p in enumerate(training.parameters) if id(p.tensor) not in reduced)
    training.waits_in_backward = training.device.type == "cpu"  # elsewhere the reducer waits on the device
    if training.parameters:
        plain.require_stepped(training)
    return training


def _is_lossy(wrapper: DistributedDataParallel) -> bool:
    """Return whether a hook of torch's own compresses the gradients with loss, as PowerSGD does.

    Of a hook of the script's nothing is known: it is expected to return the sum.
    """
    hooks = [hook for hook, _state in wrapper._comm_hooks]
    return any(hook.__module__.startswith(_TORCH_HOOKS) and hook.__name__ not in _ROUNDING_HOOKS for hook in hooks)


def _is_local(wrapper: DistributedDataParallel) -> bool:
    """Return whether the ranks are to part, as torch's hook for post-local SGD has it, in another hook or not."""
    return any(type(state).__name__ == "PostLocalSGDState" for _hook, state in wrapper._comm_hooks)


def _compressed(parameter: HeldParameter) -> HeldParameter:
    """Return the parameter so that no rank's unreduced gradient is held to be a part of what all get."""
    alone = dataclasses.replace(parameter.placement, replicated_over=())
    return dataclasses.replace(parameter, placement=alone, shard=parameter.placement)


def _alone(parameter: HeldParameter) -> HeldParameter:
    """Return the parameter as one of which no other rank holds a copy."""
    return dataclasses.replace(parameter, placement=dataclasses.replace(parameter.placement, replicated_over=()))


def _wrappers_within(chunks: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Return the wrappers below the chunks."""
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, DistributedDataParallel)]


def _wrapper_of(chunk: nn.Module) -> DistributedDataParallel | None:
    return next((module for module in _outermost(chunk) if isinstance(module, DistributedDataParallel)), None)


def _outermost(chunk: nn.Module) -> list[nn.Module]:
    compiled = getattr(chunk, "_orig_mod", None)
    return [chunk] if compiled is None else [chunk, compiled]
