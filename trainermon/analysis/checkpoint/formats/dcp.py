"""Torch's distributed checkpoints: `.metadata`, and files that hold a small torch file for each chunk.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py, default_planner.py, 2.13. FSDP2 writes them, too.
"""

from __future__ import annotations

import math
import pickle
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.inert import (
    MAX_PICKLE_BYTES,
    Builder,
    InertObject,
    Record,
    attributes_in,
    brief,
    unpickle,
)
from trainermon.analysis.checkpoint.formats.regular_files import RegularFile, read_all
from trainermon.analysis.checkpoint.formats.state_dicts import MODEL_KEYS, unread_kind
from trainermon.analysis.checkpoint.formats.torch_file import BUILDERS, AlikeParts
from trainermon.analysis.checkpoint.pieces import Box, Checkpoint, Chunks, StoredArray, TensorPieces
from trainermon.core.errors import CheckpointError

METADATA = ".metadata"
_MAX_VALUE_BYTES = 1 << 24  # of a value that is no tensor; larger ones are only named
_MAX_DIMS = 64
_INT = {int}
_SKIPPED = ("_extra_state", "/shard_")  # what layers of Transformer Engine keep, a value for each layer

Shape = tuple[int, ...]


class _ChunkSizes(Record):
    """torch's ChunkStorageMetadata."""

    __slots__ = ("offsets", "sizes")

    def __setstate__(self, state: Any) -> None:
        get = attributes_in(state).get
        self.offsets, self.sizes = get("offsets"), get("sizes")


class _EntryIndex(Record):
    """torch's MetadataIndex."""

    __slots__ = ("fqn", "offset")

    def __setstate__(self, state: Any) -> None:
        get = attributes_in(state).get
        self.fqn, self.offset = get("fqn"), get("offset")


class _EntryPlace(Record):
    """torch's _StorageInfo."""

    __slots__ = ("length", "offset", "relative_path", "transforms")

    def __setstate__(self, state: Any) -> None:
        get = attributes_in(state).get
        self.relative_path, self.offset, self.length = get("relative_path"), get("offset"), get("length")
        self.transforms = get("transform_descriptors")


_RECORDS = {
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata": _ChunkSizes,
    "torch.distributed.checkpoint.metadata.MetadataIndex": _EntryIndex,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _EntryPlace,
}


class StoredItem(NamedTuple):
    """Where an entry of the checkpoint is: file, place, length; its name, offsets of its chunk (None: no tensor)."""

    file: str
    start: int
    length: int
    name: str
    offsets: Shape | None


class Found(NamedTuple):
    """The chunks of a tensor that have been found in files, as `Chunks` takes them."""

    boxes: list[Box]
    like: list[StoredArray]
    offsets: array[int]


class Described(NamedTuple):
    """What `.metadata` says of a tensor: its shape, dtype, its chunks by their offsets; and what was found of it."""

    shape: Shape
    dtype: str
    chunks: Mapping[Shape, Box]
    found: Found


