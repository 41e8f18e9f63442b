"""The file of a tensor: what `torch.save` would write, at a third of its cost, for all common tensors; or numpy's.

The format is that of `torch.save` since torch 1.6: a zip archive, nothing compressed, with a pickle that says what
the tensor is and a record of its bytes. `torch.load(..., weights_only=True)`, `zipfile` and mindstudio-probe read it.
Source: torch/serialization.py `_save` and caffe2/serialize/inline_container.cc at v2.13.
"""

from __future__ import annotations

import ctypes
import functools
import io
import math
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainermon.core.native.library import library_or_none
from trainermon.core.private_files import open_private
from trainermon.statistics.crc32 import crc32
from trainermon.statistics.layout import (
    PLAIN_TYPES,
    UNCOUNTED,
    has_memory,
    is_strided,
    no_memory,
    readable,
    untransformed,
)

_STORAGES = {
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}
# What `torch.load` refuses: their numbers are saved.
_NOT_LOADED = UNCOUNTED | {torch.quint4x2, torch.quint2x4}
# What numpy's files hold, and how numpy calls it.
_NUMPY_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*_STORAGES, torch.complex64, torch.complex128)}
_NUMPY_NAMES |= {torch.uint16: "uint16", torch.uint32: "uint32", torch.uint64: "uint64"}
del _NUMPY_NAMES[torch.bfloat16]
_ALIGNMENT = 64  # of the elements in the file, for those who map it into memory
_MAX_BYTES = (1 << 31) - 1  # what one write takes, and an archive without 64-bit extensions
_HEADS_KEPT = 4096  # of tensors that differ in dtype or shape; half a kilobyte each
_NO_SPACE, _NO_CHECKSUM = -1, -2  # as in archive.c
_CHECKSUM_BYTES = 4
_LOCAL_CHECKSUM, _CENTRAL_CHECKSUM = 14, 16  # where the checksum stands in the first two of these
_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")


def suffix_for(tensor: Tensor, file_format: str) -> str:
    """Return the file ending, `.pt` or `.npy`, for `tensor` where the user asked for `file_format` (`pt` or `npy`).

    It is `.pt` in both cases for a tensor that numpy cannot hold as an array.
    """
    if file_format != "npy":
        return ".pt"
    local = _local(tensor)
    is_array = type(local) in PLAIN_TYPES and local.layout is torch.strided and not local.is_quantized
    return ".npy" if is_array else ".pt"


def save_tensor(tensor: Tensor, path: Path | str) -> int:
    """Write a tensor, as one on the CPU, to a file of mode 0600, and return the number of bytes.

    A DTensor's local shard is saved, of a nested tensor its elements, of a masked one zeros where it is masked, inside
    vmap the whole batch, a subclass as a plain tensor, a view without the rest of its storage; of integers of less than
    a byte the bytes; of quantized ones that are packed, or have zero points that are no integers, what they mean. What
    is on the CPU and dense is written from where it lies. The ending of `path` tells the format: .pt is readable with
    `weights_only=True`; in .npy, floating types that numpy does not know are float32, which holds each of them exactly.

    Raises:
        OSError: The file cannot be written.
        TypeError: A subclass keeps its elements in other tensors.
        RuntimeError: torch cannot read the tensor.
        ValueError: The tensor has elements but no memory.
    """
    dense = tensor = untransformed(tensor)
    if type(tensor) in PLAIN_TYPES and is_strided(tensor) and not has_memory(tensor):
        raise no_memory(tensor)
    if not _is_dense(tensor):
        tensor = _local(tensor)
        if tensor.layout is not torch.strided:
            return _save_any(tensor.to("cpu"), path)
        dense = untransformed(tensor.to("cpu").contiguous().resolve_conj().resolve_neg())
    if str(path).endswith(".npy"):
        return _save_numpy(dense, path)
    if type(dense) not in PLAIN_TYPES or dense.dtype not in _STORAGES or not 0 < dense.nbytes < _MAX_BYTES:
        return _save_any(untransformed(dense.detach().clone()), path)
    size = _save_by_library(dense, path)
    if size:
        return size
    head, tail = _around(dense, crc32(dense))
    return _write_parts(path, (head, bytes_of(dense), tail))


