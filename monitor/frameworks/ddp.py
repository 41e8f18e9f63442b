"""DistributedDataParallel: every rank holds all parameters, gradients are averaged during the backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainermon.monitor.frameworks import plain
from trainermon.monitor.frameworks.training import Training
from trainermon.monitor.values import Coordinates


def recognises(chunks: Sequence[nn.Module]) -> bool:
    """Return whether the model is wrapped by DistributedDataParallel, possibly compiled around it."""
    return any(isinstance(module, DistributedDataParallel) for chunk in chunks for module in _outermost(chunk))


def describe(chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, coordinates: Coordinates) -> Training:
    """Return the set-up of a model in DistributedDataParallel.

    The roots are the modules below the wrapper: their forward communicates nothing, so it can be replayed by one rank.
    """
    wrappers = [next(m for m in _outermost(chunk) if isinstance(m, DistributedDataParallel)) for chunk in chunks]
    inner = [wrapper.module for wrapper in wrappers]
    return Training(
        framework="ddp",
        model=chunks[0],
        roots=tuple(inner),
        modules=plain.modules_of(inner),
        parameters=plain.parameters_of(inner, replicated_over=("dp",), in_global_norm=coordinates.dp == 0),
        optimizer=optimizer,
        reduces_now=lambda: any(wrapper.require_backward_grad_sync for wrapper in wrappers),
    )


def _outermost(chunk: nn.Module) -> list[nn.Module]:
    compiled = getattr(chunk, "_orig_mod", None)
    return [chunk] if compiled is None else [chunk, compiled]
