"""Where a parameter of this rank stands in the whole model: its name, its shape, its place among the ranks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainermon.core.values import Coordinates, Placement
from trainermon.hooks.names import plain_name
from trainermon.monitor.frameworks.deepspeed.holders import OptimizerHolder
from trainermon.monitor.taps.training import HeldParameter, WatchedModule

_EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(.*)")


def groups_of(engine: Any) -> Mapping[str, Any]:
    """Return the DeepSpeed engine's process groups by purpose (`dp`, `ep` …); of several sizes of `ep` the largest."""
    groups = {"dp": engine.seq_data_parallel_group}
    if engine.pipeline_parallelism:
        groups["pp"] = engine.grid.get_pipe_parallel_group()
    if engine.has_moe_layers:
        groups["ep"] = max(engine.expert_parallel_group.values(), key=torch.distributed.get_world_size)
    return groups


def coordinates_of(engine: Any, known: Coordinates) -> Coordinates:
    """Return `known`, the rank's position in the job, corrected by the sizes and places of the engine's own groups."""
    axes: dict[str, int] = {}
    for axis, group in groups_of(engine).items():
        axes |= {axis: torch.distributed.get_rank(group), f"{axis}_size": torch.distributed.get_world_size(group)}
    return dataclasses.replace(known, **axes)


def modules_of(engine: Any) -> tuple[WatchedModule, ...]:
    """Return every module below the engine's model by its name in the whole model.

    A pipeline's layers are numbered globally already.
    """
    experts = _ExpertNumbers(engine)
    return tuple(
        WatchedModule(experts.global_name(name), module)
        for name, module in engine.module.named_modules()
        if plain_name(name)
    )


def parameters_of(engine: Any, holder: OptimizerHolder) -> tuple[HeldParameter, ...]:
    """Return every parameter that requires a gradient; a shared one once, under its first name.

    A tied copy on another pipeline stage has the original's name and does not count in norms.
    """
    experts = _ExpertNumbers(engine)
    return tuple(
        _described(engine, holder, experts.global_name(name), parameter)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    )


def _described(engine: Any, holder: OptimizerHolder, name: str, parameter: nn.Parameter) -> HeldParameter:
    axis, rank = _axis_of(engine, parameter)
    counts = not getattr(parameter, "ds_pipe_replicated", False)
    dtype = parameter.dtype
    whole = Placement(
        dtype=_text(dtype),
        shape=tuple(getattr(parameter, "ds_shape", parameter.shape)),
        replicated_over=(axis,),
        in_global_norm=counts and rank == 0,
        scale=1.0 / engine.gradient_accumulation_steps(),
    )
    shard = dataclasses.replace(whole, dtype=_text(holder.grad_dtype or dtype), scale=1.0)
    if holder.is_partitioned:
        offset, length = holder.span(parameter)
        shard = dataclasses.replace(
            shard, offset=offset, length=length, replicated_over=(), partitioned_over=(axis,), in_global_norm=counts
        )
    return HeldParameter(name, parameter, whole, shard=shard)


def _axis_of(engine: Any, parameter: nn.Parameter) -> tuple[str, int]:
    """Return the axis over which copies or parts of a parameter lie, and this rank's place on it."""
    group = getattr(parameter, "group_name", None)
    if group is None or getattr(parameter, "allreduce", True):
        return "dp", torch.distributed.get_rank(engine.seq_data_parallel_group)
    return "edp", torch.distributed.get_rank(engine.expert_data_parallel_group[group])


class _ExpertNumbers:
    """Numbers experts globally: those of a rank begin where those of the rank before it in the group end."""

    def __init__(self, engine: Any) -> None:
        self._first: dict[str, int] = {}
        for name, module in engine.module.named_modules():
            if hasattr(module, "deepspeed_experts"):
                group = next((p.group_name for p in module.parameters() if hasattr(p, "group_name")), None)
                rank = torch.distributed.get_rank(engine.expert_parallel_group[group]) if group else 0
                self._first[f"{name}.deepspeed_experts."] = rank * module.num_local_experts

    def global_name(self, name: str) -> str:
        """Return the plain name with the global number of the expert."""
        found = _EXPERT.fullmatch(name) if self._first else None
        if found:
            before, number, after = found.groups()
            name = f"{before}{self._first[before] + int(number)}{after}"
        return plain_name(name)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