def load_tensor(path: Path, dtype: str = "", shape: Sequence[int] | None = None) -> Tensor:
    """Return, on the CPU, the tensor in a .pt or .npy file written by `save_tensor`.

    `dtype` (`bfloat16`) is what a .npy file's array is converted to; "": it keeps its own. With the `shape` that it is
    said to have, a .pt file is read at a quarter of the cost.

    Raises:
        OSError, RuntimeError, ValueError, …: The file is missing, no regular one, damaged, or holds more than a tensor.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is no file")
    if path.suffix == ".npy":
        found = torch.from_numpy(np.load(path, allow_pickle=False))
        known = getattr(torch, dtype.removeprefix("torch."), None)
        return found.to(known) if isinstance(known, torch.dtype) else found
    written = None if shape is None else _as_written(path, dtype, shape)
    if written is not None:
        return written
    loaded = torch.load(path, weights_only=True, map_location="cpu")
    if not isinstance(loaded, Tensor):
        raise TypeError(f"{path.name} holds a {type(loaded).__name__}, expected a tensor")
    return loaded


def _as_written(path: Path, dtype: str, shape: Sequence[int]) -> Tensor | None:
    """Return the tensor in a file that is byte for byte what `save_tensor` writes of such a one, else None.

    Such a file needs no unpickling: its elements are taken as they lie.
    """
    known = getattr(torch, dtype.removeprefix("torch."), None)
    sizes = list(shape)
    if known not in _STORAGES or not all(type(size) is int and 0 < size < _MAX_BYTES for size in sizes):
        return None
    if not 0 < math.prod(sizes) * known.itemsize < min(_MAX_BYTES, path.stat().st_size):
        return None
    like = torch.empty(sizes, dtype=known, device="meta")
    archive = bytearray(path.read_bytes())
    begin = len(_around(like, 0)[0])
    elements = memoryview(archive)[begin : begin + like.nbytes]
    head, tail = _around(like, zlib.crc32(elements))
    if len(archive) != begin + like.nbytes + len(tail) or archive[:begin] != head or archive[-len(tail) :] != tail:
        return None
    return torch.frombuffer(archive, dtype=known, count=like.numel(), offset=begin).view(sizes)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements lie in the memory of the host as a file has them."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.dtype in _STORAGES
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _local(tensor: Tensor) -> Tensor:
    tensor = untransformed(tensor.detach())
    is_plain = type(tensor) in PLAIN_TYPES and not tensor.is_nested
    is_saved = is_plain or _has_elements(tensor)
    if not is_saved or tensor.is_nested or tensor.dtype in _NOT_LOADED or _has_float_zeros(tensor):
        tensor = readable(tensor)
    if type(tensor) in PLAIN_TYPES:
        return tensor
    if not _has_elements(tensor):
        raise TypeError(f"a {type(tensor).__name__} has no elements of its own, expected a tensor in memory")
    return tensor.as_subclass(Tensor)


def _has_float_zeros(tensor: Tensor) -> bool:
    """Return whether a tensor is quantized by channels with zero points that are no integers: torch copies none."""
    return tensor.is_quantized and tensor.qscheme() is torch.per_channel_affine_float_qparams


def _has_elements(tensor: Tensor) -> bool:
    """Return whether a subclass has elements of its own, and does not make them up of other tensors."""
    return type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy; use them only while `tensor` lives.

    Not by `Tensor.numpy`: it forbids for good to resize the storage, as FSDP does with those of parameters.
    """
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class _Archive(ctypes.Structure):
    """The parts of `_archive`, as archive.c takes them."""

    _fields_ = (("parts", ctypes.c_char_p * 4), ("sizes", ctypes.c_int64 * 4))


def _save_by_library(dense: Tensor, path: Path | str) -> int:
    """Write a dense tensor in one call of the compiled library; return the number of bytes, 0 if it cannot."""
    save = _compiled()
    if save is None:
        return 0
    archive, size = _packed(dense.dtype, dense.shape, dense.stride())
    num_bytes = dense.nbytes
    error = save(os.fsencode(path), archive, dense.data_ptr(), num_bytes)
    if error == _NO_CHECKSUM:
        return 0
    if error == _NO_SPACE:
        raise OSError(f"fewer than {size + num_bytes} bytes were written to {path}: no space left?")
    if error:
        raise OSError(error, os.strerror(error), str(path))
    return size + num_bytes


@functools.cache
def _compiled() -> Any:
    found = library_or_none()
    if found is None or not hasattr(found, "trainermon_save"):
        return None
    found.trainermon_save.argtypes = (ctypes.c_char_p, ctypes.POINTER(_Archive), ctypes.c_void_p, ctypes.c_int64)
    return found.trainermon_save