class Contents(NamedTuple):
    """All of a distributed checkpoint: tensors and values by their full names, paths of names, notes.

    And the names of tensors that are not read, each with its kind.
    """

    tensors: dict[str, TensorPieces]
    values: dict[str, Any]
    paths: Mapping[str, tuple[Any, ...]]
    notes: tuple[str, ...]
    unread: tuple[str, ...] = ()


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
        unread=found.unread,
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

    Takes 10 µs a chunk.

    Raises:
        CheckpointError: as `open_dcp`.
    """
    path = folder / METADATA
    described, unread, items, paths = _metadata(path)
    values: dict[str, Any] = {}
    notes = []
    for item, value, start in _loaded(folder, [item for item in items if item.name not in unread]):
        if item.name in described and (kind := unread_kind(value)):
            unread[item.name] = kind
        elif item.offsets is not None or item.name in described:
            _add(item, value, start, described.get(item.name), folder)
        elif value is None:
            notes.append(item.name)
        else:
            values[item.name] = value
    tensors = {name: _whole(name, described.pop(name), folder) for name in list(described) if name not in unread}
    passed = (f"{len(notes):,} values were passed over, such as {notes[0]}",) if notes else ()
    return Contents(tensors, values, paths, passed, tuple(f"{name} ({kind})" for name, kind in unread.items()))


def _metadata(
    path: Path,
) -> tuple[dict[str, Described], dict[str, str], list[StoredItem], Mapping[str, tuple[Any, ...]]]:
    """Return what `.metadata` says: of tensors by name, of where all is stored in order, and of the paths of names.

    Of tensors that are not read the kind is second.
    """
    shapes = _Shapes(path)
    builders = {**BUILDERS, **_RECORDS, "torch.Size": Builder(shapes.made)}
    state = unpickle(read_all(path, MAX_PICKLE_BYTES), path, builders)
    if not isinstance(state, InertObject) or not state.attributes():
        raise CheckpointError(f"{path} holds a {type(state).__name__}, expected torch's Metadata: copy it again")
    parts = state.attributes()
    layouts = _Layouts(shapes, path)
    entries = _entries(parts, "state_dict_metadata", path)
    described: dict[str, Described] = {}
    unread: dict[str, str] = {}
    for name in list(entries):
        found = _tensor(entries.pop(name), layouts, path)
        if isinstance(found, str):
            unread[name] = found
        elif found is not None:
            described[name] = found
    places = _entries(parts, "storage_data", path)
    items = []
    while places:  # what was looked at goes away
        items.append(_item(*places.popitem(), shapes, path))
    items.sort(key=_PLACE)
    names = parts.get("planner_data")
    paths = {str(k): v for k, v in names.items() if isinstance(v, tuple)} if isinstance(names, dict) else {}
    return described, unread, items, paths


_PLACE = itemgetter(0, 1)  # file and start


def _entries(state: Mapping[str, Any], name: str, path: Path) -> dict[Any, Any]:
    value = state.get(name)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} has no {name}: expected what torch 2 or later writes")
    return value


class _Shapes:
    """Shapes and offsets out of a pickle, each looked into once, and kept once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[Shape, Shape] = {}
        self._places: set[int] = set()  # of those in memory: hashing takes longer, and more of the stack

    def made(self, sizes: Any = ()) -> Shape:
        """Return what torch.Size is here."""
        if type(sizes) is not tuple or len(sizes) > _MAX_DIMS or not _INT.issuperset(map(type, sizes)):
            raise pickle.UnpicklingError(f"a torch.Size of {brief(sizes)}")
        known = self._known.get(sizes)
        if known is None:
            known = self._known[sizes] = self.of(sizes)
            self._places.add(id(known))
        return known

    def of(self, value: Any) -> Shape:
        """Return a value that should be sizes or offsets.

        Raises:
            CheckpointError: it is something else.
        """
        if id(value) in self._places:
            shape: Shape = value
            return shape
        if not isinstance(value, tuple | list) or not all(type(size) is int and size >= 0 for size in value):
            raise CheckpointError(f"{self._path} has {brief(value)} for a shape: copy it again")
        return tuple(value)


class _Layouts:
    """How tensors are cut into chunks: many alike, so each way is checked once, and its boxes are kept once."""

    def __init__(self, shapes: _Shapes, path: Path) -> None:
        self.shapes, self._path = shapes, path
        self._known: dict[tuple[Shape, tuple[tuple[Shape, Shape], ...]], Mapping[Shape, Box]] = {}

    def of(self, shape: Shape, chunks: list[Any]) -> Mapping[Shape, Box]:
        """Return the boxes of chunks by where they start.

        Raises:
            CheckpointError: one lies outside the tensor, or two begin at one place.
        """
        boxes = tuple([(self.shapes.of(chunk.offsets), self.shapes.of(chunk.sizes)) for chunk in chunks])
        found = self._known.get((shape, boxes))
        if found is None:
            found = self._known[shape, boxes] = self._checked(shape, boxes)
        return found

    def _checked(self, shape: Shape, chunks: tuple[tuple[Shape, Shape], ...]) -> Mapping[Shape, Box]:
        found: dict[Shape, Box] = {}
        for offsets, sizes in chunks:
            if not len(offsets) == len(sizes) == len(shape) or any(
                start + size > end for start, size, end in zip(offsets, sizes, shape, strict=True)
            ):
                raise CheckpointError(
                    f"{self._path} has a chunk at {offsets} of {sizes} outside its tensor {shape}: copy it again"
                )
            if 0 in sizes and 0 not in shape:
                continue  # nothing of it, at a place that another chunk may begin at
            if offsets in found:
                raise CheckpointError(
                    f"{self._path} has two chunks at {offsets}, which overlap: save the checkpoint again"
                )
            found[offsets] = Box(offsets, sizes)
        return found


