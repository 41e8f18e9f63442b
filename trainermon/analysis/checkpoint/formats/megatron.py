"""Megatron-LM's older layout: a folder for each rank, `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`.

Which parameters are split over tensor parallel ranks, and how, follows from their names: the files do not say.
Source: Megatron-LM, megatron/training/checkpointing.py (`get_checkpoint_name`), and of megatron/core, 0.16,
tensor_parallel/layers.py, transformer/moe/experts.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.arrays import rows, viewed
from trainermon.analysis.checkpoint.formats.inert import leaves
from trainermon.analysis.checkpoint.formats.megatron_dist import arguments, layout_of
from trainermon.analysis.checkpoint.formats.megatron_optimizer import UnknownOrderError, local_parameters, states_of
from trainermon.analysis.checkpoint.formats.regular_files import file_names, read_all
from trainermon.analysis.checkpoint.formats.state_dicts import left_out
from trainermon.analysis.checkpoint.formats.torch_file import load_torch_file
from trainermon.analysis.checkpoint.pieces import Box, Checkpoint, Piece, StoredArray, TensorPieces
from trainermon.core.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d{3}))?(?:_(\d{3}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
FLAT = "distrib_optim.pt"
_ROWS = re.compile(  # the first dimension is split
    r".*(word_embeddings\.weight|(output_layer|lm_head)\.(weight|bias)"
    r"|(linear_qkv|linear_q|linear_kv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|linear_fc1"
    r"|query_key_value|inter_attention\.query|key_value|dense_h_to_4h)\.(weight|bias))"
)
_COLUMNS = re.compile(r".*(linear_proj|linear_fc2|attention\.dense|dense_4h_to_h)\.weight")
_COPIED = re.compile(  # every tensor parallel rank has the same
    r".*(norm[^.]*\.(weight|bias)|layer_norm_(weight|bias)|router\..*|gate_weight|position_embeddings\.weight"
    r"|(linear_proj|linear_fc2|dense|dense_4h_to_h|linear_q_down_proj|linear_kv_down_proj)\.(weight|bias)"
    r"|tokentype_embeddings\.weight|pooler\..*)"
)
_UNKNOWN = "its name does not tell whether tensor parallelism splits it"
GATED = re.compile(r".*(linear_fc1|dense_h_to_4h)\.(weight|bias)")
_LAYER = re.compile(r"((?:.*\.)?layers)\.(\d+)\.(.*)")
_LOCAL_EXPERT = re.compile(r"(.*\blocal_experts)\.(\d+)\.(.*)")
_GROUPED = re.compile(r"(.*\bexperts)\.(linear_fc[12])\.(weight|bias)(\d+)")
_FUSED = re.compile(r"(.*\bmlp\.experts)\.weight([12])")


class RankPlace(NamedTuple):
    """Which part of the model a rank holds: its numbers in the tensor, pipeline and expert parallel groups."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True, eq=False)
class SavedRank:
    """What a rank's file holds; `label` is the name of its folder."""

    place: RankPlace
    label: str
    state: Mapping[str, Any]


class RankTensor(NamedTuple):
    """A tensor of one rank, with its name in the whole model."""

    name: str
    rank: SavedRank
    stored: StoredArray


def tracked_iteration(folder: Path) -> Path | None:
    """Return the folder of the newest step in a run's folder; None: it is not Megatron's.

    Raises:
        CheckpointError: the file that names it names one that is not there.
    """
    names = file_names(folder)
    if TRACKER not in names:
        steps = [name for name in names if re.fullmatch(r"iter_\d{7,}", name)]
        return folder / steps[-1] if steps else folder / "release" if "release" in names else None
    text = read_all(folder / TRACKER, 64).decode("ascii", "replace").strip()
    name = "release" if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() else None
    if name is None or name not in names:
        raise CheckpointError(
            f"{folder / TRACKER} says {text!r:.20}, and no such step is there: name the step's folder"
        )
    return folder / name


def is_megatron(folder: Path) -> bool:
    """Return whether a folder has folders of ranks."""
    return any(_RANK.fullmatch(name) for name in file_names(folder))


