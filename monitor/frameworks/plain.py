"""Plain PyTorch: modules and an optimizer in one process; nothing is reduced, nothing is sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainermon.monitor.errors import AttachError
from trainermon.monitor.frameworks.training import Training
from trainermon.monitor.taps.gradients import Parameter
from trainermon.monitor.taps.modules import Module
from trainermon.monitor.taps.names import plain_name
from trainermon.monitor.values import Coordinates, Placement


def describe(chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, _coordinates: Coordinates) -> Training:
    """Return the set-up of `chunks` (one module, or the virtual pipeline stages in order) without any wrapper."""
    return Training(
        framework="plain",
        model=chunks[0],
        roots=tuple(chunks),
        modules=modules_of(chunks),
        parameters=parameters_of(chunks),
        optimizer=optimizer,
        reduces_now=None,
    )


def modules_of(chunks: Sequence[nn.Module]) -> tuple[Module, ...]:
    """Return every module below the roots, each once, by the name that the user's model gives it."""
    return tuple(
        Module(plain_name(name), module, stage)
        for stage, chunk in enumerate(chunks)
        for name, module in chunk.named_modules()
        if plain_name(name)
    )


def parameters_of(
    chunks: Sequence[nn.Module], *, replicated_over: tuple[str, ...] = (), in_global_norm: bool = True
) -> tuple[Parameter, ...]:
    """Return every parameter that requires a gradient; a shared one once, under its first name.

    Raises:
        AttachError: A parameter has no shape yet (a lazy module).
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise AttachError(f"model: parameter {name} has no shape yet; run one forward before set_monitor")
    return tuple(
        Parameter(
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
