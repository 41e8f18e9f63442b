"""Whether files may have come or gone in a folder, without a listing of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

_AT_LEAST_S = 1.0
_SETTLED_NS = 50_000_000  # five times the longest tick of a kernel, by which it counts the times of files


class FolderNames:
    """Tells whether files may have come or gone in a folder: one system call, where a listing costs all the names.

    The time of a folder's last change tells it. While that is younger than what its clock can tell apart, and once a
    second in any case, names count as changed.

    Attributes:
        version: Another number whenever names may have changed, as of the last `look`.
    """

    def __init__(self, folder: Path) -> None:
        self.version = 0
        self._folder = folder
        self._seen: tuple[int, int, int] | None = None
        self._next_s = 0.0

    def look(self) -> None:
        """Look at the folder, and bring `version` up to date."""
        now_s = time.monotonic()
        seen = self._look()
        is_settled = seen is not None and time.time_ns() - seen[2] > _SETTLED_NS
        if seen != self._seen or not is_settled or now_s >= self._next_s:
            self.version += 1
            self._next_s = now_s + _AT_LEAST_S
        self._seen = seen

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._folder)
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_mtime_ns
