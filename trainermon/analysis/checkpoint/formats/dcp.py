"""Torch's distributed checkpoints: `.metadata`, and files that hold a small torch file for each chunk.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py, default_planner.py, 2.13. FSDP2 writes them, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.inert import MAX_PICKLE_BYTES, InertObject, unpickle
from trainermon.analysis.checkpoint.formats.regular_files import RegularFile, read_all
from trainermon.analysis.checkpoint.formats.state_dicts import MODEL_KEYS
from trainermon.analysis.checkpoint.formats.torch_file import BUILDERS, AlikeParts
from trainermon.analysis.checkpoint.pieces import Box, Checkpoint, Piece, StoredArray, TensorPieces
from trainermon.core.errors import CheckpointError

METADATA = ".metadata"
_MAX_VALUE_BYTES = 1 << 24  # of a value that is no tensor; larger ones are only named
_SKIPPED = ("_extra_state", "/shard_")  # what layers of Transformer Engine keep, a value for each layer

Shape = tuple[int, ...]


class StoredItem(NamedTuple):
    """Where an entry of the checkpoint is: name, offsets of its chunk (None: no tensor), file, place, length."""

    name: str
    offsets: Shape | None
    file: str
    start: int
    length: int


class Described(NamedTuple):
    """What `.metadata` says of a tensor: its shape, dtype, and the sizes of its chunks by their offsets."""

    shape: Shape
    dtype: str
    chunks: Mapping[Shape, Shape]


class Contents(NamedTuple):
    """All of a distributed checkpoint: tensors and values by their full names, paths of names, notes."""

    tensors: dict[str, TensorPieces]
    values: dict[str, Any]
    paths: Mapping[str, tuple[Any, ...]]
    notes: tuple[str, ...]


def open_dcp(folder: Path) -> Checkpoint:
    """Return what a folder with `.metadata` holds.

    Raises:
        CheckpointError: a file is missing or damaged, or the chunks of a tensor do not cover it once.
    """
    found = read_contents(folder)
    tensors: dict[str, TensorPieces] = {}
    optimizer: dict[str, dict[str, TensorPieces]] = {}
    for full, tensor in found.tensors.items():
        kind, name = _role(found.paths.get(full, (full,)))
        target = tensors if kind is None else optimizer.setdefault(kind, {})
        if name in target:
            raise CheckpointError(f"{folder / METADATA} has {name!r} twice: open the part that is meant on its own")
        target[name] = TensorPieces(name, tensor.shape, tensor.dtype, tensor.pieces, tensor.notes)
    step = found.values.get("step")
    return Checkpoint(
        path=folder,
        format="dcp",
        step=step if type(step) is int else None,
        tensors=tensors,
        optimizer=optimizer,
        values=found.values,
        notes=found.notes,
    )


def _role(path: tuple[Any, ...]) -> tuple[str | None, str]:
    """Return the kind of optimizer state, None of a weight, and the parameter's name."""
    while len(path) > 1 and path[0] in MODEL_KEYS:
        path = path[1:]
    if len(path) > 3 and path[1] == "state" and path[0] in ("optim", "optimizer"):
        return str(path[-1]), ".".join(map(str, path[2:-1]))
    return None, ".".join(map(str, path))


def read_contents(folder: Path) -> Contents:
    """Return all tensors, as pieces, and all values of a distributed checkpoint.

    Takes 40 µs a chunk.

    Raises:
        CheckpointError: as `open_dcp`.
    """
    path = folder / METADATA
    state = _attributes(unpickle(read_all(path, MAX_PICKLE_BYTES), path, BUILDERS), path)
    described = {
        name: found for name, value in _entries(state, "state_dict_metadata", path) if (found := _tensor(value, path))
    }
    items = [_item(index, place, path) for index, place in _entries(state, "storage_data", path)]
    pieces: dict[str, list[Piece]] = {name: [] for name in described}
    values: dict[str, Any] = {}
    notes = []
    for item, value in _loaded(folder, items):
        if item.offsets is not None or item.name in described:
            piece = _piece(item, value, described.get(item.name), folder)
            if piece is not None:
                pieces[item.name].append(piece)
        elif value is None:
            notes.append(item.name)
        else:
            values[item.name] = value
    tensors = {name: _whole(name, found, pieces[name], folder) for name, found in described.items()}
    passed = (f"{len(notes):,} values were passed over, such as {notes[0]}",) if notes else ()
    names = state.get("planner_data")
    paths = {str(k): v for k, v in names.items() if isinstance(v, tuple)} if isinstance(names, dict) else {}
    return Contents(tensors, values, paths, passed)


def _attributes(value: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, InertObject) or not value.attributes():
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected torch's Metadata: copy it again")
    return value.attributes()


def _entries(state: Mapping[str, Any], name: str, path: Path) -> Iterable[tuple[Any, Any]]:
    value = state.get(name)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} has no {name}: expected what torch 2 or later writes")
    return value.items()


