"""How the tensors of this rank relate to those of the whole model."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from torch import Tensor, nn

from trainermon.core.errors import AttachError
from trainermon.core.values import Placement
from trainermon.dump.files.layout import split_dim
from trainermon.monitor.frameworks.megatron.groups import GroupPlace, MegatronGroups
from trainermon.monitor.frameworks.megatron.holdings import ParameterRange

# Parameters that hold all experts of a rank side by side, and along which dimension.
GROUPED_EXPERTS = MappingProxyType({"experts.weight1": 1, "experts.weight2": 0})
DATA_AXES = ("dp", "cp", "edp")


def is_expert(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is an expert's: each expert parallel rank has its own, reduced over fewer ranks."""
    return not getattr(parameter, "allreduce", True)


def is_tied_copy(parameter: nn.Parameter) -> bool:
    """Return whether a parameter repeats one of another pipeline stage (tied weights): it does not count in norms."""
    return bool(getattr(parameter, "shared", False))


def is_tied(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is tied to one on another pipeline stage, be it the original or the copy."""
    return bool(getattr(parameter, "shared_embedding", False)) or is_tied_copy(parameter)


def placement_of(
    name: str, parameter: nn.Parameter, groups: MegatronGroups, gradient: Tensor | None = None
) -> Placement:
    """Return how the gradient of one backward of this rank relates to the whole parameter (shape, range, copies).

    Args:
        name: The parameter's name in the whole model.
        parameter: As this rank's model holds it; Megatron marks those that are split over tensor parallel ranks.
        groups: This rank's positions.
        gradient: What has its gradient's dtype; None: the buffer that Megatron made for it.

    Raises:
        AttachError: Megatron reduces the parameter's gradient over a group that its copies do not make up.
    """
    expert = is_expert(parameter)
    _check_experts(name, groups)
    tensor, data = _tensor_place(parameter, groups), groups.edp if expert else groups.dp_cp
    tensor_axis = "etp" if expert and groups.etp != groups.tp else "tp"
    data_axes = _present(edp=data.size) if expert else _present(dp=groups.dp.size, cp=groups.cp.size)
    is_split = _is_split(parameter, groups)
    shape = list(parameter.shape)
    if is_split:
        shape[split_dim(parameter)] *= tensor.size
    grouped = next((dim for suffix, dim in GROUPED_EXPERTS.items() if name.endswith(suffix)), None)
    if expert and grouped is not None:
        shape[grouped] *= groups.ep.size
    tensor_axes = _present(**{tensor_axis: tensor.size})
    copies = () if is_split else tensor_axes
    return Placement(
        dtype=dtype_name(gradient_of(parameter) if gradient is None else gradient),
        shape=tuple(shape),
        replicated_over=(*data_axes, *copies, *(("pp",) if is_tied(parameter) else ())),
        partitioned_over=(*(tensor_axes if is_split else ()), *(("ep",) if expert and grouped is not None else ())),
        in_global_norm=data.rank == 0 and _counts_among_tensor_ranks(parameter, groups),
    )


def shard_of(
    whole: Placement, parameter: nn.Parameter, groups: MegatronGroups, holding: ParameterRange | None
) -> Placement:
    """Return how this rank's part of a parameter that is dealt out over its data parallel ranks relates to `whole`.

    With several instances of the distributed optimizer those ranks form groups that each hold all of it: then the data
    axes stand under both partitioned and replicated, and the first instance counts.

    Args:
        whole: The placement of the whole parameter on this rank.
        parameter: As this rank's model holds it.
        groups: This rank's places.
        holding: What this rank holds of it, if anything.
    """
    data_axes = tuple(axis for axis in whole.replicated_over if axis in DATA_AXES)
    copies = tuple(axis for axis in whole.replicated_over if axis not in DATA_AXES)
    start, end = (holding.start, holding.end) if holding else (0, 0)
    instance = getattr(holding.optimizer, "distributed_optimizer_instance_id", 0) if holding else 0
    num_instances = _num_instances(holding)
    return dataclasses.replace(
        whole,
        offset=start,
        length=end - start,
        replicated_over=(*data_axes, *copies) if num_instances > 1 else copies,
        partitioned_over=(*whole.partitioned_over, *data_axes),
        in_global_norm=start < end and instance == 0 and _counts_among_tensor_ranks(parameter, groups),
    )


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the buffer that Megatron accumulates the parameter's gradient in.

    Raises:
        AttachError: It has none.
    """
    gradient = getattr(parameter, "main_grad", None)
    if not isinstance(gradient, Tensor):
        raise AttachError(
            f"found a parameter of shape {tuple(parameter.shape)} without main_grad, expected one in every parameter "
            "that requires a gradient: do not unfreeze parameters after Megatron's DistributedDataParallel was made"
        )
    return gradient


def dtype_name(tensor: Tensor) -> str:
    """Return the name of the dtype, as in `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def _is_split(parameter: nn.Parameter, groups: MegatronGroups) -> bool:
    is_marked = bool(getattr(parameter, "tensor_model_parallel", False))
    return is_marked and _tensor_place(parameter, groups).size > 1


def _counts_among_tensor_ranks(parameter: nn.Parameter, groups: MegatronGroups) -> bool:
    is_first = _is_split(parameter, groups) or _tensor_place(parameter, groups).rank == 0
    return is_first and not is_tied_copy(parameter)


def _tensor_place(parameter: nn.Parameter, groups: MegatronGroups) -> GroupPlace:
    return groups.etp if is_expert(parameter) else groups.tp


def _num_instances(holding: ParameterRange | None) -> int:
    config = getattr(holding.optimizer, "ddp_config", None) if holding else None
    return int(getattr(config, "num_distributed_optimizer_instances", 1))


def _present(**sizes: int) -> tuple[str, ...]:
    return tuple(axis for axis, size in sizes.items() if size > 1)


def _check_experts(name: str, groups: MegatronGroups) -> None:
    is_routed = ".experts." in f".{name}" and "shared_experts" not in name
    if is_routed and groups.ep.size == 1 and groups.etp.size != groups.tp.size:
        raise AttachError(
            f"{name}: found expert tensor parallel size {groups.etp.size}, tensor parallel size {groups.tp.size} and "
            "expert parallel size 1, for which Megatron reduces the gradients of experts over the ranks of dense "
            "parameters; make the two tensor parallel sizes equal, or the expert parallel size larger than 1"
        )
