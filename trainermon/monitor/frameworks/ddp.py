"""DistributedDataParallel: every rank holds all parameters, gradients are averaged during the backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.frameworks import plain
from trainermon.monitor.taps.training import HeldParameter, TapHandle

_TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_ROUNDING_HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


class DdpTraining(plain.PlainTraining):
    """A model in torch's DistributedDataParallel.

    What a rank accumulated is seen in hooks that run before the reduction. All else is as in `PlainTraining`.
    """

    framework = "ddp"
    final_when_accumulated = False
    reduces = True
    wrappers: Sequence[DistributedDataParallel]

    def watch_unreduced(self, guard: FaultGuard, see: Callable[[int, Tensor], None]) -> list[TapHandle]:
        """Call `see(index, gradient)` with each parameter's `.grad` before DDP reduces it; return the hooks.

        `index` is the parameter's position in `parameters`. These are post-accumulate hooks, which run inside the node
        that the reducer hangs behind. `guard` contains errors of `see`.
        """

        def hook_of(index: int) -> Callable[[Tensor], None]:
            return guard.wrap(lambda parameter: None if parameter.grad is None else see(index, parameter.grad))

        return [p.tensor.register_post_accumulate_grad_hook(hook_of(i)) for i, p in enumerate(self.parameters)]  # type: ignore[no-untyped-call]

    def is_reduced_now(self) -> bool:
        """Return, at the end of a backward, whether DDP reduced its gradients: it was outside of `no_sync()`."""
        return any(wrapper.require_backward_grad_sync for wrapper in self.wrappers)


def recognises(chunks: Sequence[nn.Module], _optimizer: object) -> bool:
    """Return whether the model is wrapped by DistributedDataParallel, possibly compiled around it."""
    return any(_wrapper_of(chunk) is not None for chunk in chunks)


def describe(chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, coordinates: Coordinates) -> DdpTraining:
    """Return the training set-up of a model in DistributedDataParallel.

    The roots are the modules below the wrapper: their forward communicates nothing, so it can be replayed by one rank.

    Raises:
        AttachError: Some modules of a list are wrapped, others are not.
    """
    wrappers = [wrapper for chunk in chunks if (wrapper := _wrapper_of(chunk)) is not None]
    if len(wrappers) < len(chunks):
        bare = next(chunk for chunk in chunks if _wrapper_of(chunk) is None)
        raise AttachError(
            f"model: found a list of DistributedDataParallel and {type(bare).__name__}, expected all of them wrapped "
            "or none: nobody reduces the gradients of what is in no wrapper; wrap it as well, or leave it out"
        )
    inner = [wrapper.module for wrapper in wrappers]
    ignored = {id(p) for w in wrappers for name, p in w.module.named_parameters() if name in w.parameters_to_ignore}
    training = DdpTraining(
        model=chunks[0],
        roots=tuple(inner),
        modules=plain.modules_of(inner),
        parameters=[
            _compressed(parameter) if any(map(_is_lossy, wrappers)) else parameter
            for parameter in plain.parameters_of(inner, replicated_over=("dp",), in_global_norm=coordinates.dp == 0)
        ],
        optimizer=optimizer,
    )
    training.wrappers = wrappers
    training.reduced_by_script = frozenset(i for i, p in enumerate(training.parameters) if id(p.tensor) in ignored)
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


def _compressed(parameter: HeldParameter) -> HeldParameter:
    """Return the parameter so that no rank's unreduced gradient is held to be a part of what all get."""
    alone = dataclasses.replace(parameter.placement, replicated_over=())
    return dataclasses.replace(parameter, placement=alone, shard=parameter.placement)


def _wrapper_of(chunk: nn.Module) -> DistributedDataParallel | None:
    return next((module for module in _outermost(chunk) if isinstance(module, DistributedDataParallel)), None)


def _outermost(chunk: nn.Module) -> list[nn.Module]:
    compiled = getattr(chunk, "_orig_mod", None)
    return [chunk] if compiled is None else [chunk, compiled]
