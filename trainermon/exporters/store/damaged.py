"""Segments that cannot be read are set aside, so that they cost what is in them and nothing else.

What an agent has stored may come back truncated or changed: after a full disk, a power cut, a copy. Its name then ends
in `.damaged`; nobody reads it any more, and whoever mends it takes the ending away again. A program that only reads
leaves such a file out and says so.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from trainermon.core.errors import StoreError
from trainermon.exporters.store.segments import DAMAGED, OtherFormatError, cover, is_whole, read_metadata

_log = logging.getLogger(__name__)


def set_aside_truncated(directory: Path) -> None:
    """Rename every live segment that has no end, and the newest ones until one can be read; 0.05 ms a segment.

    Inputs of a merge that are still there live again. Only the directory's writer, or whoever merges it, may do this.

    Raises:
        StoreError: A segment is of another release's format, or cannot be read for now: no permission, a file system
            that does not answer.
        OSError: The same, or it cannot be renamed.
    """
    while truncated := [segment.path for segment in cover(directory) if not is_whole(segment.path)]:
        for path in truncated:
            _rename(path)
    while live := cover(directory):
        if not set_aside_unreadable([live[-1].path]):
            return


def set_aside_unreadable(paths: Iterable[Path], read: Callable[[Path], object] = read_metadata) -> bool:
    """Rename the segments that `read` refuses with a StoreError for what is in them; return whether there were any.

    Raises:
        StoreError, OSError: As `set_aside_truncated`.
    """
    unreadable = [path for path in paths if _is_unreadable(path, read)]
    for path in unreadable:
        _rename(path)
    return bool(unreadable)


def damaged(directory: Path) -> list[Path]:
    """Return the segments of a directory that were renamed because they are damaged, sorted.

    [] if it does not exist.
    """
    return sorted(directory.glob(f"*.parquet{DAMAGED}"))


def _is_unreadable(path: Path, read: Callable[[Path], object]) -> bool:
    try:
        read(path)
    except StoreError as error:
        if isinstance(error.__cause__, OtherFormatError):
            raise
        if not os.path.lexists(path):  # merged into another one since it was listed
            return False
        if not _can_be_read(path):
            raise
        return True
    return False


def _rename(path: Path) -> None:
    path.rename(f"{path}{DAMAGED}")
    _log.error("%s is damaged and was set aside: its rows are missing in the store", path)


def _can_be_read(path: Path) -> bool:
    """Whether a file gives its bytes, or what stands in its place never will: a bad block, no file at all."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return True
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass
    except OSError as error:
        return error.errno == errno.EIO
    return True
