"""DeepSpeed's checkpoints of models that are split over tensor parallel ranks and pipeline stages, joined.

How a parameter is split stands in `universal_checkpoint_info`, which AutoTP and Megatron-DeepSpeed save. Without it,
Megatron's names tell; what they do not tell is refused. Source: deepspeed/checkpoint/ds_to_universal.py
(`merge_tp_slices`), deepspeed/checkpoint/reshape_3d_utils.py, deepspeed/runtime/pipe/module.py, 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.inert import leaves
from trainermon.analysis.checkpoint.formats.megatron import GATED, known_split
from trainermon.analysis.checkpoint.formats.megatron_dist import arguments
from trainermon.analysis.checkpoint.formats.regular_files import file_names
from trainermon.analysis.checkpoint.formats.split_parts import Split, evenly, moved
from trainermon.analysis.checkpoint.formats.torch_file import load_torch_file
from trainermon.analysis.checkpoint.pieces import StoredArray, TensorPieces, whole
from trainermon.core.errors import CheckpointError

_LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
_TIED = re.compile(r"tied_modules\.[^.]+\.(.*)")
_SUB_PARAMS = "parameter_with_sub_params"
_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_ROWS = "parameter_with_row_parallelism_patterns"
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_KEYS = (_SUB_PARAMS, _REPLICATED, _AVERAGED, _ROWS, _HALVES, "vocabulary_parameter_patterns")
_MAX_PATTERN = 400  # characters
_QUANTIFIER = re.compile(r"(?<!\\)[*+?{]")
_QUANTIFIED_GROUP = re.compile(r"\)[*+?{]")
_MAX_QUANTIFIERS = 6


class ModelRank(NamedTuple):
    """Which part of the model a file holds: the numbers of its tensor parallel rank and of its stage."""

    tp: int
    pp: int


class Sizes(NamedTuple):
    """Over how many tensor parallel ranks and stages the model is split."""

    tp: int
    pp: int


def layer_files(folder: Path) -> dict[int, dict[int, str]]:
    """Return the files of a pipeline's layers, by number of the layer and of the tensor parallel rank.

    Raises:
        CheckpointError: there are files of experts, which are not read.
    """
    found: dict[int, dict[int, str]] = {}
    for name in file_names(folder):
        match = _LAYER.fullmatch(name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2] or 0)] = name
        elif name.startswith("layer_") or "expp_rank_" in name:
            raise CheckpointError(
                f"{folder / name}: parts of a model in files of their own, as of DeepSpeed's experts, are not read:"
                " convert it with ds_to_universal.py, and open that"
            )
    return found


def sizes_of(folder: Path, states: Mapping[int, Mapping[str, Any]], layers: Mapping[int, Mapping[int, str]]) -> Sizes:
    """Return how the model is split, which newer files say, and of older ones the files of layers.

    Raises:
        CheckpointError: the file of a rank or of a layer is missing.
    """
    count = 1 + max(states)
    said = next(iter(states.values())).get("checkpoint_parallel_dimensions")
    if isinstance(said, dict):
        tp, pp = int(said["tp_degree"]), int(said["pp_degree"])
    else:
        tp = 1 + max((rank for ranks in layers.values() for rank in ranks), default=count - 1)
        pp = max(1, count // tp)
    for number in range(tp * pp):
        if number not in states:
            raise CheckpointError(
                f"{folder} has no mp_rank_{number:02d}_model_states.pt, though it is split over {tp} tensor parallel"
                f" ranks and {pp} stages: copy it, too"
            )
    if count > tp * pp:
        raise CheckpointError(f"{folder} has files of {count} model ranks, expected {tp} × {pp}: keep those of one run")
    for layer, ranks in layers.items():
        for rank in range(tp):
            if rank not in ranks:
                name = f"layer_{layer:02d}-model_{rank:02d}-model_states.pt" if tp > 1 else f"layer_{layer:02d}-…"
                raise CheckpointError(f"{folder} has no {name}, though there are {tp} tensor parallel ranks: copy it")
    return Sizes(tp, pp)


def place_of(number: int, sizes: Sizes) -> ModelRank:
    """Return the place of `mp_rank_NN`: ranks of a stage follow each other."""
    return ModelRank(number % sizes.tp, number // sizes.tp)


def layer_tensors(
    folder: Path, layers: Mapping[int, Mapping[int, str]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[ModelRank, TensorPieces]]:
    """Yield the weights of a pipeline's layers; `shapes` are those of parameters by name, as the optimizer has them.

    A layer that two stages share has the name that the optimizer gives it, if one only fits.

    Raises:
        CheckpointError: a parameter is in no file of a layer.
    """
    found: set[str] = set()
    for layer, ranks in sorted(layers.items()):
        for rank, file in sorted(ranks.items()):
            for name, stored in leaves(load_torch_file(folder / file), StoredArray):
                full = f"{layer}.{name}"
                if full not in shapes:
                    tied = [other for other in shapes if (match := _TIED.fullmatch(other)) and match[1] == name]
                    full = tied[0] if len(tied) == 1 and shapes[tied[0]] == stored.shape else full
                found.add(full)
                yield ModelRank(rank, 0), whole(full, stored, file)
    lacking = [name for name in shapes if name not in found]
    if layers and lacking:
        raise CheckpointError(
            f"{folder} has no layer_*-model_states.pt with {lacking[0]!r}, nor with {len(lacking) - 1:,} others: copy"
            " those of all layers"
        )


def joined(
    folder: Path, parts: Sequence[tuple[ModelRank, TensorPieces]], num_ranks: int, state: Mapping[str, Any]
) -> dict[str, TensorPieces]:
    """Return whole tensors by name, of the parts that ranks have.

    Raises:
        CheckpointError: how one is split is not known, or its parts do not fit together.
    """
    by_name: dict[str, list[tuple[ModelRank, TensorPieces]]] = {}
    for rank, tensor in parts:
        by_name.setdefault(tensor.name, []).append((rank, tensor))
    info = state.get("universal_checkpoint_info")
    patterns = info if isinstance(info, dict) and any(key in info for key in _KEYS) else None
    args = arguments(state.get("args"))
    return {name: _whole(folder, own, num_ranks, patterns, args) for name, own in by_name.items()}


def _whole(
    folder: Path,
    own: Sequence[tuple[ModelRank, TensorPieces]],
    num_ranks: int,
    info: Mapping[str, Any] | None,
    args: Mapping[str, Any],
) -> TensorPieces:
    name, first = own[0][1].name, own[0][1]
    shapes = {rank.tp: tensor.shape for rank, tensor in own}
    lacking = [rank for rank in range(num_ranks) if rank not in shapes]
    if lacking:
        raise CheckpointError(
            f"{folder}: tensor parallel rank {lacking[0]} has no {name!r}, others have: copy its files"
        )
    ordered = [shapes[rank] for rank in range(num_ranks)]
    try:
        split = Split(None)
        if num_ranks > 1:
            split = _split_by_info(name, ordered, info) if info is not None else _split_by_name(name, ordered, args)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: how {name!r} is split: {error}") from error
    for rank, tensor in own:
        expected = list(first.shape)
        if split.dim is not None:
            expected[split.dim] = sum(widths[rank.tp] for widths in split.widths)
        if tensor.shape != tuple(expected) or tensor.dtype != first.dtype:
            raise CheckpointError(
                f"{folder}: {name!r} is {tensor.dtype}{list(tensor.shape)} on tensor parallel rank {rank.tp}, expected"
                f" {first.dtype}{expected}: the files are not of one checkpoint"
            )
    shape = list(first.shape)
    if split.dim is not None:
        shape[split.dim] = sum(map(sum, split.widths))
    notes = (*first.notes, *((split.note,) if split.note else ()))
    if split.dim is None:
        kept = own[:1] if split.note else own
        pieces = tuple(piece for _, tensor in kept for piece in tensor.pieces)
        return replace(first, pieces=pieces, notes=notes)
    pieces = tuple(piece for rank, tensor in own for piece in moved(tensor, rank.tp, split))
    return replace(first, shape=tuple(shape), pieces=pieces, notes=notes)


# ---------------------------------------------------------------------- which parameters are split, and how


def _split_by_info(name: str, shapes: Sequence[tuple[int, ...]], info: Mapping[str, Any]) -> Split:
    if _matching(info.get(_REPLICATED), name):
        return Split(None)
    if _matching(info.get(_AVERAGED), name):
        return Split(None, note="ranks may differ in it, and average it when it is converted: the first rank's")
    if _matching(info.get(_HALVES), name):
        return evenly(shapes, 0, 2)
    for entry in info.get(_SUB_PARAMS) or ():
        pattern = _matching(entry["patterns"], name)
        if pattern:
            return _by_parts(entry, shapes, (info.get("sub_param_shard_widths") or {}).get(pattern))
    dim = 1 if _matching(info.get(_ROWS), name) and len(shapes[0]) > 1 else 0
    if not shapes[0]:
        return Split(None)
    return Split(dim, [[shape[dim] for shape in shapes]])


def _by_parts(entry: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], widths: Any) -> Split:
    """Return the split of a parameter that has several parts, such as q, k and v."""
    dim, viewed = int(entry["partition_dim"]), entry["shape"]
    if len(viewed) != len(shapes[0]):
        raise ValueError(f"its parts are those of {len(viewed)} dimensions, it has {len(shapes[0])}")
    parts = viewed[dim]
    if widths is None:
        if not isinstance(parts, (tuple, list)):
            return evenly(shapes, dim, int(parts))
        widths = [[size // len(shapes)] * len(shapes) for size in parts]
        if any(size % len(shapes) for size in parts):
            raise ValueError(f"parts of {list(parts)} cannot be split evenly over {len(shapes)} ranks")
    return Split(dim, [[int(width) for width in own] for own in widths])


def _split_by_name(name: str, shapes: Sequence[tuple[int, ...]], args: Mapping[str, Any]) -> Split:
    dim = known_split(name, shapes[0])
    if dim == "unknown":
        raise ValueError(
            "there is no universal_checkpoint_info, and its name is none of Megatron's: convert it with"
            " ds_to_universal.py, or save with that key in client_state"
        )
    if not isinstance(dim, int):
        return Split(None)
    is_gated = args.get("swiglu") and GATED.fullmatch(name) is not None
    return evenly(shapes, dim, 2 if is_gated else 1)


def _matching(patterns: Any, name: str) -> str | None:
    """Return the pattern of a list that the beginning of a name matches.

    Patterns are of the file: those that could take long are refused.
    """
    for pattern in patterns or ():
        if not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN:
            raise ValueError(f"{pattern!r:.60} is no pattern of a name")
        if _QUANTIFIED_GROUP.search(pattern) or len(_QUANTIFIER.findall(pattern)) > _MAX_QUANTIFIERS:
            raise ValueError(f"{pattern!r:.60} is too involved a pattern: expected one of a name")
        try:
            if re.match(pattern, name):
                return pattern
        except re.error as error:
            raise ValueError(f"{pattern!r:.60} is no pattern of a name ({error})") from error
    return None
