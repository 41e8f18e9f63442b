"""One file of torch or numpy, and plain folders of such files."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainermon.analysis.checkpoint.formats.regular_files import RegularFile, file_names
from trainermon.analysis.checkpoint.formats.safetensors_file import SHARD, contiguous, read_or_note, read_weights
from trainermon.analysis.checkpoint.formats.state_dicts import SplitState
from trainermon.analysis.checkpoint.formats.torch_states import TORCH_SUFFIXES, joined, read_state, step_of
from trainermon.analysis.checkpoint.pieces import Checkpoint, StoredArray, TensorPieces, whole
from trainermon.analysis.tensor.dtypes import storage_dtype
from trainermon.core.errors import CheckpointError, DumpError

_SUFFIXES = (*TORCH_SUFFIXES, ".npy", ".safetensors")
_MAX_NUMPY_HEADER = 1 << 16


def open_torch(path: Path) -> Checkpoint:
    """Return what one file of torch holds.

    Raises:
        CheckpointError: it is damaged, or of an old format.
    """
    parts = read_state(path)
    return Checkpoint(
        path=path,
        format="torch",
        step=step_of(parts.values),
        tensors=parts.tensors,
        optimizer=parts.optimizer,
        values=parts.values,
        unread=parts.unread,
        notes=parts.notes,
    )


def open_numpy(path: Path) -> Checkpoint:
    """Return what a .npy file holds: one tensor, with the file's name.

    Raises:
        CheckpointError: it is damaged, or holds Python's objects.
    """
    return Checkpoint(path=path, format="folder", tensors={path.stem: _numpy(path, path.stem)})


def is_plain_folder(folder: Path) -> bool:
    """Return whether a folder has a file of tensors."""
    return any(name.endswith(_SUFFIXES) for name in file_names(folder))


def open_folder(folder: Path, damaged: list[str] | None = None) -> Checkpoint:
    """Return what the .npy, torch and safetensors files of a folder hold, its folders left out.

    A tensor that its file alone holds has the file's name. With `damaged`, what is wrong with files is put there.

    Raises:
        CheckpointError: a file is damaged, or two hold a tensor of the same name.
    """
    tensors: dict[str, TensorPieces] = {}
    states: dict[str, SplitState] = {}
    for file in file_names(folder):
        path = folder / file
        if not file.endswith(_SUFFIXES) or path.is_dir():
            continue
        states[file] = read_or_note(_read, path, damaged)
        for name, tensor in states[file].tensors.items():
            full = name or path.stem
            if full in tensors:
                other = tensors[full].pieces[0].label
                raise CheckpointError(f"{path} and {other} both have {full!r}: open the one that is meant on its own")
            tensors[full] = TensorPieces(full, tensor.shape, tensor.dtype, tensor.pieces, tensor.notes)
    beside = joined(states)
    return Checkpoint(
        path=folder,
        format="folder",
        step=beside.step,
        tensors=tensors,
        optimizer=beside.optimizer,
        values=beside.values,
        unread=tuple(name for state in states.values() for name in state.unread),
        missing=tuple(_missing_shards(file_names(folder))),
        notes=tuple(f"{file}: {note}" for file, state in states.items() for note in state.notes),
    )


def _missing_shards(names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence on the first file that is not there where others are called `…-00001-of-00002.safetensors`."""
    groups: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in names:
        if (found := SHARD.fullmatch(name)) and name.endswith(_SUFFIXES):
            group = found["stem"], found["total"], found["suffix"]
            groups.setdefault(group, {})[int(found["number"])] = name
    for (stem, total, suffix), has in groups.items():
        first = min(1, *has)
        lacking = next((number for number in range(first, first + int(total)) if number not in has), None)
        if lacking is not None:
            lost = f"{stem}-{lacking:0{len(total)}}-of-{total}.{suffix}"
            yield f"{lost} is missing, as the name of {next(iter(has.values()))} says: copy it, too"


def _read(path: Path) -> SplitState:
    return SplitState({path.stem: _numpy(path, path.stem)}, {}, {}) if path.suffix == ".npy" else read_weights(path)


def _numpy(path: Path, name: str) -> TensorPieces:
    """Return the tensor of a .npy file. Source: numpy/lib/_format_impl.py, format 1.0 to 3.0."""
    with RegularFile(path) as file:
        start = file.read(0, min(12, file.size))
        if not start.startswith(b"\x93NUMPY") or len(start) < 12:
            raise CheckpointError(f"{path} begins with {start[:6]!r}, expected a .npy file: copy it again")
        width = 2 if start[6] == 1 else 4
        length = int.from_bytes(start[8 : 8 + width], "little")
        text = file.read(8 + width, min(length, _MAX_NUMPY_HEADER))
        size = file.size
    try:
        header = ast.literal_eval(text.decode("latin1").strip())
        dtype, shape = _numpy_dtype(header["descr"]), tuple(header["shape"])
        strides = contiguous(shape[::-1])[::-1] if header["fortran_order"] else contiguous(shape)
        needed = 8 + width + length + math.prod(shape) * storage_dtype(dtype).itemsize
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError, DumpError) as error:
        raise CheckpointError(f"{path} has a header that is not read ({str(error)[:100]}): copy it again") from error
    if needed > size or min(shape, default=0) < 0:
        raise CheckpointError(f"{path} is cut off: it has {size:,} bytes, its array ends at {needed:,}; copy it again")
    return whole(name, StoredArray(path, 8 + width + length, dtype, shape, strides), path.name)


def _numpy_dtype(code: Any) -> str:
    kinds = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}
    if not isinstance(code, str) or code[:1] not in ("<", "|") or code[1:2] not in kinds:
        raise ValueError(f"elements of type {code!r:.40}; expected numbers, little-endian")
    return "bool" if code[1] == "b" else f"{kinds[code[1]]}{8 * int(code[2:])}"
