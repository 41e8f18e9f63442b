"""Which runs the opened folders hold, and the name of each in an address."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainermon.exporters.store.query import is_run

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunPlace(NamedTuple):
    """A run that was found.

    Attributes:
        key: Its name in addresses, the same as long as it stays where it is.
        path: Its directory, absolute.
    """

    key: str
    path: Path


def find_places(opened: Sequence[Path]) -> list[RunPlace]:
    """Return the runs in `opened`, once each: a run, a folder of runs, or a folder of such folders.

    A link that leads out of an opened folder is left out: what is shown lies where the user has said. A folder that is
    gone, or may not be read, has no runs.
    """
    paths = dict.fromkeys(path for folder in opened for path in _runs_of(folder.absolute()))
    names = [_plain_name(path) for path in paths]
    return [
        RunPlace(name if names.count(name) == 1 else f"{name}-{_digest(path)}", path)
        for name, path in zip(names, paths, strict=True)
    ]


def _runs_of(folder: Path) -> list[Path]:
    if is_run(folder):
        return [folder]
    top = folder.resolve()
    inside = _folders_in(folder)
    runs = [path for path in inside if _lies_in(path, top)]
    if runs:  # what else lies beside runs may be large: checkpoints, data
        return runs
    return [path for each in inside if not each.is_symlink() for path in _folders_in(each) if _lies_in(path, top)]


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []


def _lies_in(path: Path, top: Path) -> bool:
    """Whether `path` is a run, and no link that leads out of `top`."""
    try:
        return is_run(path) and (not path.is_symlink() or path.resolve().is_relative_to(top))
    except OSError:
        return False


def _plain_name(path: Path) -> str:
    """Return the folder's name if it can stand in an address and in a command as it is, else a digest."""
    return path.name if _PLAIN.fullmatch(path.name) else f"run-{_digest(path)}"


def _digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:10]
