"""Reads what torch.save wrote, without torch: values, and tensors as places in the file.

Source: torch/serialization.py (`_save`, `_legacy_load`), torch/_utils.py (`_rebuild_tensor_v2` and its kin), 2.13.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.analysis.checkpoint.formats.inert import (
    MAX_PICKLE_BYTES,
    Builder,
    InertObject,
    brief,
    inert_class,
    plain,
    unpickle,
)
from trainermon.analysis.checkpoint.formats.regular_files import RegularFile
from trainermon.analysis.checkpoint.formats.zip_records import ZipRecord, content_start, zip_records
from trainermon.analysis.checkpoint.pieces import StoredArray
from trainermon.analysis.tensor.dtypes import DTYPES, storage_dtype
from trainermon.core.errors import CheckpointError

_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "QInt8": "int8",
    "QUInt8": "uint8",
    "QInt32": "int32",  # of quantized tensors, which are left out
}
_MAX_DIMS = 64
_MAX_HEAD, _MAX_ALIKE = 4096, 8
# A view may have far more elements than its file: beyond this many of them nobody looks at all of it.
_MAX_EXPANDED = 1 << 28


class Storage(NamedTuple):
    """A block of elements that tensors are views of: its record in the archive, dtype and number of elements."""

    key: str
    dtype: str
    num_elements: int


class View(NamedTuple):
    """A tensor as the pickle describes it, strides and offset in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _typed(name: str) -> Mapping[str, str]:
    return {"storage type": name}


