"""Opens the tensors of .pt, .npy, .safetensors and .bin files, mapped into memory, and nothing but tensors.

Files of torch are read with `weights_only`, those of numpy without pickles, safetensors by its own small header; a .bin
holds bare elements and is described by a .bin.json beside it. Only .pt needs torch.

Tensors of torch that numpy has no array for are read as the numbers that they mean; one that cannot be read is named,
and the others of its file are read all the same.
"""

from __future__ import annotations

import json
import math
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainermon.analysis.tensor.dtypes import BITS, DTYPES, Raw, numbers, storage_dtype
from trainermon.core.errors import DumpError

SUFFIXES = (".pt", ".npy", ".safetensors", ".bin")
CHUNK = 1 << 18
"""Elements that are looked at together: 2 MiB in float64, which a cache holds."""

SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "BOOL": "bool",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
}
"""Dtypes of safetensors, by their names there. Source: huggingface/safetensors, safetensors/src/tensor.rs."""

_MAX_HEADER = 100_000_000  # the limit of safetensors itself
_MAX_NESTING = 8
# A view may have far more elements than its file: beyond this many of them nobody looks at all of it.
_MAX_EXPANDED = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, whose elements are read when they are needed.

    Attributes:
        path: The file.
        name: Its name in there; "" if the file holds nothing else.
        dtype: Torch's name without `torch.`.
        raw: The elements as stored, of whatever strides.
        meant_by: The dtype in the file, where `raw` has the numbers that its elements mean (`quint8`); else "".
    """

    path: Path
    name: str
    dtype: str
    raw: Raw
    meant_by: str = ""

    @property
    def label(self) -> str:
        """What the tensor is called in output: the file's name, and the tensor's own if the file holds several."""
        return label_of(self.path, self.name)

    @property
    def kind(self) -> str:
        """The dtype that the tensor has in its file."""
        return self.meant_by or self.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; () of a scalar."""
        return self.raw.shape

    def chunks(self) -> Iterator[npt.NDArray[Any]]:
        """Yield all elements as numbers, in order, at most `CHUNK` at a time; each is valid until the next."""
        flags = ("external_loop", "buffered", "zerosize_ok")
        for raw in np.nditer(self.raw, flags=flags, order="C", buffersize=CHUNK):  # type: ignore[call-overload]
            yield numbers(raw, self.dtype)

    def part(self, index: tuple[int | slice, ...]) -> StoredTensor:
        """Return the part that `index` selects, without reading it."""
        return replace(self, raw=np.asarray(self.raw[index]))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadTensor:
    """A tensor, or a file of them, that is not read.

    Attributes:
        path: The file.
        name: Its name in there; "" if the file holds nothing else.
        reason: Why, for a message that already says which tensor.
    """

    path: Path
    name: str
    reason: str

    @property
    def label(self) -> str:
        """What the tensor is called in output, as `StoredTensor` has it."""
        return label_of(self.path, self.name)


def label_of(path: Path, name: str) -> str:
    """Return what a tensor is called in output: the file's name, and its own if the file holds several."""
    return f"{path.name}::{name}" if name else path.name