def open_megatron(folder: Path) -> Checkpoint:
    """Return the weights in the files of all ranks, and the optimizer's state.

    Raises:
        CheckpointError: a rank's file is missing or damaged, or the shapes of two ranks do not fit together.
    """
    found = {match[0]: match for name in file_names(folder) if (match := _RANK.fullmatch(name))}
    states = {name: _state(folder / name) for name in found}
    args = arguments(next(iter(states.values())).get("args"))
    ranks = [SavedRank(_place(found[name], args), name, state) for name, state in states.items()]
    said = layout_of(ranks[0].state.get("args"))
    layout = {"tp": 1, "pp": 1, "ep": 1, **said}
    _refuse_missing(folder, ranks, layout, said)
    step = _one_step(folder, ranks)
    parts = {rank: _chunks(rank.state) for rank in ranks}
    first_layers = _first_layers(parts)

    def whole_tensors(parts: Mapping[SavedRank, Sequence[Any]]) -> dict[str, TensorPieces]:
        by_name: dict[str, list[RankTensor]] = {}
        for tensor in _renamed(parts, first_layers, args):
            by_name.setdefault(tensor.name, []).append(tensor)
        return {name: _joined(folder, tensors, args, layout) for name, tensors in by_name.items()}

    state, notes = _optimizer(folder, parts, args)
    return Checkpoint(
        path=folder,
        format="megatron",
        step=step,
        layout=layout,
        tensors=whole_tensors(parts),
        optimizer={kind: whole_tensors(own) for kind, own in state.items()},
        values={key: value for key, value in ranks[0].state.items() if not re.fullmatch(r"model\d*|optimizer", key)},
        unread=left_out(list(parts.values())),
        notes=notes,
    )


def _one_step(folder: Path, ranks: Sequence[SavedRank]) -> int | None:
    """Return the step that all ranks were saved on."""
    steps = {rank.state.get("iteration"): rank.label for rank in ranks}
    if len(steps) > 1:
        said = ", ".join(f"{label} is of step {step!r:.20}" for step, label in list(steps.items())[:3])
        raise CheckpointError(f"{folder}: {said}: the files are not of one checkpoint, copy them from one run again")
    (step,) = steps
    return step if type(step) is int else None


def _optimizer(
    folder: Path, parts: Mapping[SavedRank, Sequence[Any]], args: Mapping[str, Any]
) -> tuple[dict[str, dict[SavedRank, list[dict[str, StoredArray]]]], tuple[str, ...]]:
    """Return the optimizer's state by kind, rank, part of the model and name there, and what is to say about it."""
    found: dict[str, dict[SavedRank, list[dict[str, StoredArray]]]] = {}
    for rank, chunks in parts.items():
        flat = load_torch_file(folder / rank.label / FLAT) if FLAT in file_names(folder / rank.label) else None
        state = rank.state.get("optimizer")
        if flat is None and state is None:
            continue
        if flat is None and _is_elsewhere(state):
            return {}, (f"the state of the optimizer is not read: {rank.label} has no {FLAT}, copy it, too",)
        try:
            own = states_of(local_parameters(chunks), state, flat, args, is_first_stage=rank.place.pp == 0)
            for kind, parameter, stored in own:
                of_rank = found.setdefault(kind, {}).setdefault(rank, [{} for _ in chunks])
                of_rank[parameter.chunk][parameter.name] = stored
        except (UnknownOrderError, LookupError, TypeError, AttributeError, ValueError) as error:
            return {}, (f"the state of the optimizer is not read: of {rank.label}, {error}",)
    return found, ()


def _is_elsewhere(state: Any) -> bool:
    """Return whether an optimizer's state has no tensors in it, but only settings."""
    return next(leaves(state, StoredArray), None) is None


def _state(folder: Path) -> Mapping[str, Any]:
    names = file_names(folder)
    file = next((file for file in _FILES if file in names), None)
    if file is None:
        raise CheckpointError(f"{folder} has no {_FILES[0]}: copy it from the rank that wrote it")
    state = load_torch_file(folder / file)
    if not isinstance(state, dict):
        raise CheckpointError(f"{folder / file} holds a {type(state).__name__}, expected what Megatron saves")
    return state


