"""How what a rank dumps relates to the whole model, read off the model itself and, under Megatron, off its groups.

Imports no framework: a script that trains with Megatron has imported it. Nothing is communicated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from trainermon.dump.files.records import RankLayout
from trainermon.hooks.names import plain_name

_MEGATRON = "megatron.core.parallel_state"
# Axis -> what Megatron calls it in the names of the functions that tell a rank's place and the size.
_AXES = {
    "tp": "tensor_model_parallel",
    "cp": "context_parallel",
    "dp": "data_parallel",
    "pp": "pipeline_model_parallel",
    "ep": "expert_model_parallel",
}


_FSDP = "FSDPModule"
_OTHER_AXES = ("dp", "ep", "cp", "pp")


def layout_of(models: Mapping[str, nn.Module]) -> RankLayout:
    """Return this rank's position in the job (tp, pp, dp …), and which part of the whole model its `models` hold.

    `models` are named by the first part of their modules' keys. With Megatron its parallel groups are asked; without,
    the meshes of DTensors, and if there are none, all ranks count as data parallel.
    """
    parameters = [
        (plain_name(_joined(prefix, path)), parameter)
        for prefix, model in models.items()
        for path, parameter in model.named_parameters(remove_duplicate=False)
    ]
    state = sys.modules.get(_MEGATRON)
    if state is None or not state.model_parallel_is_initialized():
        if not _is_distributed():
            return RankLayout()
        return _of_meshes(models, parameters) or RankLayout(axes={"dp": (dist.get_rank(), dist.get_world_size())})
    axes = {axis: _place(state, name) for axis, name in _AXES.items()}
    return RankLayout(
        axes=axes,
        splits={name: split for name, parameter in parameters if (split := _split(parameter)) is not None},
        partial=tuple(name for name, parameter in parameters if getattr(parameter, "sequence_parallel", False)),
        renamed={name: other for prefix, model in models.items() for name, other in _renamed(prefix, model)},
    )


def _of_meshes(models: Mapping[str, nn.Module], parameters: Sequence[tuple[str, Any]]) -> RankLayout | None:
    """Return the layout that DTensors tell where ranks share tensors and FSDP does not deal these out; else None.

    That is the last dimension of their mesh. FSDP has the one before it, and a mesh for replicas the one before that.
    """
    is_fsdp = any(
        base.__name__ == _FSDP for model in models.values() for m in model.modules() for base in type(m).__mro__
    )
    shared = [(name, tensor) for name, tensor in parameters if _is_shared(tensor, is_fsdp=is_fsdp)]
    if not shared:
        return None
    mesh = shared[0][1].device_mesh
    ranks = sorted(dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1)))
    size = len(ranks)
    if ranks != list(range(ranks[0], ranks[0] + size)) or ranks[0] % size:
        return None  # ranks of one group do not follow one another: which are replicas is not known
    return RankLayout(
        axes={
            "tp": (mesh.get_local_rank(mesh.ndim - 1), size),
            "dp": (ranks[0] // size, dist.get_world_size() // size),
        },
        splits={name: (tensor.placements[-1].dim, 1) for name, tensor in shared if tensor.placements[-1].is_shard()},
    )


def _is_shared(tensor: Any, *, is_fsdp: bool) -> bool:
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    if mesh is None or not placements:
        return False
    num_dealt = (1 + placements[0].is_replicate()) if is_fsdp else 0
    name = (mesh.mesh_dim_names or ("",))[-1]
    return mesh.ndim > num_dealt and name not in _OTHER_AXES


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _place(state: Any, name: str) -> tuple[int, int]:
    return getattr(state, f"get_{name}_rank")(), getattr(state, f"get_{name}_world_size")()


def _split(parameter: nn.Parameter) -> tuple[int, int] | None:
    """Return along which dimension and in how many blocks Megatron deals out a parameter, None if it does not."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return split_dim(parameter), int(getattr(parameter, "partition_stride", 1))


def split_dim(parameter: nn.Parameter) -> int:
    """Return along which dimension Megatron deals out a parameter; the first where nothing says which."""
    return max(int(getattr(parameter, "partition_dim", 0)), 0)


def _renamed(prefix: str, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what modules are called in the whole model: chunks of a stage have no number there, layers another one."""
    if prefix:
        yield prefix, ""
    for path, module in model.named_modules():
        number = getattr(module, "layer_number", None)
        above, _, name = path.rpartition(".")
        if name.isdigit() and isinstance(number, int):
            here, there = plain_name(_joined(prefix, path)), plain_name(f"{above}.{number - 1}")
            if here != there:
                yield here, there


def _joined(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix else path