def _view(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> View | InertObject:
    if isinstance(storage, InertObject):
        return storage
    return _checked(View(storage, storage.dtype, offset, tuple(shape), tuple(strides)), rest[2:])


def _unread(name: str) -> InertObject:
    unread: InertObject = inert_class(f"torch._rebuild_{name.rpartition('.')[2]}")()
    return unread


def _typed_view(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> View | InertObject:
    """Return a view whose storage is bytes: dtypes that have no storage of their own.

    Of a dtype that is not known here, what stands for a tensor that is not read.
    """
    if not isinstance(rest[2], str):
        return _unread(rest[2].name)
    dtype = str(rest[2]).removeprefix("torch.")
    size = storage_dtype(dtype).itemsize
    retyped = Storage(storage.key, dtype, storage.num_elements // size)
    return _checked(View(retyped, dtype, offset, tuple(shape), tuple(strides)), rest[3:])


def _checked(view: View, metadata: tuple[Any, ...]) -> View | InertObject:
    """Return a view; of one that no place in a file describes, what stands for a tensor that is not read."""
    shape, strides, available = view.shape, view.strides, view.storage.num_elements
    numbers = (view.offset, *shape, *strides)
    if not all(type(number) is int and number >= 0 for number in numbers) or len(shape) != len(strides):
        raise pickle.UnpicklingError(f"a tensor of shape {brief(shape)}, strides {brief(strides)}")
    num_elements = math.prod(shape)
    last = view.offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if num_elements and last >= available:
        raise pickle.UnpicklingError(f"a tensor of shape {brief(shape)} on {available:,} elements")
    flags = metadata[0] if metadata and isinstance(metadata[0], dict) else {}
    odd = {
        "conjugate_view": flags.get("conj"),
        "negative_view": flags.get("neg"),
        "view_of_many_dimensions": len(shape) > _MAX_DIMS,
        "expanded_view": num_elements > max(_MAX_EXPANDED, available),
    }
    return next((_unread(name) for name, is_so in odd.items() if is_so), view)


def _first(value: Any, *_: Any) -> Any:
    return value


def _from_type(function: Any, _: Any, arguments: Any, *__: Any) -> Any:
    return function(*arguments)


def _storage(kind: str, storage_type: Any, key: Any, _: Any, num_elements: Any, *__: Any) -> Storage | InertObject:
    """Return a block of elements; of a dtype that is not known here, what stands for a tensor that is not read."""
    if kind == "storage" and isinstance(storage_type, type) and issubclass(storage_type, InertObject):
        return _unread(storage_type.name)
    if kind != "storage" or not isinstance(storage_type, Mapping) or type(num_elements) is not int:
        raise pickle.UnpicklingError("a reference to something that is no storage")
    return Storage(str(key), storage_type["storage type"], num_elements)


BUILDERS: Mapping[str, Any] = {
    **{f"torch.{name}Storage": _typed(dtype) for name, dtype in _STORAGES.items()},
    **dict.fromkeys(("torch.storage.UntypedStorage", "torch.UntypedStorage"), _typed("uint8")),
    **{f"torch.{dtype}": f"torch.{dtype}" for dtype in DTYPES},
    "torch._utils._rebuild_tensor": Builder(_view),
    "torch._utils._rebuild_tensor_v2": Builder(_view),
    "torch._utils._rebuild_tensor_v3": Builder(_typed_view),
    "torch._utils._rebuild_parameter": Builder(_first),
    "torch._utils._rebuild_parameter_with_state": Builder(_first),
    "torch._tensor._rebuild_from_type_v2": Builder(_from_type),
    "torch.Size": plain(tuple),
}
"""What the names in torch's files mean here; all others become inert."""


def is_torch_file(start: bytes) -> bool:
    """Return whether a file that begins so may be one of torch: a zip archive, or a pickle of before torch 1.6."""
    return start.startswith((b"PK\3\4", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"))


def load_torch_file(path: Path) -> Any:
    """Return what torch.save wrote: plain values, `InertObject`s, and a `StoredArray` for each tensor.

    Takes 30 µs a tensor; imports no torch, maps nothing, runs nothing.

    Raises:
        CheckpointError: it is no such file, is damaged or compressed, or was written by torch before 1.6.
    """
    with RegularFile(path) as file:
        return load_torch_part(file, 0, file.size)


def load_torch_part(file: RegularFile, start: int, length: int) -> Any:
    """Return what torch.save wrote into a part of a file, as `load_torch_file` does.

    Raises:
        CheckpointError: there is nothing of that kind, or it is damaged.
    """
    head = file.read(start, min(length, 16))
    if not head.startswith(b"PK"):
        raise CheckpointError(f"{file.path} {_what_else(head)}")
    records = zip_records(file, start, length)
    prefix = next((name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl")), None)
    if prefix is None:
        raise CheckpointError(f"{file.path} is an archive without data.pkl: expected a file that torch.save wrote")
    data = _content(file, records[f"{prefix}data.pkl"], MAX_PICKLE_BYTES)
    order = records.get(f"{prefix}byteorder")
    if order is not None and _content(file, order, 16) != b"little":
        raise CheckpointError(f"{file.path} has the byte order of another machine: save it on one with little endian")
    return _unpickled(data, file.path, _Places(file, records, prefix))


def _what_else(head: bytes) -> str:
    if not head.strip(b"\0"):
        return "begins with zeros, or is empty: it was not written to the end; copy or save it again"
    if head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return (
            "is a pickle, or was written by torch before 1.6: load it with torch.load(weights_only=True), and save it"
            " again with torch.save"
        )
    return f"begins with {head[:8]!r}, expected a zip archive that torch.save wrote"


def _content(file: RegularFile, record: ZipRecord, most: int) -> bytes:
    if record.size > most:
        raise CheckpointError(f"{file.path} has a record of {record.size:,} bytes, expected at most {most:,}")
    return file.read(content_start(file, record), record.size)


class _Places:
    """Where the storages of an archive are in its file, looked up once each."""

    def __init__(self, file: RegularFile, records: Mapping[str, ZipRecord], prefix: str) -> None:
        self._file, self._records, self._prefix = file, records, prefix
        self._starts: dict[str, int] = {}

    def stored(self, view: View) -> StoredArray:
        """Return a tensor with its place in the file."""
        key = view.storage.key
        start = self._starts.get(key)
        if start is None:
            start = self._starts[key] = self._start(view.storage)
        itemsize = storage_dtype(view.dtype).itemsize
        return StoredArray(self._file.path, start + view.offset * itemsize, view.dtype, view.shape, view.strides)

    def _start(self, storage: Storage) -> int:
        record = self._records.get(f"{self._prefix}data/{storage.key}")
        needed = storage.num_elements * storage_dtype(storage.dtype).itemsize
        if record is None or record.size < needed:
            found = "missing" if record is None else f"{record.size:,} bytes"
            raise CheckpointError(
                f"{self._file.path}: its record data/{storage.key[:40]} is {found}, expected {needed:,} bytes;"
                " copy it again"
            )
        return content_start(self._file, record)


class AlikeParts:
    """Loads parts of files that are mostly alike: the chunks of tensors, each a small archive.

    Two archives of one length that are equal up to their elements hold tensors of one shape at one place. So of all
    but the first of them, only what stands before the elements is read, and not looked into.
    """

    def __init__(self, file: RegularFile, heads: dict[int, list[tuple[bytes, StoredArray]]]) -> None:
        """Take the file, and what is known of the heads of parts by their length; more is added to that."""
        self._file, self._heads = file, heads
        self._here: dict[bytes, StoredArray] = {}

    def load(self, start: int, length: int) -> tuple[Any, int]:
        """Return what `load_torch_part` does, ten times as fast for a tensor like one before.

        Of a tensor, that is an array like it, of the same file, and the offset of its own elements.

        Raises:
            CheckpointError: as `load_torch_part`.
        """
        file = self._file
        file.require(start, length)
        known = self._heads.setdefault(length, [])
        for head, alike in known:
            if file.read(start, len(head)) == head:
                here = self._here.get(head)
                if here is None:
                    here = self._here[head] = replace(alike, path=file.path)
                return here, start + len(head)
        found = load_torch_part(file, start, length)
        if not isinstance(found, StoredArray):
            return found, start
        if found.offset - start <= _MAX_HEAD and len(known) < _MAX_ALIKE:
            known.append((file.read(start, found.offset - start), found))
        return found, found.offset


def _unpickled(data: bytes, path: Path, places: _Places) -> Any:
    def at_place(build: Callable[..., View | InertObject]) -> Builder:
        def placed(*arguments: Any) -> StoredArray | InertObject:
            view = build(*arguments)
            return places.stored(view) if isinstance(view, View) else view

        return Builder(placed)

    views = {
        "torch._utils._rebuild_tensor": at_place(_view),
        "torch._utils._rebuild_tensor_v2": at_place(_view),
        "torch._utils._rebuild_tensor_v3": at_place(_typed_view),
    }
    return unpickle(data, path, {**BUILDERS, **views}, lambda pid: _storage(*pid))
