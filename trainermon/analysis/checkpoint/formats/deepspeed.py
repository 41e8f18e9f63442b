"""DeepSpeed's checkpoints: ZeRO stages 0 to 3, and universal ones; `deepspeed_parallel` joins those of split models.

Source: deepspeed/utils/zero_to_fp32.py, deepspeed/checkpoint/ds_to_universal.py, 0.19.8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.arrays import cut, viewed
from trainermon.analysis.checkpoint.formats.deepspeed_lacking import FROZEN_SHAPES, NO_MODEL_STATES, Lacking, lacking
from trainermon.analysis.checkpoint.formats.deepspeed_parallel import (
    ModelRank,
    Sizes,
    joined,
    layer_files,
    layer_tensors,
    place_of,
    sizes_of,
)
from trainermon.analysis.checkpoint.formats.inert import InertObject, leaves
from trainermon.analysis.checkpoint.formats.regular_files import file_names, read_all
from trainermon.analysis.checkpoint.formats.safetensors_file import contiguous
from trainermon.analysis.checkpoint.formats.state_dicts import left_out, split_state
from trainermon.analysis.checkpoint.formats.torch_file import load_torch_file
from trainermon.analysis.checkpoint.pieces import (
    MAIN,
    Checkpoint,
    FlatRange,
    Piece,
    StoredArray,
    TensorPieces,
    whole,
)
from trainermon.core.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}  # DeepSpeed's own names
_TRACKERS = ("latest", "latest_universal")
_NO_TENSORS = ("module", "buffer_names", "param_shapes", FROZEN_SHAPES, "frozen_param_fragments")
UNIVERSAL = "zero"

Flat = Sequence[tuple[str, StoredArray]]
"""One-dimensional arrays end to end, with who wrote each."""


class ZeroParts(NamedTuple):
    """The files of the ranks: states of the model and of the optimizer, by rank; `label` says of which model rank."""

    folder: Path
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    label: str = ""


class OwnState(NamedTuple):
    """What the files of a model rank hold of its part: weights by name, the optimizer's state by kind and name."""

    tensors: dict[str, TensorPieces]
    optimizer: dict[str, dict[str, TensorPieces]]


def tracked_folder(folder: Path) -> Path | None:
    """Return the folder that `latest` names in a run's folder; None: there is no such file.

    Raises:
        CheckpointError: it names a folder that is not there.
    """
    names = file_names(folder)
    tracker = next((name for name in _TRACKERS if name in names), None)
    if tracker is None:
        return None
    tag = read_all(folder / tracker, 4096).decode("utf-8", "replace").strip()
    if Path(tag).name != tag or not (folder / tag).is_dir():
        raise CheckpointError(f"{folder / tracker} names {tag!r:.60}, which is no folder there: name the step's folder")
    return folder / tag


def is_deepspeed(folder: Path) -> bool:
    """Return whether a folder has the files of DeepSpeed's ranks, or is a universal checkpoint."""
    return any(_MODEL.fullmatch(name) for name in file_names(folder)) or is_universal(folder)


def is_universal(folder: Path) -> bool:
    """Return whether a folder has a folder of parameters, each a folder of files."""
    zero = folder / UNIVERSAL
    return zero.is_dir() and any((zero / name / "fp32.pt").exists() for name in file_names(zero))


