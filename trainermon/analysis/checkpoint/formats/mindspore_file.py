"""MindSpore's `.ckpt`: a protocol buffer of names, dtypes, shapes and bytes.

Source: mindspore/ccsrc/utils/checkpoint.proto, mindspore/train/serialization.py, 2.10: `Checkpoint.value` (1) holds
`tag` (1) and `tensor` (2), a `TensorProto` of `dims` (1), `tensor_type` (2) and `tensor_content` (3). A large tensor is
written as several of the same tag.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.regular_files import RegularFile
from trainermon.analysis.checkpoint.pieces import Checkpoint, FlatRange, Piece, StoredArray, TensorPieces
from trainermon.analysis.tensor.dtypes import DTYPES, storage_dtype
from trainermon.core.errors import CheckpointError

_STEPS = ("step_num", "global_step")
_VALUES = (*_STEPS, "epoch_num", "learning_rate", "beta1_power", "beta2_power", "scale_sense", "loss_scale")
# What optimizers of mindspore.nn and mindspore.mint put before the name of a parameter, by PyTorch's kinds of state.
_STATES = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "adam_m": "exp_avg", "adam_v": "exp_avg_sq",
           "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "moments": "momentum_buffer", "accum": "momentum_buffer",
           "stat": "momentum_started"}  # fmt: skip
_MAX_HEADER = 1 << 16  # of an entry: all but the elements
_BYTES = 2  # the wire type of texts, bytes and messages
_NAMES = {f"{name[0].upper()}{name[1:]}": name for name in DTYPES} | {"BFloat16": "bfloat16", "UInt8": "uint8"}
_NAMES |= {f"UInt{size}": f"uint{size}" for size in (16, 32, 64)} | {"Int4": "int8"}


class _Part(NamedTuple):
    """An entry: name, dtype, shape, and where its elements are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def is_mindspore(start: bytes) -> bool:
    """Return whether a file may be one: an entry that begins with its tag."""
    value, place = _number(start, 1) if start[:1] == b"\n" else (None, 0)
    return value is not None and start[place : place + 1] == b"\n"


def open_mindspore(path: Path) -> Checkpoint:
    """Return what a file holds.

    Raises:
        CheckpointError: it is damaged, cut off or encrypted, or has elements of a type that is not read.
    """
    parts: dict[str, list[_Part]] = {}
    with RegularFile(path) as file:
        for part in _parts(file):
            parts.setdefault(part.name, []).append(part)
    tensors = {name: _tensor(path, found) for name, found in parts.items()}
    values = {name: _scalar(tensors.pop(name)) for name in _VALUES if name in tensors and _is_scalar(tensors[name])}
    optimizer: dict[str, dict[str, TensorPieces]] = {}
    for name in list(tensors):
        prefix, _, parameter = name.partition(".")
        if prefix in _STATES and parameter in tensors:
            optimizer.setdefault(_STATES[prefix], {})[parameter] = replace(tensors.pop(name), name=parameter)
    step = next((values[name] for name in _STEPS if isinstance(values.get(name), int)), None)
    return Checkpoint(path=path, format="mindspore", step=step, tensors=tensors, optimizer=optimizer, values=values)


def _parts(file: RegularFile) -> Iterator[_Part]:
    place = 0
    while place < file.size:
        head = file.read(place, min(_MAX_HEADER, file.size - place))
        size, begin = _length(file, head, 0, 1)
        end = place + begin + size
        if end > file.size:
            raise CheckpointError(f"{file.path} is cut off: its entry at byte {place:,} ends at {end:,}; copy it again")
        yield _entry(file, head, place, begin)
        place = end


def _entry(file: RegularFile, head: bytes, place: int, begin: int) -> _Part:
    size, at = _length(file, head, begin, 1)
    name = head[at : at + size].decode("utf-8", "replace")
    _, at = _length(file, head, at + size, 2)
    dims: list[int] = []
    dtype = ""
    while at < len(head):
        key, after = _number(head, at)
        value, at = _number(head, after)
        if value is None:
            break
        if key == 1 << 3:
            dims.append(value)
        elif key == 1 << 3 | _BYTES:  # packed
            end = at + value
            while at < min(end, len(head)):
                dim, at = _number(head, at)
                dims.append(dim or 0)
        elif key == 2 << 3 | _BYTES:
            dtype = head[at : at + value].decode("latin1")
            at += value
        elif key == 3 << 3 | _BYTES:
            return _Part(name, _NAMES.get(dtype, dtype), tuple(dims), place + at, value)
        else:
            break
    raise _damaged(file, place)


def _length(file: RegularFile, head: bytes, place: int, field: int) -> tuple[int, int]:
    """Return the length of a field of bytes, and where it begins."""
    key, after = _number(head, place)
    value, begin = _number(head, after)
    if key != field << 3 | _BYTES or value is None:
        raise _damaged(file, place)
    return value, begin


def _number(data: bytes, place: int) -> tuple[int | None, int]:
    """Return a varint and the place after it; None if it does not end. Source: protobuf.dev, Encoding."""
    value = 0
    for index, byte in enumerate(data[place : place + 10]):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, place + index + 1
    return None, len(data)


def _damaged(file: RegularFile, place: int) -> CheckpointError:
    return CheckpointError(
        f"{file.path} has no MindSpore tensor at byte {place:,}: it is damaged, or encrypted; save it without enc_key"
    )


def _tensor(path: Path, parts: list[_Part]) -> TensorPieces:
    name, dtype, shape = parts[0].name, parts[0].dtype, parts[0].shape
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name!r:.80} has elements of type {dtype!r:.30}, which are not read")
    itemsize = storage_dtype(dtype).itemsize
    shape = () if shape == (0,) and parts[0].size == itemsize else shape  # how a scalar is written
    found = sum(part.size for part in parts)
    if found != math.prod(shape) * itemsize or any(part.size % itemsize for part in parts):
        raise CheckpointError(
            f"{path}: {name!r:.80} has {found:,} bytes, its shape {shape} needs another number: copy it"
        )
    pieces, start = [], 0
    for part in parts:
        length = part.size // itemsize
        stored = StoredArray(path, part.start, dtype, (length,), (1,))
        pieces.append(Piece(FlatRange(start, length), stored, path.name))
        start += length
    return TensorPieces(name, shape, dtype, tuple(pieces))


def _is_scalar(tensor: TensorPieces) -> bool:
    return tensor.num_elements == 1 and tensor.dtype in ("float32", "float64", "int32", "int64")


def _scalar(tensor: TensorPieces) -> Any:
    return tensor.pieces[0].stored.array()[0].item()
