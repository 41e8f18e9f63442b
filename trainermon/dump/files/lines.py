"""The file that a dump grows in: JSON lines, appended in blocks, and where the value of each entry stands in it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from trainermon.core.errors import DumpError
from trainermon.core.private_files import open_private
from trainermon.dump.forms import json_text

# Lines that wait to be formatted and written: what a killed process may lose. In a block they cost a third of what they
# do one by one between the kernels of training, where nothing of ours is in the processor's caches.
MAX_WAITING = 512
MAX_WAIT_S = 0.25

# Where a value stands: its first byte and its size.
Places = dict[str, tuple[int, int]]


# Head, value, places and key of a line: with places, the text of the value and a brace follow the head, and where that
# text stands is noted under the key. A bare tuple: thousands of them are made between the kernels of a step.
_WaitingLine = tuple[str, Any, Places | None, str]


class LineFile:
    """Appends the lines of a dump to the file at `path`, which it creates (0600) or empties.

    Lines wait in memory for `max_wait_s` seconds at most (None: the default), and are formatted as JSON when they are
    written. What was flushed survives the death of the process, not that of the machine: nothing is synchronised to the
    disk.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, path: Path, max_wait_s: float | None = None) -> None:
        self.num_bytes = 0
        self._max_wait_s = MAX_WAIT_S if max_wait_s is None else max_wait_s
        self._path = path
        self._file = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._waiting: list[_WaitingLine] = []
        self._flushed_s = time.monotonic()

    @property
    def is_waiting(self) -> bool:
        """Whether there are lines that were not flushed to the file yet."""
        return bool(self._waiting)

    def put(self, head: str, value: Any = None, places: Places | None = None, key: str = "") -> bool:
        """Add a line to those that wait for `flush`.

        Return whether they are to be flushed now: they are too many, or the last flush was `max_wait_s` ago.

        Args:
            head: The beginning of the line, or without `places` the whole line.
            value: What follows it as JSON; a closing brace ends the line.
            places: Receives (first byte, number of bytes) of the value in the file, under `key`, once it is written.
            key: The name of the value in `places`.
        """
        waiting = self._waiting
        waiting.append((head, value, places, key))
        return len(waiting) >= MAX_WAITING or time.monotonic() - self._flushed_s >= self._max_wait_s

    def flush(self) -> list[Exception]:
        """Write all waiting lines.

        Return the errors of lines whose value cannot be written as JSON, which are left out.

        Raises:
            DumpError: The disk is full; the waiting lines are lost, what is in the file already stays readable.
        """
        self._flushed_s = time.monotonic()
        waiting, self._waiting = self._waiting, []
        texts: list[str] = []
        found: list[tuple[Places, str, tuple[int, int]]] = []
        errors: list[Exception] = []
        position = self.num_bytes
        for head, value, places, key in waiting:
            if places is None:
                text = f"{head}\n"
            else:
                try:
                    body = json_text(value)
                except (TypeError, ValueError) as error:
                    errors.append(error)
                    continue
                found.append((places, key, (position + len(head), len(body))))
                text = f"{head}{body}}}\n"
            texts.append(text)
            position += len(text)
        self._write("".join(texts).encode("ascii"), len(waiting))
        for places, key, place in found:
            places[key] = place
        return errors

    def text(self) -> str:
        """Read back what was flushed: in it stand the values, at the places that `put` was given a dict for."""
        return self._path.read_text(encoding="ascii")

    def close(self) -> None:
        """Close the file; lines that were not flushed are lost."""
        os.close(self._file)

    def _write(self, block: bytes, num_lines: int) -> None:
        try:
            written = os.write(self._file, block) if block else 0
        except OSError as error:
            raise DumpError(f"{num_lines} entries in {self._path.parent} are lost: {error}") from error
        if written < len(block):
            os.ftruncate(self._file, self.num_bytes)
            os.lseek(self._file, self.num_bytes, os.SEEK_SET)
            raise DumpError(f"no space left for {num_lines} entries in {self._path.parent}")
        self.num_bytes += written
