"""A file of JSON objects, one per line, that is only ever appended to and survives torn writes."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

_logger = logging.getLogger(__name__)


def append_line(path: Path, entry: Any) -> None:
    """Append one object by a single `write` with O_APPEND; the file is created with mode 0600.

    After a torn last line the object begins a line of its own. Half a character becomes `?`. No link is followed.

    Raises:
        OSError: nothing, or only a part of the line, could be written; it may be tried again.
    """
    line = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes were taken")
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[Any]:
    """Return the objects in order; a line that is torn is left out, and a file that does not exist is empty."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    entries = []
    for number, line in enumerate(lines, start=1):
        if line:
            try:
                entries.append(json.loads(line))
            except ValueError:  # JSONDecodeError and UnicodeDecodeError
                _logger.warning("%s:%d is torn and left out", path, number)
    return entries
