"""A file of JSON objects, one per line, that is only ever appended to and survives torn writes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainermon.core.private_files import open_private, replacing

_log = logging.getLogger(__name__)

# What a line raises that is torn, that another program wrote, or that `parse` does not understand.
_BAD = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Ledger:
    """Appends JSON entries, one per line, to a file and reads them back. One process writes; any may read.

    Args:
        path: The file; the first entry creates it, with mode 0600. A link is refused.
        sync: Whether what was written is on disk, even if the machine stops, before `append` or `replace` returns.
    """

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self._path = path
        self._sync = sync

    def read(self, parse: Callable[[Any], Any] = lambda entry: entry) -> list[Any]:
        """Return what `parse` makes of each entry, in order; nothing if there is no file.

        Lines that are torn, or for which `parse` raises a ValueError, KeyError, TypeError or AttributeError, are left
        out; how many, and why the first of them, is logged.
        """
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        found, errors = [], []
        for line in lines:
            if line:
                try:
                    found.append(parse(json.loads(line)))
                except _BAD as error:
                    errors.append(error)
        if errors:
            _log.warning("%d lines of %s cannot be read and are left out: %.200r", len(errors), self._path, errors[0])
        return found

    def append(self, *entries: Any) -> None:
        """Append the entries by a single write; after a torn last line they begin a line of their own.

        Raises:
            OSError: Nothing, or not everything, is certain to be written; it may be tried again.
        """
        lines = b"".join(map(_line, entries))
        descriptor = open_private(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                lines = b"\n" + lines
            written = os.write(descriptor, lines)
            if written < len(lines):
                raise OSError(f"only {written} of {len(lines)} bytes were taken by {self._path}")
            if self._sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, entries: Iterable[Any]) -> None:
        """Write the file anew with `entries` only; a kill leaves the old file or the new one. Raises OSError."""
        with replacing(self._path) as file:
            file.writelines(map(_line, entries))
            if self._sync:
                file.flush()
                os.fsync(file.fileno())
        if self._sync:
            _sync_folder(self._path.parent)


def _line(entry: Any) -> bytes:
    # UTF-8 cannot hold half a character; it becomes `?`.
    return json.dumps(entry, ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
