"""Which part of a whole parameter a rank's tensor is, where ranks split it along its dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from trainermon.core.gradient_signs import IndexBox
from trainermon.core.values import Coordinates
from trainermon.monitor.taps.training import HeldParameter

_GATED = ("linear_fc1.weight", "linear_fc1.bias")
_MODEL_AXES = ("tp", "ep", "etp")


class HeldBoxes(NamedTuple):
    """What a rank's optimizer holds of a parameter: a range of the tensor that boxes of the whole make up.

    Attributes:
        boxes: Parts of the whole; several where a rank has a part of each of several blocks.
        dim: The dimension along which they follow one another in the rank's tensor.
        offset: First element of the range in the flattened tensor.
    """

    boxes: tuple[IndexBox, ...]
    dim: int
    offset: int


def boxes_of(parameter: HeldParameter, roots: Sequence[nn.Module], coordinates: Coordinates) -> HeldBoxes:
    """Return what this rank's optimizer holds of `parameter`.

    A DTensor's shard is a box. Elsewhere boxes are what tensor and expert parallelism leave to this rank (two of a
    gated linear layer, whose halves Megatron splits one by one), and data parallelism takes a range of that.

    Raises:
        ValueError: The parameter is split in a way that is not known.
    """
    if hasattr(parameter.tensor, "placements"):
        return HeldBoxes((box_of_dtensor(parameter.tensor),), 0, 0)
    whole, local = parameter.owned.shape, _local_shape(parameter)
    ranges = [
        [(0, size)] if size == here else _ranges(parameter, dim, coordinates, roots)
        for dim, (size, here) in enumerate(zip(whole, local, strict=True))
    ]
    along = next((dim for dim, blocks in enumerate(ranges) if len(blocks) > 1), 0)
    corners = itertools.product(*ranges)
    boxes = tuple(IndexBox(tuple(s for s, _ in corner), tuple(n for _, n in corner)) for corner in corners)
    return HeldBoxes(boxes, along, parameter.owned.offset)


def box_of_dtensor(tensor: Any) -> IndexBox:
    """Return the box of a DTensor's local part: model parallelism splits first, data parallelism what that leaves."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    starts, sizes = [0] * tensor.ndim, list(tensor.shape)
    for axis in sorted(range(mesh.ndim), key=lambda axis: names[axis] not in _MODEL_AXES):
        placed = tensor.placements[axis]
        dim = getattr(placed, "dim", None)  # of Shard, and of the strided one
        if dim is not None:
            chunk = -(-sizes[dim] // mesh.size(axis))
            begin = min(sizes[dim], chunk * mesh.get_local_rank(axis))
            starts[dim] += begin
            sizes[dim] = min(chunk, sizes[dim] - begin)
    return IndexBox(tuple(starts), tuple(sizes))


def _local_shape(parameter: HeldParameter) -> tuple[int, ...]:
    """Return the shape of what model parallelism leaves to this rank; what data parallelism has cut is whole in it."""
    is_split = any(axis in _MODEL_AXES for axis in parameter.owned.partitioned_over)
    return tuple(parameter.tensor.shape) if is_split else parameter.owned.shape


def _ranges(
    parameter: HeldParameter, dim: int, coordinates: Coordinates, roots: Sequence[nn.Module]
) -> list[tuple[int, int]]:
    """Return first index and number of each part of dimension `dim` that this rank has."""
    whole, local = parameter.owned.shape[dim], parameter.tensor.shape[dim]
    over = parameter.owned.partitioned_over
    if dim == getattr(parameter.tensor, "partition_dim", dim) and ("tp" in over or "etp" in over):
        num_blocks = _num_blocks(parameter, roots)
        share = local // num_blocks
        place = coordinates.tp % (whole // local)
        return [(number * (whole // num_blocks) + place * share, share) for number in range(num_blocks)]
    if "ep" in over:
        return [(coordinates.ep * local, local)]
    raise ValueError(f"{parameter.name}: dimension {dim} is split over {', '.join(over) or 'no known axis'}")


def _num_blocks(parameter: HeldParameter, roots: Sequence[nn.Module]) -> int:
    """Return in how many blocks a parameter is split, each over all ranks: 2 for a gated linear layer of Megatron."""
    stride = int(getattr(parameter.tensor, "partition_stride", 1))
    gated = any(getattr(getattr(root, "config", None), "gated_linear_unit", False) for root in roots)
    return max(stride, 2 if gated and parameter.name.endswith(_GATED) else 1)