@functools.lru_cache(maxsize=_HEADS_KEPT)
def _packed(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[_Archive, int]:
    """Return an archive in the form that the library takes, and its size without the elements."""
    parts = _archive(dtype, tuple(shape), strides)
    return _Archive(parts, tuple(map(len, parts))), sum(map(len, parts)) + 2 * _CHECKSUM_BYTES


def _save_numpy(dense: Tensor, path: Path | str) -> int:
    if dense.dtype not in _NUMPY_NAMES:
        dense = dense.to(torch.complex64 if dense.is_complex() else torch.float32)
    head, elements = _numpy_head(_NUMPY_NAMES[dense.dtype], tuple(dense.shape)), bytes_of(dense)
    if dense.nbytes < _MAX_BYTES:
        return _write_parts(path, (head, elements))
    with open(path, "wb", opener=open_private) as file:
        return file.write(head) + file.write(elements)


@functools.lru_cache(maxsize=_HEADS_KEPT)
def _numpy_head(dtype: str, shape: tuple[int, ...]) -> bytes:
    head = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    return head.getvalue()


def _write_parts(path: Path | str, parts: Sequence[bytes | memoryview]) -> int:
    size = sum(map(len, parts))
    file = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        written = os.writev(file, parts)
    finally:
        os.close(file)
    if written < size:
        raise OSError(f"{written} of {size} bytes were written to {path}: no space left?")
    return size


def _save_any(tensor: Tensor, path: Path | str) -> int:
    with open(path, "wb", opener=open_private) as file:
        torch.save(tensor, file)
        return file.tell()


def _around(tensor: Tensor, checksum: int) -> tuple[bytes, bytes]:
    """Return what stands before and behind the elements in the archive."""
    begin, middle, directory, end = _archive(tensor.dtype, tuple(tensor.shape), tensor.stride())
    checked = struct.pack("<I", checksum)
    return b"".join((begin, checked, middle)), b"".join((directory, checked, end))


@functools.lru_cache(maxsize=_HEADS_KEPT)
def _archive(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the archive in four parts: between them stand the elements' checksum, the elements, the checksum again."""
    archive = bytearray()
    entries: list[bytes] = []
    for name, record in (("data.pkl", _pickle(dtype, shape, strides)), ("byteorder", b"little"), ("version", b"3\n")):
        _add(archive, entries, name, (zlib.crc32(record), len(record)))
        archive += record
    header, size = len(archive), math.prod(shape) * dtype.itemsize
    _add(archive, entries, "data/0", (0, size), alignment=_ALIGNMENT)
    directory = b"".join(entries)
    end = _END.pack(b"PK\5\6", 0, 0, len(entries), len(entries), len(directory), len(archive) + size, 0)
    in_header = header + _LOCAL_CHECKSUM
    in_directory = len(directory) - len(entries[-1]) + _CENTRAL_CHECKSUM
    return (
        bytes(archive[:in_header]),
        bytes(archive[in_header + 4 :]),
        directory[:in_directory],
        directory[in_directory + 4 :] + end,
    )


def _add(archive: bytearray, entries: list[bytes], name: str, record: tuple[int, int], *, alignment: int = 1) -> None:
    """Append the header of a record (checksum, size) whose bytes come next, and its entry in the directory."""
    path = b"archive/" + name.encode()
    offset = len(archive)
    padding = -(offset + _LOCAL.size + len(path) + 4) % alignment
    extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding if alignment > 1 else b""
    checksum, size = record
    archive += _LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, 0, checksum, size, size, len(path), len(extra)) + path + extra
    entries.append(
        _CENTRAL.pack(b"PK\1\2", 0, 0, 0, 0, 0, 0, checksum, size, size, len(path), 0, 0, 0, 0, 0, offset) + path
    )


def _pickle(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """Return the call of `torch._utils._rebuild_tensor_v2` that makes the tensor of its storage, as a pickle."""
    storage = b"c" + f"torch\n{_STORAGES[dtype]}\n".encode()
    place = b"(" + _text("storage") + storage + _text("0") + _text("cpu") + _integer(math.prod(shape)) + b"tQ"
    layout = _integer(0) + _integers(shape) + _integers(strides)
    hooks = b"\x89ccollections\nOrderedDict\n)R"  # requires no gradient, has no hooks
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + place + layout + hooks + b"tR."


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _integers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"