def open_tensors(path: Path) -> list[StoredTensor | UnreadTensor]:
    """Return every tensor in a file, in the file's order; elements are read when they are asked for.

    Of a nested tensor these are two: its elements, one component after the other (`NAME.values`), and the sizes or
    offsets of the components (`NAME.sizes`).

    Raises:
        DumpError: it is no file of tensors, it is damaged, it holds something else than tensors, none of its tensors
            can be read, or torch is missing.
    """
    path = Path(path)
    opener = _OPENERS.get(path.suffix)
    if opener is None:
        raise DumpError(f"{path} is not a tensor file by its name: expected one that ends in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise DumpError(f"{path} is not a file: expected a tensor in {path.suffix[1:]} format")
    try:
        found = opener(path)
    except _FAULTS as error:
        raise DumpError(f"{path} is not a tensor file, or damaged ({_cause(error)}): copy or dump it again") from error
    unread = [tensor for tensor in found if isinstance(tensor, UnreadTensor)]
    if unread and len(unread) == len(found):
        raise DumpError(f"{path}{f': {unread[0].name!r}' if unread[0].name else ''} is not read: {unread[0].reason}")
    return found


def _cause(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


_FAULTS = (
    OSError,
    ValueError,
    RuntimeError,
    AttributeError,
    TypeError,
    LookupError,
    EOFError,
    MemoryError,
    OverflowError,
)


def _open_numpy(path: Path) -> list[StoredTensor | UnreadTensor]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:
        array = np.load(path, allow_pickle=False)  # without elements there is nothing to map
    if not isinstance(array, np.ndarray):
        raise DumpError(f"{path} is an archive of numpy: unpack it with unzip, and look at the .npy files in it")
    name = array.dtype.newbyteorder("=").name
    storage_dtype(name)
    return [StoredTensor(path=path, name="", dtype=name, raw=array)]


def _open_binary(path: Path) -> list[StoredTensor | UnreadTensor]:
    beside = path.with_name(f"{path.name}.json")
    if not beside.is_file():
        raise DumpError(
            f"{path} holds bare elements, and {beside.name}, which describes them, is not beside it:"
            ' write it as {"dtype": "bfloat16", "shape": [2, 3]}'
        )
    described = json.loads(beside.read_bytes())
    dtype, shape = described["dtype"], _shape(described["shape"])
    wanted = math.prod(shape) * storage_dtype(dtype).itemsize
    if wanted != path.stat().st_size:
        raise DumpError(
            f"{path} has {path.stat().st_size:,} bytes, but {dtype}{list(shape)} of {beside.name} makes {wanted:,}"
        )
    return [StoredTensor(path=path, name="", dtype=dtype, raw=_mapped(path, 0, dtype, shape))]


def _open_safetensors(path: Path) -> list[StoredTensor | UnreadTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise DumpError(f"{path} is no safetensors file, or cut off: its header should take {length:,} bytes")
        header = json.loads(file.read(length))
    return [_safetensor(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]


def _safetensor(path: Path, name: str, entry: Mapping[str, Any], start: int) -> StoredTensor | UnreadTensor:
    dtype, shape = SAFETENSORS.get(entry["dtype"], str(entry["dtype"])), _shape(entry["shape"])
    first, last = entry["data_offsets"]
    if dtype not in DTYPES:
        return UnreadTensor(path=path, name=name, reason=f"elements of type {dtype:.40} cannot be read")
    wanted = math.prod(shape) * storage_dtype(dtype).itemsize
    if not 0 <= first <= last or last - first != wanted:
        raise DumpError(f"{path}: {name!r} should take {wanted:,} bytes, but its header says {first} to {last}")
    if start + last > path.stat().st_size:
        raise DumpError(f"{path} is cut off: {name!r} ends at byte {start + last:,} of {path.stat().st_size:,}")
    return StoredTensor(path=path, name=name, dtype=dtype, raw=_mapped(path, start + first, dtype, shape))


def _mapped(path: Path, offset: int, dtype: str, shape: tuple[int, ...]) -> Raw:
    if not math.prod(shape):  # nothing to map
        return np.zeros(shape, storage_dtype(dtype))
    return np.memmap(path, storage_dtype(dtype), "r", offset, shape)


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(size, int) and size >= 0 for size in value):
        raise DumpError(f"{value!r} is no shape: expected a list of sizes")
    return tuple(value)


def _open_torch(path: Path) -> list[StoredTensor | UnreadTensor]:
    try:
        import torch
    except ImportError as error:
        raise DumpError(f"{path} is a file of torch, which is not installed: install it, or dump .npy files") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a foreign pickle protocol; the file is read, or refused
            try:
                value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                value = torch.load(path, map_location="cpu", weights_only=True)  # of before torch 1.6
    except pickle.UnpicklingError as error:
        raise DumpError(
            f"{path} holds more than tensors, or is damaged; such a file may run code, and is not opened."
            " Save the tensors alone: torch.save(tensor, path)"
        ) from error
    found = [stored for name, tensor in _tensors(value, "", 0) for stored in _stored(path, name, tensor)]
    if not found:
        raise DumpError(f"{path} holds a {type(value).__name__} without a tensor")
    return found


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a state dict, or whatever nested lists and dicts a file holds, with their names."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple) and depth < _MAX_NESTING:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, f"{name}.{key}" if name else str(key), depth + 1)


def _stored(path: Path, name: str, tensor: Any) -> Iterator[StoredTensor | UnreadTensor]:
    from trainermon.statistics.layout import parts_of

    if not tensor.is_nested:
        yield _one(path, name, tensor)
        return
    for part, own in zip(("values", "sizes"), parts_of(tensor), strict=True):
        yield _one(path, f"{name}.{part}" if name else part, own)


def _one(path: Path, name: str, tensor: Any) -> StoredTensor | UnreadTensor:
    kind = _name(tensor.dtype)
    if tensor.is_meta:
        return UnreadTensor(
            path=path, name=name, reason="it is a meta tensor, of which there is a shape and no element"
        )
    try:
        tensor = tensor if kind in DTYPES and _is_strided(tensor) else _dense(tensor)
        raw, dtype = _raw(tensor), _name(tensor.dtype)
    except (DumpError, *_FAULTS) as error:
        return UnreadTensor(path=path, name=name, reason=_cause(error))
    return StoredTensor(path=path, name=name, dtype=dtype, raw=raw, meant_by="" if dtype == kind else kind)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _is_strided(tensor: Any) -> bool:
    import torch

    return bool(tensor.layout is torch.strided)


def _dense(tensor: Any) -> Any:
    """Return a dense tensor of a dtype that is known here, with the numbers that another one means."""
    import torch

    from trainermon.statistics.layout import dense

    if not _is_strided(tensor) and tensor.numel() > _MAX_EXPANDED:
        raise DumpError(f"it is sparse, and dense it would have {tensor.numel():,} elements")
    tensor = dense(tensor)
    return tensor.to(torch.complex64) if tensor.dtype is torch.complex32 else tensor


def _raw(tensor: Any) -> Raw:
    import torch

    dtype = _name(tensor.dtype)
    storage_dtype(dtype)
    if tensor.numel() > max(_MAX_EXPANDED, tensor.untyped_storage().nbytes()):
        raise DumpError(f"it is a view of {tensor.numel():,} elements on a few: save it with .contiguous()")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if dtype in BITS:
        tensor = tensor.view(getattr(torch, np.dtype(BITS[dtype]).name))
    return np.asarray(tensor.numpy())


_OPENERS = {
    ".pt": _open_torch,
    ".npy": _open_numpy,
    ".safetensors": _open_safetensors,
    ".bin": _open_binary,
}
