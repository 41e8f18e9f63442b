"""The tensors of a dump: one file each, as long as the quota allows, and one file for a tensor in several places."""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from pathlib import Path
from typing import Any

from trainermon.core.private_files import make_private_folder
from trainermon.dump.files.framework import FrameworkTensors
from trainermon.dump.files.records import TENSOR_SUFFIXES
from trainermon.dump.forms import TensorLeaf, quoted

MAX_NAME = 200
_ODD = re.compile(r"[^\w.\-]")


class TensorFolder:
    """Saves the tensors of one dump as files, up to `max_bytes` with the dump's lines.

    Args:
        path: The folder; see `prepare`.
        max_bytes: Beyond them nothing is saved any more.
        tensors: The framework's.
        final: Where the folder will be taken afterwards, None: it stays.
        file_format: `pt` or `npy`.

    Attributes:
        path: The folder.
        final: Where it will be found.
        num_bytes: Bytes of tensors saved so far.
        over_quota: Tensors that were not saved for the quota.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        tensors: FrameworkTensors,
        *,
        final: Path | None = None,
        file_format: str = "pt",
    ) -> None:
        self.path = path
        self._begin = f"{path}/"  # as text: to join paths takes as long as to make a file
        self.final = path if final is None else final
        self.num_bytes = self.over_quota = 0
        self._max_bytes = max_bytes
        self._tensors = tensors
        self._file_format = file_format

    def prepare(self, *, is_used: bool) -> None:
        """Create the folder if `is_used`, and remove from it the tensors of an earlier dump.

        They are removed, not overwritten: a file may have several names (hard links), and what is written to one would
        change the others.

        Raises:
            OSError: It cannot be written.
        """
        make_private_folder(self.path if is_used else self.path.parent)
        if self.path.is_dir():
            for file in self.path.iterdir():
                if file.suffix in TENSOR_SUFFIXES:
                    file.unlink()

    def save(self, name: str, leaf: TensorLeaf, *, line_bytes: int) -> None:
        """Save the tensor of `leaf` as it is now, in a file `name` plus ending.

        One saved before gets a second name (hard link) for its file. Nothing happens where there are no elements, or
        beyond the quota, of which the dump's lines have used `line_bytes`. The form's reading learns the file's name.

        Raises:
            Exception: The disk is full, or the type cannot be saved; no part of the file is left.
        """
        tensor, reading = leaf.tensor, leaf.form.reading
        size = 0 if reading is None else self._tensors.num_bytes(tensor)
        if reading is None or not size:
            return
        file_name = _file_name(name, self._tensors.suffix(tensor, self._file_format))
        known = reading.file_name
        if known is None and self.num_bytes + line_bytes + size > self._max_bytes:
            self.over_quota += 1
            return
        if known is None or not self._link(known, file_name):
            try:
                self.num_bytes += self._store(tensor, f"{self._begin}{file_name}")
            except Exception:  # whatever ended it goes on to the caller, who counts it
                with contextlib.suppress(OSError):
                    (self.path / file_name).unlink()  # what was cut off is no tensor
                raise
        reading.file_name = reading.file_name or file_name
        leaf.form.more += f', "data_name": {quoted(file_name)}'

    def write_waiting(self) -> None:
        """Do nothing: here every tensor is written at once. A subclass that lets them wait writes them."""

    def _store(self, tensor: Any, path: str) -> int:
        return self._tensors.save(tensor, path)

    def _link(self, known: str, file_name: str) -> bool:
        try:
            os.link(f"{self._begin}{known}", f"{self._begin}{file_name}")
        except OSError:  # a file system without links, or a name that is there already
            return False
        return True


def _file_name(name: str, suffix: str) -> str:
    """Return a file name for a slot; what a file system may refuse is replaced, and what is too long is shortened."""
    safe = _ODD.sub("_", name)
    if len(safe) > MAX_NAME:
        safe = f"{safe[: MAX_NAME - 9]}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
    return safe + suffix
