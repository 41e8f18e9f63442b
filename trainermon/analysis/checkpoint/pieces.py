"""What readers of checkpoints hand over: tensors as pieces in files, each with its place in the whole tensor.

A tensor is never put together here. Each piece says which part of the whole it is, and where its elements are; whoever
compares two checkpoints intersects the places, and maps what it looks at.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import numpy as np

from trainermon.analysis.tensor.dtypes import Raw, storage_dtype
from trainermon.core.errors import CheckpointError

MAIN = "main"
"""The kind of optimizer state that is the float32 copy of the weights; the others have torch's names: `exp_avg` …"""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Elements in a file, of whatever strides; nothing is read before `array` is called.

    Attributes:
        path: The file.
        offset: Its first element, in bytes from the beginning of the file.
        dtype: Torch's name without `torch.`, see `trainermon.analysis.tensor.dtypes`.
        shape: Sizes; () of a scalar.
        strides: Of each dimension, in elements.
    """

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The product of the sizes."""
        return math.prod(self.shape)

    def array(self) -> Raw:
        """Return the elements, mapped read-only: numpy's dtypes as they are, the bits of others as unsigned integers.

        Every call maps anew; the map ends with the array. If the file is cut while the array is looked at, the system
        ends the process, as with any map. `trainermon.analysis.tensor.dtypes.numbers` makes numbers.

        Raises:
            CheckpointError: the file is gone, is no regular file, or has become too short.
        """
        stored = storage_dtype(self.dtype)
        if not self.num_elements:  # nothing to map
            return np.zeros(self.shape, stored)
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        flat = mapped(self.path, self.offset, span * stored.itemsize).view(stored)
        strides = tuple(stride * stored.itemsize for stride in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=False)


def mapped(path: Path, offset: int, size_bytes: int) -> np.memmap[Any, np.dtype[np.uint8]]:
    """Return a part of a file as bytes, mapped read-only.

    Raises:
        CheckpointError: the file is not there, is no regular file, or is shorter.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file any more: open the checkpoint again")
        found = os.stat(path).st_size
        if offset < 0 or found < offset + size_bytes:
            raise CheckpointError(f"{path} has {found:,} bytes, {offset + size_bytes:,} are needed: copy it again")
        return np.memmap(path, np.uint8, "r", offset, (size_bytes,))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}): check its permissions") from error


@dataclass(frozen=True, slots=True)
class Box:
    """A block of the whole tensor: where it starts in each dimension, and its size there."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements `start` to `start + length` of the whole tensor flattened in C order, as ZeRO cuts it."""

    start: int
    length: int


class Piece(NamedTuple):
    """A part of a tensor, as one file has it.

    Attributes:
        region: Its place in the whole tensor.
        stored: Its elements: of a box in the shape of its sizes, of a flat range in one dimension.
        label: Who wrote it, for messages: `rank 3`, or the name of its file.
    """

    region: Box | FlatRange
    stored: StoredArray
    label: str