def open_deepspeed(folder: Path) -> Checkpoint:
    """Return what the files of all ranks hold.

    Weights are those that the model is trained in; at stage 3, which does not save them, the float32 ones.

    Raises:
        CheckpointError: a rank's file is missing or damaged, or it is not known how a parameter is split.
    """
    if is_universal(folder):
        return _open_universal(folder)
    parts = _by_model_rank(folder)
    layers = layer_files(folder)
    firsts = {number: part.models[0] for number, part in parts.items() if part.models}
    if not firsts:
        raise CheckpointError(f"{folder} has no *_model_states.pt: copy those of all ranks")
    sizes = sizes_of(folder, firsts, layers)
    first, stage, num_replicas = firsts[0], *_alike(folder, parts)
    own = {place_of(number, sizes): _of_rank(part, stage) for number, part in parts.items()}
    notes: tuple[str, ...] = ()
    if len(own) == 1 and not layers:
        tensors, optimizer = own[ModelRank(0, 0)]
    else:
        tensors, optimizer, notes = _of_all(folder, own, layers, sizes, firsts)
    step = first.get("global_steps")
    lacks = lacking(firsts.values(), tensors, stage)
    return Checkpoint(
        path=folder,
        format="deepspeed",
        step=step if type(step) is int else None,
        layout={**({"tp": sizes.tp, "pp": sizes.pp} if len(own) > 1 else {}), "zero": stage, "dp": num_replicas},
        tensors=tensors,
        optimizer=optimizer,
        values={key: value for key, value in first.items() if key not in _NO_TENSORS},
        unread=left_out(first.get("module")),
        missing=lacks.missing,
        unsaid=lacks.unsaid,
        notes=(*(("stage 3 saves no weights but the float32 ones",) if stage == 3 else ()), *notes, *lacks.notes),
    )


def _of_rank(parts: ZeroParts, stage: int) -> OwnState:
    """Return the weights and the optimizer's state that the files of one model rank hold."""
    first = parts.models[0]
    if stage == 0:
        state = {key: first.get(key) for key in ("module", "optimizer")}
        tensors, optimizer = split_state(state, f"{parts.label}rank 0")[:2]
    else:
        tensors, optimizer = _weights(parts, stage), _optimizer(parts, stage)
    if stage == 3:
        tensors |= optimizer.get(MAIN, {})
    for name, other in _shared(first).items():
        for target in (tensors, *optimizer.values()):
            if other in target:
                target[name] = replace(target[other], name=name)
    return OwnState(tensors, optimizer)


def _of_all(
    folder: Path,
    own: Mapping[ModelRank, OwnState],
    layers: Mapping[int, Mapping[int, str]],
    sizes: Sizes,
    states: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[str, TensorPieces], dict[str, dict[str, TensorPieces]], tuple[str, ...]]:
    """Return whole weights and optimizer's state of the parts of all model ranks, and what is to say about them."""
    groups = [group for state in states.values() for group in state.get("param_shapes") or ()]
    shapes = {str(name): tuple(shape) for group in groups for name, shape in group.items()}
    parts = [(rank, tensor) for rank, state in own.items() for tensor in state.tensors.values()]
    parts += layer_tensors(folder, layers, shapes)
    kinds = dict.fromkeys(kind for state in own.values() for kind in state.optimizer)
    by_kind = {
        kind: [(rank, tensor) for rank, state in own.items() for tensor in state.optimizer.get(kind, {}).values()]
        for kind in kinds
    }
    tensors = joined(folder, parts, sizes.tp, states[0])
    known = {kind: moments for kind, moments in by_kind.items() if all(tensor.name in tensors for _, tensor in moments)}
    notes = ("the optimizer's state is not read: it numbers parameters, and no file says which is which",)
    found = {kind: joined(folder, moments, sizes.tp, states[0]) for kind, moments in known.items()}
    return tensors, found, notes if len(known) < len(by_kind) else ()


def _by_model_rank(folder: Path) -> dict[int, ZeroParts]:
    """Return what the files hold, by model rank, which `mp_rank` numbers."""
    names = file_names(folder)
    models = [match for name in names if (match := _MODEL.fullmatch(name))]
    optimizers = [match for name in names if (match := _OPTIMIZER.fullmatch(name))]
    numbers = sorted({int(match[2]) for match in (*models, *optimizers)})
    found = {}
    for number in numbers:
        own = [_by_rank(folder, [m for m in matches if int(m[2]) == number]) for matches in (models, optimizers)]
        states = [state.get("optimizer_state_dict") or {} for state in own[1]]
        found[number] = ZeroParts(folder, own[0], states, f"model rank {number}, " if len(numbers) > 1 else "")
    return found


