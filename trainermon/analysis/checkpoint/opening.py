"""Which format a checkpoint has, by what is in it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainermon.analysis.checkpoint.formats.dcp import METADATA, open_dcp
from trainermon.analysis.checkpoint.formats.deepspeed import is_deepspeed, open_deepspeed, tracked_folder
from trainermon.analysis.checkpoint.formats.folder import is_plain_folder, open_folder, open_numpy, open_torch
from trainermon.analysis.checkpoint.formats.lora import CONFIG as CONFIG_OF_ADAPTER
from trainermon.analysis.checkpoint.formats.lora import LORA, is_adapter, open_adapter
from trainermon.analysis.checkpoint.formats.megatron import is_megatron, open_megatron, tracked_iteration
from trainermon.analysis.checkpoint.formats.megatron_dist import CONFIG, open_megatron_dist
from trainermon.analysis.checkpoint.formats.mindspore_file import is_mindspore, open_mindspore
from trainermon.analysis.checkpoint.formats.regular_files import RegularFile, file_names
from trainermon.analysis.checkpoint.formats.safetensors_file import (
    INDEX_SUFFIX,
    open_indexed,
    open_safetensors,
    weights_index,
)
from trainermon.analysis.checkpoint.formats.torch_file import is_torch_file
from trainermon.analysis.checkpoint.pieces import Checkpoint
from trainermon.core.errors import CheckpointError, DumpError

_FAULTS = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, OSError, RecursionError, DumpError)
_NUMPY_START = b"\x93NUMPY"
_SAFETENSORS_START = b"{"  # after eight bytes of length


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Return what a checkpoint holds, without reading a tensor and without running what a pickle asks for.

    `path` is a file or folder of any format in docs/checkpoints.md; of a run's folder, the newest step is taken.

    Raises:
        CheckpointError: nothing there is a checkpoint, or it is damaged: the file, what was found, what to do.
    """
    return open_in_part(path, None)


def open_in_part(path: Path | str, damaged: list[str] | None) -> Checkpoint:
    """Return what `open_checkpoint` does, of damaged files of a plain folder, or of one with an index, nothing.

    What is wrong with them is put into `damaged`; None: they are refused.

    Raises:
        CheckpointError: as `open_checkpoint`, of any other file.
    """
    path = Path(path)
    try:
        found = _open_folder(path, damaged) if path.is_dir() else _open_file(path, damaged)
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error
    except _FAULTS as error:  # a file may hold anything in the place of what its format has there
        cause = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{path} is not laid out as its format says ({cause}): copy or save it again") from error
    if not found.tensors and not found.optimizer:
        said = "".join(f"; {note}" for note in found.all_notes())
        raise CheckpointError(f"{path} holds no tensor: expected a checkpoint's file or folder{said}")
    return found


@contextlib.contextmanager
def opened(path: Path | str) -> Iterator[Checkpoint]:
    """Open a checkpoint for a while: as `open_checkpoint` does, or of `BASE+ADAPTER` a base with an adapter merged in.

    What is merged is written into a folder of its own below that for temporary files, which goes at the end.

    Raises:
        CheckpointError: as `open_checkpoint`; or the adapter does not fit its base.
    """
    parts = _base_and_adapter(str(path))
    if parts is None:
        yield open_checkpoint(path)
        return
    from trainermon.analysis.checkpoint.merged import merged_with

    base, adapter = map(open_checkpoint, parts)
    if adapter.format != LORA:
        raise CheckpointError(f"{parts[1]} is no adapter: expected BASE+ADAPTER, its folder with {CONFIG_OF_ADAPTER}")
    with tempfile.TemporaryDirectory(prefix="trainermon-merged-") as folder:
        yield merged_with(base, adapter, Path(folder))


def _base_and_adapter(path: str) -> tuple[Path, Path] | None:
    """Return both paths in `BASE+ADAPTER`, None if it is one path; a + may stand in their names, too."""
    if "+" not in path or os.path.lexists(path):
        return None
    places = [at for at, letter in enumerate(path) if letter == "+"]
    pairs = [(Path(path[:at]), Path(path[at + 1 :])) for at in places]
    return next((pair for pair in pairs if all(part.exists() for part in pair)), pairs[0])


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, or a run's folder with one in it, and not just a folder of tensor files.

    Raises:
        CheckpointError: the folder cannot be listed, or its tracker file names what is not there.
    """
    names = file_names(folder)
    has_format = METADATA in names or is_megatron(folder) or is_deepspeed(folder)
    return has_format or any(find(folder) is not None for find in (tracked_iteration, tracked_folder, weights_index))


def is_recognized(path: Path | str) -> bool:
    """Return whether `path` is a checkpoint, damaged or not: a folder of tensor files, or begins as one of them."""
    path = Path(path)
    try:
        if path.is_file():
            start = _start_of(path)
            return start.startswith((b"PK\3\4", _NUMPY_START)) or start[8:9] == _SAFETENSORS_START
        return path.is_dir() and (is_checkpoint(path) or is_plain_folder(path) or any(path.glob("*.distcp")))
    except CheckpointError:
        return path.is_dir()


def _open_folder(folder: Path, damaged: list[str] | None) -> Checkpoint:
    names = set(file_names(folder))
    for is_format, open_format in (
        ({CONFIG, "common.pt"} <= names, open_megatron_dist),
        (METADATA in names, open_dcp),
        (is_megatron(folder), open_megatron),
        (is_deepspeed(folder), open_deepspeed),
    ):
        if is_format:
            return open_format(folder)
    newest = tracked_iteration(folder) or tracked_folder(folder)
    if newest is not None:
        return open_in_part(newest, damaged)
    return _open_weights(folder, damaged)


def _open_weights(folder: Path, damaged: list[str] | None) -> Checkpoint:
    index = weights_index(folder)
    if index is not None:
        return open_indexed(index, damaged)
    if is_adapter(folder):
        return open_adapter(folder)
    part = next((name for name in file_names(folder) if name.endswith(".distcp")), None)
    if part is not None:
        raise CheckpointError(
            f"{folder} has parts of a distributed checkpoint ({part} …) and no {METADATA}, which says what is in them:"
            " copy it, too; it is written last, so a save that was cut off has none"
        )
    if is_plain_folder(folder):
        return open_folder(folder, damaged)
    raise CheckpointError(f"{folder} has none of the files of a checkpoint: docs/checkpoints.md says which are read")


def _start_of(path: Path) -> bytes:
    with RegularFile(path) as file:
        return file.read(0, min(file.size, 16))


def _open_file(path: Path, damaged: list[str] | None) -> Checkpoint:
    if path.suffix == ".distcp":
        raise CheckpointError(f"{path} is one rank's part of a distributed checkpoint: open its folder, {path.parent}")
    if path.name.startswith("adapter_model.") and is_adapter(path.parent):
        return open_adapter(path.parent)
    start = _start_of(path)
    if is_torch_file(start):
        return open_torch(path)
    if start.startswith(_NUMPY_START):
        return open_numpy(path)
    if path.name.endswith(INDEX_SUFFIX):
        return open_indexed(path, damaged)
    if start[8:9] == _SAFETENSORS_START:
        return open_safetensors(path)
    if is_mindspore(start):
        return open_mindspore(path)
    raise CheckpointError(
        f"{path} begins with {start[:8]!r}, which no known format does: docs/checkpoints.md says which are read"
    )
