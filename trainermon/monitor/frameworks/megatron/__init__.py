"""Megatron-Core: what is recognised, what is refused, and how the parts fit together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates
from trainermon.monitor.frameworks.megatron import naming, placements
from trainermon.monitor.frameworks.megatron.groups import MegatronGroups, coordinates_of, groups_of
from trainermon.monitor.frameworks.megatron.holdings import ParameterRange, class_names, holdings_of
from trainermon.monitor.frameworks.megatron.training import MegatronTraining
from trainermon.monitor.taps.training import HeldParameter, WatchedModule

__all__ = ["MegatronTraining", "coordinates_of", "describe", "held_parameters", "recognises"]


def recognises(chunks: Sequence[nn.Module], optimizer: object) -> bool:
    """Return whether a wrapper of the model, or the optimizer, is one of Megatron-Core's."""
    return "MegatronOptimizer" in class_names(optimizer) or any("_BaseDataParallel" in class_names(c) for c in chunks)


def describe(chunks: Sequence[nn.Module], optimizer: Any, coordinates: Coordinates) -> MegatronTraining:
    """Return how a Megatron training is watched.

    `chunks` are the virtual pipeline stages, as a script's `get_model` returns them.

    Raises:
        AttachError: A wrapper or optimizer that this version cannot watch correctly.
    """
    _check(chunks, optimizer)
    held, dealt_out = holdings_of(chunks, optimizer)
    groups = groups_of(chunks[0])
    modules: list[WatchedModule] = []
    parameters: list[HeldParameter] = []
    for stage, chunk in enumerate(chunks):
        root: nn.Module = chunk.module  # type: ignore[assignment]
        renaming = naming.renaming_of(root, groups.ep.rank)
        for path, module in root.named_modules():
            name = naming.global_name(path, renaming)
            if name:
                modules.append(WatchedModule(name, module, stage))
        for path, tensor in root.named_parameters():
            if tensor.requires_grad:
                name = naming.global_name(path, renaming)
                placed = _place(name, tensor, stage, groups, held.get(tensor))
                parameters.append(placed if tensor in dealt_out else dataclasses.replace(placed, shard=None))
    training = MegatronTraining(
        chunks=chunks,
        held=[held.get(parameter.tensor) for parameter in parameters],
        model=chunks[0],
        roots=[chunk.module for chunk in chunks],
        modules=modules,
        parameters=parameters,
        optimizer=optimizer,
    )
    training.coordinates = coordinates_of(coordinates)
    training.communicates = _communicates(chunks, groups)
    return training


def held_parameters(model: nn.Module) -> list[HeldParameter]:
    """Return the parameters of a Megatron model as this rank's modules hold them, whatever the optimizer; else [].

    Raises:
        AttachError: Megatron's groups do not exist.
    """
    root = model
    while isinstance(getattr(root, "module", None), nn.Module):
        root = root.module  # type: ignore[assignment]
    if "MegatronModule" not in class_names(root):
        return []
    groups = groups_of(model)
    renaming = naming.renaming_of(root, groups.ep.rank)
    found = []
    for path, tensor in root.named_parameters():
        name = naming.global_name(path, renaming)
        place = placements.placement_of(name, tensor, groups, gradient=tensor)
        name = naming.original_name(name) if placements.is_tied_copy(tensor) else name
        found.append(HeldParameter(name, tensor, place))
    return found


def _place(
    name: str, tensor: nn.Parameter, stage: int, groups: MegatronGroups, held: ParameterRange | None
) -> HeldParameter:
    whole = placements.placement_of(name, tensor, groups)
    if placements.is_tied_copy(tensor):
        name = naming.original_name(name)
    return HeldParameter(name, tensor, whole, stage, placements.shard_of(whole, tensor, groups, held))


def _communicates(chunks: Sequence[nn.Module], groups: MegatronGroups) -> tuple[str, ...]:
    """Return the axes that a forward communicates over.

    Data parallel ranks are among them where an auxiliary loss is summed up over them. Not for `overlap_param_gather`:
    its hooks gather the model's own parameters before their first use, and a replay has others in their place.
    """
    axes = [axis for axis in ("tp", "cp", "pp", "ep") if getattr(groups, axis).size > 1]
    balancing = getattr(getattr(chunks[0], "config", None), "moe_router_load_balancing_type", "")
    return (*axes, "dp") if "global_aux_loss" in balancing else tuple(axes)


def _check(chunks: Sequence[nn.Module], optimizer: Any) -> None:
    for chunk in chunks:
        names = class_names(chunk)
        if "DistributedDataParallel" not in names or not hasattr(chunk, "bucket_groups"):
            found = f"{type(chunk).__module__}.{type(chunk).__qualname__}"
            raise AttachError(
                f"Megatron: found a model of {found}, expected megatron.core.distributed.DistributedDataParallel "
                "around every chunk; pass the list that get_model returned. Megatron-FSDP and torch FSDP2 inside "
                "Megatron are not supported"
            )
    if "MegatronOptimizer" not in class_names(optimizer):
        found = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise AttachError(
            f"Megatron: found the optimizer {found}, expected the one that get_megatron_optimizer returned: the one "
            "whose step() ends a training step"
        )
