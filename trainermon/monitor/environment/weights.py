"""What is kept of the weights that a rank holds, and where each part stands in the whole parameter."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainermon.core.errors import AttachError
from trainermon.core.topology import find_coordinates
from trainermon.core.values import Coordinates
from trainermon.hooks.names import plain_name
from trainermon.monitor.environment.shown_tensors import part_of
from trainermon.monitor.frameworks import detect, fsdp1, megatron
from trainermon.monitor.frameworks.boxes import box_of_dtensor, boxes_of
from trainermon.monitor.frameworks.dtensor import is_dtensor, local
from trainermon.monitor.taps.training import HeldParameter, Training
from trainermon.statistics.positions import WholeRegion

logger = logging.getLogger("trainermon")


class HeldPart(NamedTuple):
    """A part of a parameter that a rank holds, and where it stands in the whole one."""

    tensor: Tensor
    region: WholeRegion


def training_of(models: Sequence[nn.Module], optimizer: Any) -> Training | None:
    """Return how the framework holds the model; None where that takes an optimizer, or is not recognised."""
    try:
        if optimizer is None:  # of FSDP 1 the model alone tells
            is_flat = fsdp1.holds(models)
            return fsdp1.describe(models, None, find_coordinates(groups={})) if is_flat else None
        return detect(models, optimizer, find_coordinates(groups={}))
    except AttachError as error:
        logger.warning("names and parts of weights are taken from the model alone: %s", error)
        return None


@torch.no_grad()
def recorded_weights(models: Sequence[nn.Module], training: Training | None) -> dict[str, dict[str, Any]]:
    """Return by parameter its whole shape, type, and what is kept of the parts that this rank holds.

    Under DDP, ZeRO 1 and 2 each rank holds the whole; under tensor parallelism, FSDP and ZeRO 3 a part, for which no
    element moves between ranks. A parameter of which this rank holds nothing is left out. Names are those in the whole
    model where `training` knows them. Waits for the device; cost: two passes over the weights.
    """
    coordinates = megatron.coordinates_of(find_coordinates(groups={}))
    roots = models if training is None else training.roots
    shards = _shards(training) if training is not None and not training.holds_replicas else {}
    found: dict[str, dict[str, Any]] = {}
    for name, parameter, held in _parameters(models, training):
        if held is not None and id(held) in shards:
            parts = [_of_shard(held, shards[id(held)])]
        else:
            parts = _parts(parameter, held, roots, coordinates)
        parts = [part for part in parts if part.tensor.numel()]
        if parts:
            entry = found.setdefault(name, {"shape": [], "dtype": "", "regions": {}})
            entry["shape"] = list(parts[0].region.shape)
            entry["dtype"] = str(parts[0].tensor.dtype).removeprefix("torch.")
            entry["regions"] |= {_label(part): part_of(part.tensor, part.region) for part in parts}
    return found


def _parameters(
    models: Sequence[nn.Module], training: Training | None
) -> Iterator[tuple[str, Tensor, HeldParameter | None]]:
    if training is not None and not training.holds_replicas:
        yield from ((held.name, held.tensor, held) for held in training.parameters)
    known = {id(held.tensor): held for held in (training.parameters if training is not None else ())}
    sharded = set() if training is None or training.holds_replicas else set(known)
    for number, model in enumerate(models):
        known = {id(held.tensor): held for held in megatron.held_parameters(model)} | known
        for name, parameter in model.named_parameters():
            held = known.get(id(parameter))
            stage = f"stage{number}." if len(models) > 1 else ""
            if id(parameter) not in sharded:
                yield held.name if held else stage + plain_name(name), parameter, held


def _label(part: HeldPart) -> str:
    starts = ",".join(map(str, part.region.starts))
    return f"{starts}+{'flat:' if part.region.flat else ''}{'x'.join(map(str, part.tensor.shape))}"


def _parts(
    parameter: Any, held: HeldParameter | None, roots: Sequence[nn.Module], coordinates: Coordinates
) -> list[HeldPart]:
    if is_dtensor(parameter):
        return [_of_dtensor(parameter)]
    if getattr(parameter, "ds_tensor", None) is not None:
        return [_of_zero3(parameter)]
    if held is not None:
        return _of_module(held, roots, coordinates)
    shape = tuple(parameter.shape)
    return [HeldPart(parameter.detach(), WholeRegion(shape, (0,) * len(shape)))]


def _of_dtensor(parameter: Any) -> HeldPart:
    return HeldPart(local(parameter).detach(), WholeRegion(tuple(parameter.shape), box_of_dtensor(parameter).starts))


def _of_zero3(parameter: Any) -> HeldPart:
    """Return the part of a parameter that ZeRO 3 keeps on this rank: a range of it, the last one padded."""
    flat = parameter.ds_tensor.detach().reshape(-1)
    group = getattr(parameter, "ds_process_group", None)
    begin = torch.distributed.get_rank(group) * flat.numel()
    shape = tuple(parameter.ds_shape)
    size = max(0, min(flat.numel(), math.prod(shape) - begin))
    return HeldPart(flat[:size], WholeRegion(shape, (begin,), flat=True))


def _of_module(held: HeldParameter, roots: Sequence[nn.Module], coordinates: Coordinates) -> list[HeldPart]:
    """Return the parts that model parallelism leaves to this rank's module, whatever of it the optimizer steps."""
    boxes, dim, _ = boxes_of(dataclasses.replace(held, shard=None), roots, coordinates)
    tensor, shape = held.tensor.detach(), held.placement.shape
    pieces = torch.split(tensor, [box.sizes[dim] for box in boxes], dim) if len(boxes) > 1 else [tensor]
    return [HeldPart(piece, WholeRegion(shape, box.starts)) for piece, box in zip(pieces, boxes, strict=True)]


def _shards(training: Training) -> dict[int, Tensor]:
    """Return what this rank's optimizer holds of each parameter, by the identity of its record; DTensors aside."""
    pairs = zip(training.parameters, training.values(), strict=True)
    nothing = torch.empty(0)
    return {id(held): nothing if value is None else value.detach() for held, value in pairs if not _is_placed(held)}


def _is_placed(held: HeldParameter) -> bool:
    return is_dtensor(held.tensor) or getattr(held.tensor, "ds_tensor", None) is not None


def _of_shard(held: HeldParameter, value: Tensor) -> HeldPart:
    """Return a range of a parameter, which is all that this rank has of it."""
    length = value.numel() if held.owned.length is None else held.owned.length
    region = WholeRegion(tuple(held.owned.shape), (held.owned.offset,), flat=True)
    return HeldPart(value.reshape(-1)[:length], region)