def _alike(folder: Path, parts: Mapping[int, ZeroParts]) -> tuple[int, int]:
    """Return the stage of ZeRO and the number of replicas, which are the same on all model ranks."""
    steps: dict[Any, str] = {}
    found: dict[tuple[int, int], str] = {}
    for part in parts.values():
        first = part.models[0] if part.models else {}
        num_replicas = len(part.optimizers) or int(first.get("dp_world_size") or 1)
        found.setdefault((_stage(part), num_replicas), part.label)
        steps.setdefault(first.get("global_steps"), part.label)
    for values, what in ((steps, "step"), (found, "stage and number of ranks")):
        if len(values) > 1:
            said = ", ".join(f"{label.rstrip(', ')} has {value}" for value, label in list(values.items())[:2])
            raise CheckpointError(f"{folder}: of one {what} are not all files: {said}: copy them from one run again")
    return next(iter(found))


def _is_split(folder: Path, found: Sequence[re.Match[str]]) -> bool:
    return any(match[2] != "00" for match in found) or any(name.startswith("layer_") for name in file_names(folder))


def _by_rank(folder: Path, found: Sequence[re.Match[str]]) -> list[dict[str, Any]]:
    """Return what the files of the ranks of one model rank hold, in order, none missing."""
    files = {int(match[1] or 0): match[0] for match in found}
    for rank in range(max(files, default=-1) + 1):
        if rank not in files:
            raise CheckpointError(f"{folder} has no file of rank {rank}, as {found[0][0]} is one: copy it, too")
    states = [load_torch_file(folder / files[rank]) for rank in sorted(files)]
    for rank, state in enumerate(states):
        if not isinstance(state, dict):
            raise CheckpointError(f"{folder / files[rank]} holds a {type(state).__name__}, expected DeepSpeed's state")
    return states


def _stage(parts: ZeroParts) -> int:
    if not parts.models:
        raise CheckpointError(f"{parts.folder} has no *_model_states.pt: copy those of all ranks")
    if not parts.optimizers:
        if not isinstance(parts.models[0].get("param_shapes"), list):
            return 0
        raise CheckpointError(
            f"{parts.folder} has no *_optim_states.pt, which have the weights: copy those of all ranks"
        )
    stage, counts = parts.optimizers[0].get("zero_stage"), parts.optimizers[0].get("partition_count")
    number = stage.arguments[0] if isinstance(stage, InertObject) and stage.arguments else stage
    number = _STAGES.get(number, number) if isinstance(number, str) else number
    expected = max(counts, default=0) if isinstance(counts, list) else counts
    if number not in (1, 2, 3) or expected != len(parts.optimizers):
        raise CheckpointError(
            f"{parts.folder} has {len(parts.optimizers)} files of optimizer states at stage {number!r:.20}, expected"
            f" {expected!r:.20} at 1, 2 or 3: copy those of all ranks"
        )
    if number == 3 and len(parts.models) != expected:
        raise CheckpointError(
            f"{parts.folder} has {len(parts.models)} files of model states, not {expected}: copy those of all ranks"
        )
    return int(number)


def _weights(parts: ZeroParts, stage: int) -> dict[str, TensorPieces]:
    """Return the weights as they are trained in, the frozen ones of stage 3 from all ranks."""
    first = parts.models[0]
    module = leaves(first.get("module"), StoredArray)
    shapes = first.get(FROZEN_SHAPES) or {}
    if stage < 3:
        return {name: whole(name, stored, f"{parts.label}rank 0") for name, stored in module}
    buffers = set(first.get("buffer_names") or ())
    found = {name: whole(name, stored, f"{parts.label}rank 0") for name, stored in module if name in buffers}
    for name, shape in shapes.items():
        fragments = [(state.get("frozen_param_fragments") or {}).get(name) for state in parts.models]
        if None not in fragments:
            flat = [_flat(stored, f"{parts.label}rank {rank}") for rank, stored in enumerate(fragments)]
            found[name] = _tensor(parts.folder, name, tuple(shape), flat, 0)
    return found


