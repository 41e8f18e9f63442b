"""Megatron-Core's `torch_dist`: a distributed checkpoint of torch whose layers are stacked, and `common.pt`.

Source: megatron/core/dist_checkpointing, megatron/core/optimizer/distrib_optimizer.py, 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainermon.analysis.checkpoint.formats.arrays import item
from trainermon.analysis.checkpoint.formats.dcp import METADATA, read_contents
from trainermon.analysis.checkpoint.formats.inert import InertObject
from trainermon.analysis.checkpoint.formats.megatron_buckets import by_name
from trainermon.analysis.checkpoint.formats.regular_files import file_names, read_json
from trainermon.analysis.checkpoint.formats.torch_file import load_torch_file
from trainermon.analysis.checkpoint.pieces import MAIN, Box, Checkpoint, Piece, TensorPieces
from trainermon.core.errors import CheckpointError

CONFIG = "metadata.json"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_BUCKET = re.compile(r"((?:chained_\d+\.)?optimizer\.distributed\..+)\.(\w+)")
_STACKED = re.compile(r"(.*\blayers\.)(?!\d)(.*)")
_EXPERTS = re.compile(r"(.*\bexperts\.)experts\.(.*)")
_MAIN_KINDS = ("param", "fp32_param")
_LAYOUT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}


def open_megatron_dist(folder: Path) -> Checkpoint:
    """Return what a folder with `metadata.json` and `.metadata` holds, a tensor for each layer and expert.

    Raises:
        CheckpointError: a file is missing or damaged, or the backend is another one.
    """
    backend = read_json(folder / CONFIG).get("sharded_backend")
    if backend != "torch_dist" or METADATA not in file_names(folder):
        raise CheckpointError(
            f"{folder / CONFIG} names the backend {backend!r:.40}, and {METADATA} should be beside it: only"
            " torch_dist is read, save it with --ckpt-format torch_dist"
        )
    found = read_contents(folder)
    common = load_torch_file(folder / "common.pt")
    values = {**found.values, **(common if isinstance(common, dict) else {})}
    tensors: dict[str, TensorPieces] = {}
    optimizer: dict[str, dict[str, TensorPieces]] = {}
    for full, tensor in found.tensors.items():
        kind, name = role(full)
        target = tensors if kind is None else optimizer.setdefault(kind, {})
        for part in unstacked(replace(tensor, name=name)):
            if part.name in target:
                raise CheckpointError(f"{folder / METADATA} has {part.name!r} twice, once as {full!r}: save it again")
            target[part.name] = part
    flat: tuple[str, ...] = ()
    if any(_BUCKET.fullmatch(name) for name in found.tensors):
        try:
            optimizer = by_name(tensors, optimizer, arguments(values.get("args")))
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            flat = (f"the optimizer's state is in flat buckets, which do not name their parameters: {error}",)
    return Checkpoint(
        path=folder,
        format="megatron_dist",
        unread=found.unread,
        step=values["iteration"] if type(values.get("iteration")) is int else None,
        layout=layout_of(values.get("args")),
        tensors=tensors,
        optimizer=optimizer,
        values=values,
        notes=(*found.notes, *flat),
    )


def role(full: str) -> tuple[str | None, str]:
    """Return the kind of optimizer state, None of a weight, and the name of the parameter or bucket."""
    state = _STATE.fullmatch(full)
    if state:
        return MAIN if state[1] in _MAIN_KINDS else state[1], _bare(state[2])
    bucket = _BUCKET.fullmatch(full)
    if bucket:
        return MAIN if bucket[2] in _MAIN_KINDS else bucket[2], bucket[1]
    return None, _bare(full)


def _bare(name: str) -> str:
    """Return a name without what wrappers put before it."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def unstacked(tensor: TensorPieces) -> Iterator[TensorPieces]:
    """Yield the tensor of each layer and expert of a stack of them; of anything else, the tensor."""
    stack = _STACKED.fullmatch(tensor.name)
    experts = _EXPERTS.fullmatch(tensor.name)
    if stack and tensor.shape:
        for layer in _along_first(tensor, f"{stack[1]}{{}}.{stack[2]}"):
            yield from unstacked(layer)
    elif experts and len(tensor.shape) > 1:
        yield from _along_first(tensor, f"{experts[1]}local_experts.{{}}.{experts[2]}")
    else:
        yield tensor


def _along_first(tensor: TensorPieces, name: str) -> Iterator[TensorPieces]:
    pieces: dict[int, list[Piece]] = {index: [] for index in range(tensor.shape[0])}
    for piece in tensor.pieces:
        assert isinstance(piece.region, Box)
        first, starts, sizes = piece.region.starts[0], piece.region.starts[1:], piece.region.sizes[1:]
        for index in range(piece.region.sizes[0]):
            pieces[first + index].append(Piece(Box(starts, sizes), item(piece.stored, index), piece.label))
    for index, parts in pieces.items():
        yield replace(tensor, name=name.replace("{}", str(index)), shape=tensor.shape[1:], pieces=tuple(parts))


def arguments(args: Any) -> Mapping[str, Any]:
    """Return Megatron's arguments by name, empty where there are none."""
    return args.attributes() if isinstance(args, InertObject) else {}


def layout_of(args: Any) -> dict[str, int]:
    """Return how Megatron's arguments split the model."""
    found = {short: arguments(args).get(name) for short, name in _LAYOUT.items()}
    return {short: size for short, size in found.items() if type(size) is int}
