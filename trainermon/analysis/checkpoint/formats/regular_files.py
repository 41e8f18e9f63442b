"""Opens files that are files: a pipe would wait for ever, a device has no end."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from trainermon.core.errors import CheckpointError

_MAX_JSON_BYTES = 1 << 28
_POINTERS = (b"version https://git-lfs.github.com/", b"version https://hawser.github.com/")
_MAX_POINTER_BYTES = 1024  # source: git-lfs, docs/spec.md


class RegularFile:
    """A regular file that is open for reading at any place; close it, or use it in `with`."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            CheckpointError: it is missing, no regular file, a pointer of git-lfs, or may not be read.
        """
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened ({error.strerror}): is the checkpoint complete?") from error
        found = os.fstat(self._descriptor)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise CheckpointError(f"{path} is not a regular file: expected a file of a checkpoint")
        self._refuse_pointer()

    def _refuse_pointer(self) -> None:
        """Do nothing unless the file stands for one that git-lfs has not fetched."""
        if self.size >= _MAX_POINTER_BYTES:
            return
        text = self.read(0, self.size)
        if text.startswith(_POINTERS):
            self.close()
            size = text.partition(b"\nsize ")[2].split(b"\n")[0].decode("ascii", "replace")
            raise CheckpointError(
                f"{self.path} is a pointer of git-lfs, the {size:.20} bytes that it stands for are not here:"
                " git lfs pull"
            )

    def require(self, start: int, size_bytes: int) -> None:
        """Do nothing if the file has so many bytes from a place on.

        Raises:
            CheckpointError: it ends before.
        """
        if start < 0 or size_bytes < 0 or start + size_bytes > self.size:
            end = start + size_bytes
            raise CheckpointError(f"{self.path} is cut off: it has {self.size:,} bytes, not {end:,}; copy it again")

    def read(self, start: int, size_bytes: int) -> bytes:
        """Return so many bytes from a place on.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """
        self.require(start, size_bytes)
        parts = []
        while size_bytes > 0:  # the system returns at most 2 GiB at once
            try:
                part = os.pread(self._descriptor, size_bytes, start)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read ({error.strerror}): copy it again") from error
            if not part:
                raise CheckpointError(f"{self.path} became shorter while it was read: wait until it is written")
            parts.append(part)
            start, size_bytes = start + len(part), size_bytes - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close it; twice does no harm."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RegularFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_all(path: Path, most: int) -> bytes:
    """Return the bytes of a small file.

    Raises:
        CheckpointError: it is missing, no regular file, empty, or has more than `most` bytes.
    """
    with RegularFile(path) as file:
        if not 0 < file.size <= most:
            raise CheckpointError(f"{path} has {file.size:,} bytes, expected 1 to {most:,}: copy it again")
        return file.read(0, file.size)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(read_all(path, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({str(error)[:100]}): copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object: copy it again")
    return value


def file_names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted.

    Raises:
        CheckpointError: it cannot be listed.
    """
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed ({error.strerror}): check path and permissions") from error