def _flat(stored: Any, label: str) -> tuple[str, StoredArray]:
    if not isinstance(stored, StoredArray) or stored.strides != contiguous(stored.shape):
        raise CheckpointError(f"{label} has a {type(stored).__name__} for a part of the flat weights: save it again")
    return label, viewed(stored, 0, (stored.num_elements,), (1,))


def _tensor(folder: Path, name: str, shape: tuple[int, ...], flat: Flat, start: int) -> TensorPieces:
    """Return the tensor that begins at a place of arrays end to end."""
    size = math.prod(shape)
    pieces = tuple(cut(flat, start, size))
    found = sum(piece.stored.shape[0] for piece in pieces)
    if found != size:
        raise CheckpointError(f"{folder} has {found:,} of the {size:,} elements of {name!r}: a rank's file is cut off")
    return TensorPieces(name, shape, flat[0][1].dtype, pieces)


def _optimizer(parts: ZeroParts, stage: int) -> dict[str, dict[str, TensorPieces]]:
    """Return the float32 weights and the moments of every parameter, by kind."""
    shapes = [{str(name): tuple(shape) for name, shape in group.items()} for group in parts.models[0]["param_shapes"]]
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    groups: list[Any] = [state.get(key, []) for state in parts.optimizers]
    if not all(isinstance(group, list) and group and len(group) == len(groups[0]) for group in groups):
        raise CheckpointError(f"{parts.folder} lacks {key} of a rank: expected what DeepSpeed saves at stage {stage}")
    kinds: dict[str, list[list[Any]]] = {MAIN: groups}
    moments = [[_moments(state, index, stage) for index in range(len(groups[0]))] for state in parts.optimizers]
    for kind in dict.fromkeys(kind for rank in moments for group in rank for kind in group):
        kinds[kind] = [[group.get(kind) for group in rank] for rank in moments]
    place = _placed_3 if stage == 3 else _placed_1
    return {kind: dict(place(parts, shapes, values)) for kind, values in kinds.items()}


def _moments(state: Mapping[str, Any], index: int, stage: int) -> dict[str, StoredArray]:
    """Return the moments of a group of one rank: the arrays as long as the group."""
    base = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    found = base.get("state", {}).get(index) if isinstance(base, dict) else None
    if isinstance(base, list) and index < len(base):  # with elastic_checkpoint
        found = base[index]
    values = found if isinstance(found, dict) else {}
    return {str(k): value for k, value in values.items() if isinstance(value, StoredArray) and value.shape}


def _placed_1(
    parts: ZeroParts, shapes: Sequence[Mapping[str, tuple[int, ...]]], values: Sequence[Sequence[Any]]
) -> Iterator[tuple[str, TensorPieces]]:
    """Yield the tensors of stages 1 and 2: the parts of all ranks end to end are the parameters end to end."""
    paddings = parts.optimizers[0].get("param_alignment_paddings")
    for index, group in enumerate(shapes):
        if any(rank[index] is None for rank in values):
            continue
        flat = [_flat(rank[index], f"{parts.label}rank {number}") for number, rank in enumerate(values)]
        start = 0
        for position, (name, shape) in enumerate(group.items()):
            yield name, _tensor(parts.folder, name, shape, flat, start)
            start += math.prod(shape) + (paddings[index][position] if paddings else 0)