def _place(match: re.Match[str], args: Mapping[str, Any]) -> RankPlace:
    """Return the rank that a folder's name says; with one number more it is the stage's, or the experts'."""
    second, third = (int(number) if number else None for number in match.group(2, 3))
    if second is not None and third is None and args.get("pipeline_model_parallel_size") == 1:
        second, third = None, second
    return RankPlace(int(match[1]), second or 0, third or 0)


def _refuse_missing(
    folder: Path, ranks: Sequence[SavedRank], layout: Mapping[str, int], said: Mapping[str, int]
) -> None:
    found = {rank.place for rank in ranks}
    for at, axis in enumerate(("tp", "pp", "ep")):
        count = 1 + max(place[at] for place in found)
        if axis in said and said[axis] < count:
            raise CheckpointError(
                f"{folder} has folders of {count} {axis} ranks, and its args say {said[axis]}: keep those of one run"
            )
    sizes = [max(layout[axis], 1 + max(place[i] for place in found)) for i, axis in enumerate(("tp", "pp", "ep"))]
    for tp in range(sizes[0]):
        for pp in range(sizes[1]):
            for ep in range(sizes[2]):
                if (tp, pp, ep) not in found:
                    raise CheckpointError(
                        f"{folder} has no folder of tensor rank {tp}, stage {pp}, expert rank {ep}, though it is split"
                        f" over {sizes[0]} × {sizes[1]} × {sizes[2]}: copy it, too"
                    )


def _chunks(state: Mapping[str, Any]) -> list[Any]:
    """Return the parts of the model that a rank holds: one, or one for each virtual stage."""
    if "model" in state:
        return [state["model"]]
    return [state[f"model{number}"] for number in range(len(state)) if f"model{number}" in state]


def _first_layers(parts: Mapping[SavedRank, Sequence[Any]]) -> dict[tuple[int, int, str], int]:
    """Return the number in the whole model of the first layer of each stack, by chunk, stage and name of the stack.

    Layers are counted: chunk after chunk, and in each stage after stage. So uneven stages are right, too.
    """
    counts: dict[tuple[int, int, str], int] = {}
    for rank, chunks in parts.items():
        for number, chunk in enumerate(chunks):
            for name, _ in leaves(chunk, StoredArray):
                if layer := _LAYER.fullmatch(name):
                    place = number, rank.place.pp, layer[1]
                    counts[place] = max(counts.get(place, 0), int(layer[2]) + 1)
    before: dict[str, int] = {}
    firsts = {}
    for place in sorted(counts):
        firsts[place] = before.get(place[2], 0)
        before[place[2]] = firsts[place] + counts[place]
    return firsts


def _renamed(
    parts: Mapping[SavedRank, Sequence[Any]], first_layers: Mapping[tuple[int, int, str], int], args: Mapping[str, Any]
) -> Iterator[RankTensor]:
    """Yield every tensor of every rank, layers and experts numbered over the whole model."""
    for rank, chunks in parts.items():
        for number, chunk in enumerate(chunks):
            for name, stored in leaves(chunk, StoredArray):
                if layer := _LAYER.fullmatch(name):
                    first = first_layers[number, rank.place.pp, layer[1]]
                    name = f"{layer[1]}.{int(layer[2]) + first}.{layer[3]}"
                if not name.endswith("_extra_state"):
                    yield from _experts(RankTensor(name, rank, stored), args)


def _experts(tensor: RankTensor, args: Mapping[str, Any]) -> Iterator[RankTensor]:
    """Yield the tensor of each expert of the whole model, whichever way the rank keeps its own."""
    num_experts, num_ranks = args.get("num_experts"), args.get("expert_model_parallel_size") or 1
    per_rank = num_experts // num_ranks if isinstance(num_experts, int) else 0
    first = tensor.rank.place.ep * per_rank
    if local := _LOCAL_EXPERT.fullmatch(tensor.name):
        yield tensor._replace(name=f"{local[1]}.{int(local[2]) + first}.{local[3]}")
    elif grouped := _GROUPED.fullmatch(tensor.name):
        name = f"{grouped[1]}.local_experts.{int(grouped[4]) + first}.{grouped[2]}.{grouped[3]}"
        yield tensor._replace(name=name)
    elif (fused := _FUSED.fullmatch(tensor.name)) and per_rank:
        for expert in range(per_rank):
            name = f"{fused[1]}.local_experts.{first + expert}.linear_fc{fused[2]}.weight"
            yield tensor._replace(name=name, stored=_of_fused(tensor.stored, expert, per_rank, fused[2]))
    else:
        yield tensor