class Chunks(Sequence[Piece]):
    """Boxes of a tensor as its pieces, each made when it is asked for: kept, one takes 24 bytes and not 200."""

    __slots__ = ("_boxes", "_like", "_offsets")

    def __init__(self, boxes: Sequence[Box], like: Sequence[StoredArray], offsets: array[int]) -> None:
        """Keep them.

        Args:
            boxes: Their regions. Of chunks in one place, the same object.
            like: For each, an array that differs from its own in nothing but the offset, mostly the same object.
            offsets: Of each, in bytes from the beginning of its file.
        """
        self._boxes, self._like, self._offsets = tuple(boxes), tuple(like), offsets

    def __len__(self) -> int:
        return len(self._boxes)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Piece, ...]: ...
    def __getitem__(self, index: int | slice) -> Piece | tuple[Piece, ...]:
        """Return a piece, or several."""
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        like = self._like[index]
        return Piece(self._boxes[index], _moved(like, self._offsets[index]), like.path.name)

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces."""
        last, label = None, ""
        for box, like, offset in zip(self._boxes, self._like, self._offsets, strict=True):
            if like is not last:
                last, label = like, like.path.name
            yield Piece(box, _moved(like, offset), label)

    @property
    def files(self) -> set[Path]:
        """The files that they are in."""
        return {like.path for like in {id(like): like for like in self._like}.values()}


def _moved(like: StoredArray, offset: int) -> StoredArray:
    return StoredArray(like.path, offset, like.dtype, like.shape, like.strides)


@dataclass(frozen=True, slots=True)
class TensorPieces:
    """A tensor of a checkpoint.

    Attributes:
        name: Its name in the checkpoint, the number of its layer counted over all stages.
        shape: Of the whole tensor.
        dtype: As `StoredArray` has it; all pieces have the same.
        pieces: Its parts. Two with the same region are replicas, which should be equal. That all together cover the
            tensor is not promised: `trainermon checkpoint verify` checks it.
        notes: What a reader should know: `replicated over tp`, `padding not saved` …
        ranks: Of each piece the number of the tensor parallel rank that has it, if it is not known whether they are
            copies of one tensor, as `shape` and the regions say, or parts of a larger one; else empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: Sequence[Piece]
    notes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        """The product of the sizes."""
        return math.prod(self.shape)

    @property
    def files(self) -> set[Path]:
        """The files that it is in."""
        pieces = self.pieces
        return pieces.files if isinstance(pieces, Chunks) else {piece.stored.path for piece in pieces}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a folder or file of weights holds.

    Attributes:
        path: What was opened, and resolved: the folder of the step, if the run's was given.
        format: `torch`, `safetensors`, `hf`, `dcp`, `megatron_dist`, `megatron`, `deepspeed`, `universal`, `folder`,
            `mindspore`, `lora`.
        step: The step it was saved on; None: it does not say.
        layout: How it is split: `tp`, `pp`, `vpp`, `ep`, `dp`, `zero` …, as far as known.
        tensors: Parameters and buffers by name.
        optimizer: The state of the optimizer: of each kind (`MAIN`, `exp_avg`, `exp_avg_sq` …) by name of parameter.
        values: All else, as plain values and `InertObject`s: `args`, `rng`, `lr` …
        before: Of the tensors that an adapter was merged into here, what they were before.
        unread: The names of tensors that the files hold and that are not read, each with its kind in brackets.
        missing: Sentences on what the files say that they hold, or should, and none of them has.
        unsaid: What could be missing without a word of it in the files.
        notes: What a reader should know about the whole: parts that were passed over, and why.
    """

    path: Path
    format: str
    step: int | None = None
    layout: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    tensors: Mapping[str, TensorPieces]
    optimizer: Mapping[str, Mapping[str, TensorPieces]] = field(default_factory=lambda: MappingProxyType({}))
    values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    before: Mapping[str, TensorPieces] = field(default_factory=lambda: MappingProxyType({}))
    unread: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def all_notes(self) -> tuple[str, ...]:
        """Return the notes, with those on what is missing, what is not known and which tensors are not read."""
        odd = "being sparse, quantized, of an unknown type or the like"
        unread = f"{tensors_are(len(self.unread))} not read, {odd}: first {self.unread[0]}" if self.unread else ""
        unsaid = tuple(f"not looked at: {text}" for text in self.unsaid)
        return (*self.notes, *self.missing, *unsaid, *((unread,) if unread else ()))


def tensors_are(count: int) -> str:
    """Return `1 tensor is` or, say, `3 tensors are`."""
    return "1 tensor is" if count == 1 else f"{count:,} tensors are"


def whole(name: str, stored: StoredArray, label: str, notes: tuple[str, ...] = ()) -> TensorPieces:
    """Return a tensor that one file holds in one piece."""
    region = Box((0,) * len(stored.shape), stored.shape)
    return TensorPieces(name, stored.shape, stored.dtype, (Piece(region, stored, label),), notes)