def _placed_3(
    parts: ZeroParts, shapes: Sequence[Mapping[str, tuple[int, ...]]], values: Sequence[Sequence[Any]]
) -> Iterator[tuple[str, TensorPieces]]:
    """Yield the tensors of stage 3: every parameter is cut into equal parts, one for each rank, the last one padded."""
    if any(group is None for rank in values for group in rank):
        return
    flats = [[_flat(group, f"{parts.label}rank {number}") for group in rank] for number, rank in enumerate(values)]
    start = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        share = -(-math.prod(shape) // len(values))
        mine = [(piece.label, piece.stored) for flat in flats for piece in cut(flat, start, share)]
        yield name, _tensor(parts.folder, name, shape, mine or flats[0], 0)
        start += share


def _shared(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of tied parameters, with the name that the weights are saved under."""
    shared = state.get("shared_params")
    return {str(name): str(other) for name, other in shared.items()} if isinstance(shared, dict) else {}


def _open_universal(folder: Path) -> Checkpoint:
    models = _model_states(folder)
    state = models[0] if models else {}
    shapes = {str(name): tuple(shape) for group in state.get("param_shapes") or () for name, shape in group.items()}
    optimizer: dict[str, dict[str, TensorPieces]] = {}
    for name in file_names(folder / UNIVERSAL):
        place = folder / UNIVERSAL / name
        for file in (file for file in file_names(place) if file.endswith(".pt")) if place.is_dir() else ():
            value = load_torch_file(place / file)
            stored = value.get("param") if isinstance(value, dict) else value
            if isinstance(stored, StoredArray):
                kind = MAIN if file == "fp32.pt" else file.removesuffix(".pt")
                optimizer.setdefault(kind, {})[name] = _shaped(stored, name, f"{name}/{file}", shapes.get(name))
    tensors = dict(optimizer.get(MAIN, {}))
    bare = sorted({name for kind in optimizer.values() for name in kind} - set(tensors))
    if bare:
        raise CheckpointError(f"{folder / UNIVERSAL / bare[0]} has no fp32.pt: convert the checkpoint again")
    step = state.get("global_steps")
    tensors |= _untrained(folder, models, tensors)
    lacks = lacking(models[:1], tensors, _configured_stage(state)) if models else Lacking(unsaid=(NO_MODEL_STATES,))
    return Checkpoint(
        path=folder,
        format="universal",
        step=step if type(step) is int else None,
        tensors=tensors,
        optimizer=optimizer,
        values={key: value for key, value in state.items() if key not in _NO_TENSORS},
        missing=lacks.missing,
        unsaid=lacks.unsaid,
        notes=lacks.notes,
    )


def _configured_stage(state: Mapping[str, Any]) -> int | None:
    """Return the stage of ZeRO that a universal checkpoint was made of; None: its configuration does not say."""
    config = state.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return stage if type(stage) is int else None


def _model_states(folder: Path) -> list[dict[str, Any]]:
    """Return what the model's files beside the parameters hold, nothing if it was split by more than ZeRO."""
    found = [match for name in file_names(folder) if (match := _MODEL.fullmatch(name))]
    return _by_rank(folder, found) if found and not _is_split(folder, found) else []


def _shaped(stored: StoredArray, name: str, label: str, shape: tuple[int, ...] | None) -> TensorPieces:
    """Return a parameter, which the converter leaves flat if it comes of stage 3."""
    if shape is None or len(stored.shape) != 1 or math.prod(shape) != stored.num_elements:
        return whole(name, stored, label)
    piece = Piece(FlatRange(0, stored.num_elements), stored, label)
    return TensorPieces(name, shape, stored.dtype, (piece,))


def _untrained(folder: Path, models: list[dict[str, Any]], tensors: Mapping[str, TensorPieces]) -> dict[str, Any]:
    """Return what the model has beside trained parameters: frozen and tied ones, buffers."""
    if not models:
        return {}
    weights = _weights(ZeroParts(folder, models, []), 1 if len(models) == 1 else 3)
    found = {name: tensor for name, tensor in weights.items() if name not in tensors and tensor.num_elements}
    tied = _shared(models[0]).items()
    return {**found, **{name: replace(tensors[other], name=name) for name, other in tied if other in tensors}}