def _tensor(value: Any, layouts: _Layouts, path: Path) -> Described | str | None:
    """Return what is said of a tensor, its type where that is not read, None of a value that is no tensor."""
    state = value.attributes() if isinstance(value, InertObject) else {}
    if "chunks" not in state:
        return None
    properties, chunks = state.get("properties"), state["chunks"]
    kept = properties.state if isinstance(properties, InertObject) else None
    dtype = kept[0] if isinstance(kept, tuple) and kept else kept.get("dtype") if isinstance(kept, dict) else None
    if isinstance(dtype, type) and issubclass(dtype, InertObject):
        return dtype.name.removeprefix("torch.")
    if (
        not isinstance(dtype, str)
        or not isinstance(chunks, list)
        or not all(type(one) is _ChunkSizes for one in chunks)
    ):
        raise CheckpointError(f"{path} does not say the dtype or the chunks of a tensor: copy it again")
    shape = layouts.shapes.of(state.get("size"))
    return Described(shape, dtype.removeprefix("torch."), layouts.of(shape, chunks), Found([], [], array("q")))


def _item(index: Any, place: Any, shapes: _Shapes, path: Path) -> StoredItem:
    if type(index) is not _EntryIndex or type(place) is not _EntryPlace:
        raise CheckpointError(f"{path} does not say where {brief(index)} is stored: copy it again")
    name, offsets, file, start, length = index.fqn, index.offset, place.relative_path, place.offset, place.length
    if type(name) is not str or type(file) is not str or type(start) is not int or type(length) is not int:
        raise CheckpointError(f"{path} does not say where {brief(name)} is stored: copy it again")
    if place.transforms:
        raise CheckpointError(f"{path}: {brief(name)} is stored compressed: save it without transforms")
    if not _is_inside(file):
        raise CheckpointError(f"{path} names {file!r:.60}, outside its folder: do not trust this checkpoint")
    return StoredItem(file, start, length, name, None if offsets is None else shapes.of(offsets))


@lru_cache(maxsize=1024)
def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def _loaded(folder: Path, items: Iterable[StoredItem]) -> Iterator[tuple[StoredItem, Any, int]]:
    """Yield each item with what it holds, None of a value that is passed over; of a tensor, `AlikeParts.load`'s."""
    heads: dict[int, list[tuple[bytes, StoredArray]]] = {}
    for name, group in groupby(items, key=itemgetter(0)):
        with RegularFile(folder / name) as file:
            load = AlikeParts(file, heads).load
            for item in group:
                is_value = item.offsets is None
                if is_value and (item.length > _MAX_VALUE_BYTES or any(part in item.name for part in _SKIPPED)):
                    yield item, None, 0
                else:
                    yield item, *load(item.start, item.length)


def _add(item: StoredItem, value: Any, start: int, described: Described | None, folder: Path) -> None:
    """Add the chunk of a tensor to what was found of it, unless it has no element."""
    if described is None or not isinstance(value, StoredArray):
        raise CheckpointError(
            f"{folder / item.file}: {item.name!r} is no tensor of {METADATA}: copy the checkpoint again"
        )
    offsets = item.offsets if item.offsets is not None else (0,) * len(described.shape)
    box = described.chunks.get(offsets)
    if box is None or value.shape != box.sizes or value.dtype != described.dtype:
        if not value.num_elements and 0 not in described.shape:
            return
        has, expected = f"{value.dtype}{list(value.shape)}", f"{described.dtype}{list(box.sizes if box else ())}"
        raise CheckpointError(
            f"{folder / item.file}: {item.name!r} is {has} at {offsets}, {METADATA} says {expected}: copy both again"
        )
    described.found.boxes.append(box)
    described.found.like.append(value)
    described.found.offsets.append(start)


def _whole(name: str, described: Described, folder: Path) -> TensorPieces:
    starts = {box.starts for box in described.found.boxes}
    missing = [offsets for offsets in described.chunks if offsets not in starts]
    if missing:
        raise CheckpointError(f"{folder / METADATA} says nowhere where {name!r} at {missing[0]} is: copy it again")
    covered = sum(math.prod(box.sizes) for box in described.chunks.values())
    if covered != math.prod(described.shape):
        fault = "overlap" if covered > math.prod(described.shape) else "leave a gap"
        raise CheckpointError(f"{folder / METADATA}: the chunks of {name!r} {fault}: save the checkpoint again")
    return TensorPieces(name, described.shape, described.dtype, Chunks(*described.found))
