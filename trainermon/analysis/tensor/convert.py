"""`trainermon tensor convert`: into another format of files, bit by bit, or rounded to a given dtype.

numpy's files have no bfloat16 and no 8-bit floats: those become float32 there, which holds each of them exactly.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainermon.analysis.tensor.dtypes import BITS, numbers, rounded, storage_dtype
from trainermon.analysis.tensor.extremes import distances
from trainermon.analysis.tensor.files import CHUNK, SAFETENSORS, StoredTensor
from trainermon.core.errors import DumpError

FORMATS = ("pt", "npy", "bin", "safetensors")
_SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedFile:
    """A tensor file that was written.

    Attributes:
        path: The file.
        dtype: Type of its elements.
        shape: Shape of the tensor.
        changed: Number of elements that this type cannot hold exactly.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    changed: int


def convert(tensor: StoredTensor, path: Path, *, dtype: str | None = None, overwrite: bool = False) -> ConvertedFile:
    """Write `tensor` to the file `path`, in the format of its suffix (.pt, .npy, .bin …).

    A .bin gets a .bin.json beside it. `dtype` None: the tensor's own, in .npy float32 for what numpy does not know. The
    file is put in place by rename, once it is whole.

    Raises:
        DumpError: the file exists already, cannot be written, or cannot hold the dtype.
    """
    writer = _WRITERS.get(path.suffix)
    if writer is None:
        raise DumpError(f"{path} has no format by its name: expected one that ends in .{', .'.join(FORMATS)}")
    if path.exists() and not overwrite:
        raise DumpError(f"{path} exists already: choose another name, or --force")
    chosen = dtype or tensor.dtype
    if path.suffix == ".npy" and chosen in BITS:
        if dtype is not None:
            raise DumpError(f"files of numpy cannot hold {dtype}: leave --dtype out (float32 is exact), or choose .pt")
        chosen = "float32"
    values = _DtypeConversion(tensor, chosen)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        writer(values, temporary)
        temporary.replace(path)
        if path.suffix == ".bin":
            described = json.dumps({"dtype": chosen, "shape": list(tensor.shape)}) + "\n"
            path.with_name(f"{path.name}.json").write_text(described, encoding="utf-8")
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return ConvertedFile(path=path, dtype=chosen, shape=tensor.shape, changed=values.changed)


class _DtypeConversion:
    """The elements of a tensor as those of another dtype, by chunks; counts what is another number then."""

    def __init__(self, tensor: StoredTensor, dtype: str) -> None:
        storage_dtype(dtype)
        self.tensor = tensor
        self.dtype = dtype
        self.changed = 0

    def chunks(self) -> Iterator[Any]:
        """Yield stored elements, in order."""
        if self.dtype == self.tensor.dtype:
            flags = ("external_loop", "buffered", "zerosize_ok")
            yield from np.nditer(self.tensor.raw, flags=flags, order="C", buffersize=CHUNK)  # type: ignore[call-overload]
            return
        for values in self.tensor.chunks():
            if values.dtype.kind == "c" and not self.dtype.startswith("complex"):
                raise DumpError(f"complex numbers do not fit into {self.dtype}: choose complex64 or complex128")
            raw = rounded(values, self.dtype)
            apart = distances(values, numbers(raw, self.dtype))
            self.changed += int(np.count_nonzero(apart != 0))
            yield raw

    def write_bytes(self, file: Any) -> None:
        """Write the elements little-endian."""
        wanted = storage_dtype(self.dtype)
        for raw in self.chunks():
            file.write(np.ascontiguousarray(raw, dtype=wanted).data)

    def whole(self) -> Any:
        """Return all stored elements in one array of the tensor's shape."""
        result = np.empty(self.tensor.raw.size, storage_dtype(self.dtype).newbyteorder("="))
        start = 0
        for raw in self.chunks():
            result[start : start + raw.size] = raw
            start += raw.size
        return result.reshape(self.tensor.shape)


def _write_numpy(values: _DtypeConversion, path: Path) -> None:
    with path.open("wb") as file:
        head = {"descr": storage_dtype(values.dtype).str, "fortran_order": False, "shape": values.tensor.shape}
        np.lib.format.write_array_header_1_0(file, head)
        values.write_bytes(file)


def _write_binary(values: _DtypeConversion, path: Path) -> None:
    with path.open("wb") as file:
        values.write_bytes(file)


def _write_safetensors(values: _DtypeConversion, path: Path) -> None:
    if values.dtype not in _SAFETENSORS_NAMES:
        raise DumpError(f"safetensors cannot hold {values.dtype}: choose --dtype, or another format")
    size = values.tensor.raw.size * storage_dtype(values.dtype).itemsize
    entry = {
        "dtype": _SAFETENSORS_NAMES[values.dtype],
        "shape": list(values.tensor.shape),
        "data_offsets": [0, size],
    }
    header = json.dumps({values.tensor.name or "tensor": entry}).encode()
    header += b" " * (-len(header) % 8)  # elements begin at a multiple of eight
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        values.write_bytes(file)


def _write_torch(values: _DtypeConversion, path: Path) -> None:
    try:
        import torch
    except ImportError as error:
        raise DumpError(".pt files need torch, which is not installed: choose npy or safetensors") from error
    tensor = torch.from_numpy(values.whole())
    torch.save(tensor.view(getattr(torch, values.dtype)) if values.dtype in BITS else tensor, path)


_WRITERS: dict[str, Callable[[_DtypeConversion, Path], None]] = {
    ".pt": _write_torch,
    ".npy": _write_numpy,
    ".bin": _write_binary,
    ".safetensors": _write_safetensors,
}


def destination(tensor: StoredTensor, source: Path, output: Path, suffix: str) -> Path:
    """Return the path below `output` for a converted tensor of the folder (or file) `source`: where it is in `source`.

    `suffix` is the new ending. Where a file holds several tensors, each one's name is added to the file's.
    """
    place = tensor.path.relative_to(source) if source.is_dir() else Path(tensor.path.name)
    stem = f"{place.stem}.{tensor.name}" if tensor.name else place.stem
    safe = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in stem)
    return output / place.parent / f"{safe}.{suffix}"
