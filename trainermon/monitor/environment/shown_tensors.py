"""What is kept of a tensor: where it stands in the whole one, its hash there, its moments. Never an element."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainermon.core.values import STATISTICS
from trainermon.statistics import moments
from trainermon.statistics.positions import WholeRegion, positional_hash, samples_hash

_PLACES = {name: STATISTICS.index(name) for name in ("count", "min", "max", "sum", "sum_sq", "nans", "infs")}


@torch.no_grad()
def part_of(tensor: Tensor, region: WholeRegion) -> dict[str, Any]:
    """Return what is kept of a part of a tensor: hash, number of elements, and moments. Waits for the device."""
    row = torch.empty((1, len(STATISTICS)), dtype=torch.float64, device=tensor.device)
    moments([tensor], row)
    values = row[0].tolist()
    found = {name: values[place] for name, place in _PLACES.items()}
    return {
        "hash": f"{positional_hash(tensor, region):016x}",
        "count": int(tensor.numel()),
        "min": found["min"],
        "max": found["max"],
        "sum": found["sum"],
        "sum_sq": found["sum_sq"],
        "nonfinite": int(found["nans"] + found["infs"]),
    }


def input_of(tensor: Tensor) -> dict[str, Any]:
    """Return what is kept of an input: as of a part, and what stands for its samples, whatever their order."""
    region = WholeRegion(tuple(tensor.shape), (0,) * tensor.dim())
    about = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    samples = f"{samples_hash(tensor.detach()):016x}" if tensor.dim() and tensor.numel() else ""
    return {**about, **part_of(tensor, region), "samples": samples}


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in arguments by dotted name: `args.0`, `kwargs.batch.input_ids`; others are passed over."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{name}.{number}")