def _tensor(value: Any, path: Path) -> Described | None:
    """Return what is said of a tensor, None of a value that is no tensor."""
    state = value.attributes() if isinstance(value, InertObject) else {}
    if "chunks" not in state:
        return None
    properties = state.get("properties")
    kept = properties.state if isinstance(properties, InertObject) else None
    dtype = kept[0] if isinstance(kept, tuple) and kept else kept.get("dtype") if isinstance(kept, dict) else None
    if not isinstance(dtype, str) or not isinstance(state["chunks"], list):
        raise CheckpointError(f"{path} does not say the dtype or the chunks of a tensor: copy it again")
    shape = _sizes(state.get("size"), path)
    chunks: dict[Shape, Shape] = {}
    for chunk in state["chunks"]:
        part = chunk.attributes() if isinstance(chunk, InertObject) else {}
        offsets, sizes = _sizes(part.get("offsets"), path), _sizes(part.get("sizes"), path)
        if not len(offsets) == len(sizes) == len(shape) or any(
            start + size > end for start, size, end in zip(offsets, sizes, shape, strict=True)
        ):
            raise CheckpointError(
                f"{path} has a chunk at {offsets} of {sizes} outside its tensor {shape}: copy it again"
            )
        if 0 in sizes and 0 not in shape:
            continue  # nothing of it, at a place that another chunk may begin at
        if offsets in chunks:
            raise CheckpointError(f"{path} has two chunks at {offsets}, which overlap: save the checkpoint again")
        chunks[offsets] = sizes
    return Described(shape, dtype.removeprefix("torch."), chunks)


def _sizes(value: Any, path: Path) -> Shape:
    if not isinstance(value, tuple | list) or not all(type(size) is int and size >= 0 for size in value):
        raise CheckpointError(f"{path} has {value!r:.60} for a shape: copy it again")
    return tuple(value)


def _item(index: Any, place: Any, path: Path) -> StoredItem:
    which = index.attributes() if isinstance(index, InertObject) else {}
    where = place.attributes() if isinstance(place, InertObject) else {}
    name, offsets = which.get("fqn"), which.get("offset")
    file, start, length = (where.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or not isinstance(file, str) or type(start) is not int or type(length) is not int:
        raise CheckpointError(f"{path} does not say where {name!r:.60} is stored: copy it again")
    if where.get("transform_descriptors"):
        raise CheckpointError(f"{path}: {name!r:.60} is stored compressed: save it without transforms")
    if not _is_inside(file):
        raise CheckpointError(f"{path} names {file!r:.60}, outside its folder: do not trust this checkpoint")
    return StoredItem(name, None if offsets is None else _sizes(offsets, path), file, start, length)


@lru_cache(maxsize=1024)
def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def _loaded(folder: Path, items: Iterable[StoredItem]) -> Iterator[tuple[StoredItem, Any]]:
    """Yield each item with what it holds, None of a value that is passed over; a file is opened once."""
    parts = AlikeParts()
    ordered = sorted(items, key=lambda item: (item.file, item.start))
    for name, group in groupby(ordered, key=lambda item: item.file):
        with RegularFile(folder / name) as file:
            for item in group:
                is_value = item.offsets is None
                if is_value and (item.length > _MAX_VALUE_BYTES or any(part in item.name for part in _SKIPPED)):
                    yield item, None
                else:
                    yield item, parts.load(file, item.start, item.length)


def _piece(item: StoredItem, value: Any, described: Described | None, folder: Path) -> Piece | None:
    """Return the chunk of a tensor as a piece; None: it has no element."""
    if described is None or not isinstance(value, StoredArray):
        raise CheckpointError(
            f"{folder / item.file}: {item.name!r} is no tensor of {METADATA}: copy the checkpoint again"
        )
    offsets = item.offsets if item.offsets is not None else (0,) * len(described.shape)
    if not value.num_elements and 0 not in described.shape:
        return None
    sizes = described.chunks.get(offsets)
    if sizes is None or value.shape != sizes or value.dtype != described.dtype:
        found, expected = f"{value.dtype}{list(value.shape)}", f"{described.dtype}{list(sizes or ())}"
        raise CheckpointError(
            f"{folder / item.file}: {item.name!r} is {found} at {offsets}, {METADATA} says {expected}: copy both again"
        )
    return Piece(Box(offsets, sizes), value, item.file)


def _whole(name: str, described: Described, pieces: list[Piece], folder: Path) -> TensorPieces:
    starts = {piece.region.starts for piece in pieces if isinstance(piece.region, Box)}
    missing = [offsets for offsets in described.chunks if offsets not in starts]
    if missing:
        raise CheckpointError(f"{folder / METADATA} says nowhere where {name!r} at {missing[0]} is: copy it again")
    covered = sum(math.prod(sizes) for sizes in described.chunks.values())
    if covered != math.prod(described.shape):
        fault = "overlap" if covered > math.prod(described.shape) else "leave a gap"
        raise CheckpointError(f"{folder / METADATA}: the chunks of {name!r} {fault}: save the checkpoint again")
    return TensorPieces(name, described.shape, described.dtype, tuple(pieces))
