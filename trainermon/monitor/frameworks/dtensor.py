"""Where the elements of a DTensor are: its mesh and placements, turned into the placements that rows are merged by."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainermon.core.errors import AttachError
from trainermon.core.values import Coordinates, Placement
from trainermon.monitor.frameworks.replicas import is_first_copy

MODEL_AXES = frozenset({"tp", "cp", "ep"})
SHARDS = frozenset({"Shard", "_StridedShard"})


class MeshSplit(NamedTuple):
    """What one dimension of a device mesh does to a tensor.

    Attributes:
        axis: The axis' name: `dp`, `tp` …
        dim: The tensor dimension that it shards; None: the ranks hold copies.
        size: Number of ranks along it.
        place: This rank's position along it.
        is_data: Whether it is data parallelism, not model parallelism.
    """

    axis: str
    dim: int | None
    size: int
    place: int
    is_data: bool


def is_dtensor(tensor: object) -> bool:
    """Return whether `tensor` is a DTensor, without importing what defines it."""
    return any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__)


@torch.no_grad()
def local(value: Any) -> Any:
    """Return the part of a DTensor that is on this rank, no copy; anything else as it is.

    Waits, on the device, for a collective that the framework left pending in it.
    """
    if not is_dtensor(value):
        return value
    found = value.to_local()
    return found.wait() if hasattr(found, "elem") and hasattr(found, "wait") else found


def placements_of(
    name: str, tensor: Any, *, data_dims: Collection[int], unsharded_dtype: torch.dtype, coordinates: Coordinates
) -> tuple[Placement, Placement]:
    """Return how two tensors of parameter `name` relate to the whole: (gradient of one backward, this rank's shard).

    `data_dims` are the mesh dimensions over which batches differ: backward sees the tensor whole along them. Data
    parallelism shards what tensor parallelism leaves, so an offset counts in the flattened tensor-parallel part, the
    sharded dimension first. That is what FSDP does whatever the order of the mesh's dimensions. `unsharded_dtype` is
    the dtype of the gradient of one backward.

    Raises:
        AttachError: The tensor is sharded in a way that is not known.
    """
    splits = _splits(name, tensor, data_dims)
    data = [split for split in splits if split.is_data]
    model = [split for split in splits if not split.is_data]
    part = _local_shape(tuple(tensor.shape), model)
    offset, length = _range(part, [split for split in data if split.dim is not None])
    if length != local(tensor).numel():
        raise AttachError(
            f"model: parameter {name} with placements {tensor.placements} on {tensor.device_mesh} has "
            f"{local(tensor).numel()} elements on this rank, expected {length}: this way of sharding is not known"
        )
    counts = is_first_copy(name, num_ranks=tensor.device_mesh.size(), coordinates=coordinates)
    counts = counts and all(split.place == 0 for split in splits if split.dim is None)
    gradient = Placement(
        dtype=dtype_name(unsharded_dtype),
        shape=tuple(tensor.shape),
        length=math.prod(part) if _axes(model, sharded=True) else None,
        partitioned_over=_axes(model, sharded=True),
        replicated_over=_axes([split._replace(dim=None) for split in data] + model, sharded=False),
        in_global_norm=counts and all(split.place == 0 for split in data),
    )
    shard = Placement(
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        offset=offset,
        length=length,
        partitioned_over=_axes(splits, sharded=True),
        replicated_over=_axes(splits, sharded=False),
        in_global_norm=counts,
    )
    return gradient, shard


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as placements have it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def is_partial(gradient: Tensor) -> bool:
    """Return whether a gradient is a sum over ranks that has not been taken yet."""
    return any(placement.is_partial() for placement in getattr(gradient, "placements", ()))


def _splits(name: str, tensor: Any, data_dims: Collection[int]) -> list[MeshSplit]:
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    unknown = [p for p in tensor.placements if type(p).__name__ not in SHARDS and not p.is_replicate()]
    if place is None or unknown:
        raise AttachError(
            f"model: parameter {name} has placements {tensor.placements} on {mesh}; expected Shard or Replicate along "
            "each dimension of a mesh that this rank is in"
        )
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    axes = ["" if i in data_dims else n if n in MODEL_AXES else "tp" for i, n in enumerate(names)]
    data_axis = "edp" if "ep" in axes else "dp"
    return [
        MeshSplit(axis or data_axis, getattr(p, "dim", None), mesh.size(i), place[i], not axis)
        for i, (axis, p) in enumerate(zip(axes, tensor.placements, strict=True))
    ]


def _local_shape(shape: tuple[int, ...], splits: Sequence[MeshSplit]) -> tuple[int, ...]:
    sizes = list(shape)
    for split in splits:
        if split.dim is not None:
            begin, end = _chunk(sizes[split.dim], split)
            sizes[split.dim] = end - begin
    return tuple(sizes)


def _range(shape: tuple[int, ...], shards: Sequence[MeshSplit]) -> tuple[int, int]:
    """Return offset and length of this rank's part; -1 as length where several mesh dimensions shard it."""
    if not shards:
        return 0, math.prod(shape)
    if len(shards) > 1:
        return 0, -1
    (split,) = shards
    assert split.dim is not None
    begin, end = _chunk(shape[split.dim], split)
    row = math.prod(size for dim, size in enumerate(shape) if dim != split.dim)
    return begin * row, (end - begin) * row


def _chunk(size: int, split: MeshSplit) -> tuple[int, int]:
    """Return the range that `torch.chunk` gives to this place; the last ones may be short or empty."""
    step = -(-size // split.size)
    return min(split.place * step, size), min((split.place + 1) * step, size)


def _axes(splits: Iterable[MeshSplit], *, sharded: bool) -> tuple[str, ...]:
    return tuple(dict.fromkeys(split.axis for split in splits if (split.dim is not None) is sharded and split.size > 1))
