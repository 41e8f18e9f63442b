"""safetensors, one file or several with an index; so are Hugging Face's folders, whose older ones have torch files.

Source: huggingface/safetensors, README (format); transformers, modeling_utils.py (index).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.regular_files import RegularFile, file_names, read_json
from trainermon.analysis.checkpoint.formats.state_dicts import SplitState
from trainermon.analysis.checkpoint.formats.torch_states import read_beside, read_state
from trainermon.analysis.checkpoint.pieces import Checkpoint, StoredArray, TensorPieces, whole
from trainermon.analysis.tensor.dtypes import DTYPES, storage_dtype
from trainermon.analysis.tensor.files import SAFETENSORS
from trainermon.core.errors import CheckpointError

INDEX_SUFFIX = ".index.json"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.(?P<suffix>\w+)")
"""The name of a file that has a part of a model."""
_MAX_HEADER = 100_000_000  # the limit of safetensors itself
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def open_safetensors(path: Path) -> Checkpoint:
    """Return what one file holds.

    Raises:
        CheckpointError: it is no such file, is cut off, its tensors overlap, or bytes of it belong to none of them.
    """
    tensors, unread, metadata = read_safetensors(path)
    return Checkpoint(path=path, format="safetensors", tensors=tensors, values=metadata, unread=unread)


def read_safetensors(path: Path) -> tuple[dict[str, TensorPieces], tuple[str, ...], dict[str, Any]]:
    """Return the tensors of a file by name, the names of those of a type that is not read, and its `__metadata__`.

    Raises:
        CheckpointError: as `open_safetensors`.
    """
    with RegularFile(path) as file:
        length = int.from_bytes(file.read(0, min(8, file.size)), "little")
        if not 2 <= length <= min(_MAX_HEADER, file.size - 8):
            raise CheckpointError(
                f"{path} is not a safetensors file, or is cut off: of its {file.size:,} bytes the header should take"
                f" {length:,}; copy it again"
            )
        raw, size = file.read(8, length), file.size
    try:
        header = json.loads(raw, object_pairs_hook=_without_repeats)
        metadata = header.pop("__metadata__", {})
        places = {name: _place(name, entry, 8 + length, size) for name, entry in header.items()}
        tensors = {
            name: whole(name, _stored(path, name, place), path.name)
            for name, place in places.items()
            if place.dtype in DTYPES
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged header ({str(error)[:120]}): copy it again") from error
    _refuse_gaps(path, places, 8 + length, size)
    unread = tuple(f"{name} ({place.dtype:.40})" for name, place in places.items() if name not in tensors)
    return tensors, unread, dict(metadata) if isinstance(metadata, dict) else {}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        repeated = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise ValueError(f"{repeated!r:.60} is there twice")
    return found


class _HeaderEntry(NamedTuple):
    """Where a tensor is in its file, in bytes from its beginning; `dtype` is torch's name, or the header's own."""

    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]


def _place(name: str, entry: dict[str, Any], start: int, file_size: int) -> _HeaderEntry:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    first, last = entry["data_offsets"]
    if not isinstance(dtype, str):
        raise TypeError(f"{name!r:.60} has the type {dtype!r:.60}")
    if not all(type(number) is int and number >= 0 for number in (first, last, *shape)) or last < first:
        raise ValueError(f"{name!r:.60} has the shape {shape!r:.60} and the place {first!r:.20} to {last!r:.20}")
    if start + last > file_size:
        raise ValueError(f"{name!r:.60} ends at byte {start + last:,} of {file_size:,}: the file is cut off")
    return _HeaderEntry(start + first, start + last, SAFETENSORS.get(dtype, dtype), shape)


def _stored(path: Path, name: str, place: _HeaderEntry) -> StoredArray:
    wanted, found = math.prod(place.shape) * storage_dtype(place.dtype).itemsize, place.end - place.start
    if found != wanted:
        raise ValueError(f"{name!r:.60} should take {wanted:,} bytes, the header gives it {found:,}")
    return StoredArray(path, place.start, place.dtype, place.shape, contiguous(place.shape))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor in C order.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _refuse_gaps(path: Path, places: dict[str, _HeaderEntry], begin: int, file_size: int) -> None:
    """Refuse what safetensors itself does: tensors lie end to end, from the header to the end of the file."""
    spans = sorted((place.start, place.end, name) for name, place in places.items() if place.end > place.start)
    for (_, end, before), (start, _, name) in pairwise([(begin, begin, ""), *spans, (file_size, file_size, "")]):
        if start < end:
            raise CheckpointError(f"{path}: {before!r:.60} and {name!r:.60} overlap: save it again")
        if start > end:
            raise CheckpointError(f"{path}: bytes {end:,} to {start:,} belong to no tensor: copy or save it again")


def weights_index(folder: Path) -> Path | None:
    """Return the index of a folder of Hugging Face, or its only file of weights; None: there is neither.

    Raises:
        CheckpointError: there are several indexes, or the folder cannot be listed.
    """
    names = file_names(folder)
    for suffix in (f".safetensors{INDEX_SUFFIX}", f".bin{INDEX_SUFFIX}"):
        found = [name for name in names if name.endswith(suffix)]
        if len(found) > 1:
            raise CheckpointError(f"{folder} has several indexes, {', '.join(found[:4])}: name the one that is meant")
        if found:
            return folder / found[0]
    return next((folder / name for name in _WEIGHTS if name in names), None)


def open_indexed(path: Path, damaged: list[str] | None = None) -> Checkpoint:
    """Return what the files of a folder of Hugging Face hold, given its index or its only file of weights.

    With `damaged`, what is wrong with single files behind an index is put there.

    Raises:
        CheckpointError: a file is missing or damaged, or has not the tensors that the index says.
    """
    config = read_json(path.parent / "config.json") if "config.json" in file_names(path.parent) else {}
    values: dict[str, Any] = {"config": config} if config else {}
    if not path.name.endswith(INDEX_SUFFIX):
        return _with_beside(path.parent, {path.name: read_weights(path)}, values)
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map from tensors to files: copy it again")
    tensors: dict[str, TensorPieces] = {}
    states: dict[str, SplitState] = {}
    missing = _shards_outside(path, set(weight_map.values()))
    copies: list[TensorPieces] = []
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{path} names {shard!r:.60}, outside its folder: do not trust this checkpoint")
        expected = {name for name, file in weight_map.items() if file == shard}
        read = partial(_read_shard, expected=expected, index=path.name)
        states[shard] = read_or_note(read, path.parent / shard, damaged)
        found = states[shard].tensors
        lost = sorted(set(found) - weight_map.keys())
        missing += [f"{shard} has {name}, which {path.name} does not name: save it again" for name in lost]
        tensors.update({name: tensor for name, tensor in found.items() if name in expected})
        copies += [tensor for name, tensor in found.items() if name in weight_map and name not in expected]
    missing += _with_copies(tensors, copies)
    whole_folder = _with_beside(path.parent, states, values)
    return replace(whole_folder, tensors=tensors, missing=(*missing, *whole_folder.missing))


def _with_beside(folder: Path, states: Mapping[str, SplitState], values: Mapping[str, Any]) -> Checkpoint:
    """Return what a folder holds: its weights, and all that its other files add to them."""
    outside = {name for name in file_names(folder) if name not in states and SHARD.fullmatch(name)}
    beside = read_beside(folder, states, {*states, *outside})
    of_files = [(f"{file}: " if len(states) > 1 else "", state) for file, state in states.items()]
    return Checkpoint(
        path=folder,
        format="hf",
        step=beside.step,
        tensors={name: tensor for state in states.values() for name, tensor in state.tensors.items()},
        optimizer=beside.optimizer,
        values={**values, **beside.values},
        unread=tuple(name for state in states.values() for name in state.unread),
        missing=beside.missing,
        notes=(*(f"{prefix}{note}" for prefix, state in of_files for note in state.notes), *beside.notes),
    )


def _shards_outside(index: Path, shards: Collection[str]) -> list[str]:
    """Return a sentence on each file that is called as those of an index are, and that it does not name."""
    stem, _, suffix = index.name.removesuffix(INDEX_SUFFIX).rpartition(".")
    others = [
        name
        for name in file_names(index.parent)
        if name not in shards
        and (found := SHARD.fullmatch(name))
        and (found["stem"], found["suffix"]) == (stem, suffix)
    ]
    return [f"{name} is there, and {index.name} does not name it: copy both again, or remove it" for name in others]


def _with_copies(tensors: dict[str, TensorPieces], copies: Collection[TensorPieces]) -> Iterator[str]:
    """Give tensors their copies in other shards, which should be equal; yield a sentence on each of another shape."""
    for copy in copies:
        known = tensors.get(copy.name)  # None: the shard that should have it is damaged
        if known is not None and (known.shape, known.dtype) == (copy.shape, copy.dtype):
            tensors[copy.name] = replace(known, pieces=(*known.pieces, *copy.pieces))
        elif known is not None:
            files = f"{known.pieces[0].label} and {copy.pieces[0].label}"
            yield f"{files} both have {copy.name}, of other shapes or types: copy both again"


def _read_shard(path: Path, *, expected: Collection[str], index: str) -> SplitState:
    """Return what `read_weights` does, of a file that has all tensors `expected` by the file `index`."""
    if not path.exists():
        raise CheckpointError(f"{path} is missing, {index} has {next(iter(expected))!r} there: copy it, too")
    found = read_weights(path)
    if lacking := sorted(set(expected) - set(found.tensors) - {name.rpartition(" (")[0] for name in found.unread}):
        raise CheckpointError(f"{path} lacks {lacking[0]!r:.80}, which {index} has there: copy both again")
    return found


def read_or_note(read: Callable[[Path], SplitState], path: Path, damaged: list[str] | None) -> SplitState:
    """Return what `read` does of a file; of a damaged one nothing, where `damaged` is there to be told why.

    Raises:
        CheckpointError: it is damaged, and `damaged` is None.
    """
    try:
        return read(path)
    except CheckpointError as error:
        if damaged is None:
            raise
        damaged.append(str(error))
        return SplitState({}, {}, {})


def read_weights(path: Path) -> SplitState:
    """Return what a file of safetensors or torch holds; of the former the tensors alone.

    Raises:
        CheckpointError: it is damaged.
    """
    if path.suffix == ".safetensors":
        tensors, unread, _ = read_safetensors(path)
        return SplitState(tensors, {}, {}, unread)
    return read_state(path)