def _of_fused(stored: StoredArray, expert: int, num_experts: int, which: str) -> StoredArray:
    """Return the weight of one expert, [out, in], out of all of a rank.

    `weight1` [hidden, experts · ffn] is a view of [experts, hidden, ffn], `weight2` [experts · ffn, hidden] of
    [experts, ffn, hidden].
    """
    size_in = stored.shape[0] if which == "1" else stored.shape[0] // num_experts
    size_out = stored.num_elements // (num_experts * size_in)
    return viewed(stored, expert * size_in * size_out, (size_out, size_in), (1, size_out))


def _joined(
    folder: Path, tensors: Sequence[RankTensor], args: Mapping[str, Any], layout: Mapping[str, int]
) -> TensorPieces:
    """Return the whole tensor of the parts of all ranks."""
    name, first = tensors[0].name, tensors[0].stored
    odd = next((t for t in tensors if (t.stored.shape, t.stored.dtype) != (first.shape, first.dtype)), None)
    if odd is not None:
        raise CheckpointError(
            f"{folder}: {name!r} is {odd.stored.dtype}{list(odd.stored.shape)} in {odd.rank.label}, but"
            f" {first.dtype}{list(first.shape)} in {tensors[0].rank.label}: the files are not of one checkpoint"
        )
    num_ranks = layout["tp"]
    if "experts." in name and args.get("expert_tensor_parallel_size"):
        num_ranks = args["expert_tensor_parallel_size"]
    dim = _split_dim(name, first.shape)
    if dim is None or num_ranks == 1:
        pieces = tuple(Piece(Box((0,) * len(first.shape), first.shape), t.stored, t.rank.label) for t in tensors)
        if num_ranks > 1 and not _COPIED.fullmatch(name):
            ranks = tuple(tensor.rank.place.tp % num_ranks for tensor in tensors)
            return TensorPieces(name, first.shape, first.dtype, pieces, (_UNKNOWN,), ranks)
        return TensorPieces(name, first.shape, first.dtype, pieces, ("replicated",) if len(tensors) > 1 else ())
    shape = (*first.shape[:dim], first.shape[dim] * num_ranks, *first.shape[dim + 1 :])
    takes_turns = "experts." in name and args.get("moe_mlp_glu_interleave_size")  # in blocks, on each rank alike
    num_blocks = 2 if args.get("swiglu") and GATED.fullmatch(name) and not takes_turns else 1
    pieces = tuple(piece for t in tensors for piece in _blocks(t, dim, shape, num_blocks, t.rank.place.tp % num_ranks))
    notes = ("gated: each rank has its part of both halves",) if num_blocks > 1 else ()
    if name.endswith("word_embeddings.weight") and isinstance(args.get("padded_vocab_size"), int):
        notes = (*notes, f"padded to {args['padded_vocab_size']} rows")
    return TensorPieces(name, shape, first.dtype, pieces, notes)


def _split_dim(name: str, shape: tuple[int, ...]) -> int | None:
    if _ROWS.fullmatch(name) and "router" not in name:
        return 0
    return 1 if _COLUMNS.fullmatch(name) and len(shape) > 1 else None


def known_split(name: str, shape: tuple[int, ...]) -> int | str | None:
    """Return in which dimension Megatron splits a parameter, None if every rank has all of it, else `unknown`."""
    dim = _split_dim(name, shape)
    return dim if dim is not None or _COPIED.fullmatch(name) else "unknown"


def _blocks(tensor: RankTensor, dim: int, shape: tuple[int, ...], num_blocks: int, rank: int) -> Iterator[Piece]:
    """Yield the rank's part of each of the equal blocks that a dimension has: one, or gate and up of a gated layer."""
    size = tensor.stored.shape[dim] // num_blocks
    for block in range(num_blocks):
        part = rows(tensor.stored, dim, block * size, size)
        starts = [0] * len(shape)
        starts[dim] = block * (shape[dim] // num_blocks) + rank * size
        yield Piece(Box(tuple(starts), part.shape), part, tensor.rank.label)
