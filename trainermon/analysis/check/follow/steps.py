"""The steps in the folder that a training dumps into: which can be judged, and where they go when they are.

    FOLDER/step40/rank0                     written by the training; this process only reads it
    FOLDER/kept/step40                      a call in it is wrong
    FOLDER/.judged-step40-20260131120000    judged and not kept: it is being deleted

A step leaves its place by one rename, so a kill at any moment leaves it whole, there or here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainermon.core.errors import DumpError
from trainermon.core.private_files import make_private_folder
from trainermon.dump.files.records import DUMP_FILE, INFO_FILE, LINES_BYTES, PARTIAL_FILE
from trainermon.dump.files.waiting import is_closed, ranks_of, waiting_steps

KEPT_FOLDER = "kept"
_DELETING = ".judged-"
_IS_DELETED = re.compile(r"\.judged-step\d{1,18}-\d{14}", re.ASCII)
_STAMP = "%Y%m%d%H%M%S"


@dataclasses.dataclass(frozen=True, slots=True)
class DumpedStep:
    """A step whose ranks have all finished its dump.

    Attributes:
        path: Its folder.
        ranks: Those of its ranks.
        stamp: When the last of them was finished, as in the names of msprobe's files.
        identity: Tells it from another dump of the step with the same number.
        link: A link or a device that lies in it, which is not followed; None: there is none.
    """

    path: Path
    ranks: tuple[Path, ...]
    stamp: str
    identity: str
    link: Path | None

    @property
    def name(self) -> str:
        """`step40`."""
        return self.path.name


class StepFolder:
    """The folder that a training dumps into.

    Args:
        path: The folder.
        num_ranks: How many ranks a step has; None: as many as its dumps say.
        settle_s: A step with fewer is taken as it is when so long nothing has been added to it.
        is_final: No process writes there any more: what was put in place counts, even if no `step()` followed.

    Attributes:
        left: Identities of steps that stay where they are, and are not looked at again.
    """

    def __init__(self, path: Path, *, num_ranks: int | None, settle_s: float, is_final: bool) -> None:
        self.path = path
        self.left: set[str] = set()
        self._num_ranks, self._settle_s, self._is_final = num_ranks, settle_s, is_final

    def ready(self) -> Iterator[DumpedStep]:
        """Yield the steps that are complete, by number.

        Raises:
            DumpError: The folder cannot be read.
        """
        try:
            for path in waiting_steps(self.path):
                step = self._complete(path)
                if step is not None:
                    yield step
        except OSError as error:
            raise DumpError(f"cannot read {self.path}: {error}") from error

    def num_waiting(self) -> int:
        """Return how many steps are there, complete or not."""
        return len(waiting_steps(self.path))

    def kept_name(self, step: DumpedStep) -> str:
        """Return the place below the folder that the step will have if it is kept."""
        name = f"{KEPT_FOLDER}/{step.name}"
        return f"{name}-{step.stamp}" if os.path.lexists(self.path / name) else name

    def num_kept(self) -> int:
        """Return how many steps are kept."""
        folder = self.path / KEPT_FOLDER
        return len(os.listdir(folder)) if folder.is_dir() else 0

    def keep(self, step: DumpedStep, name: str) -> None:
        """Move the step to its place among those that are kept.

        Raises:
            OSError: The file system refuses.
        """
        folder = self.path / KEPT_FOLDER
        if folder.is_symlink():
            raise PermissionError(f"{folder} is a link, expected a folder: it may lead anywhere")
        make_private_folder(folder)
        step.path.rename(self.path / name)

    def delete(self, step: DumpedStep) -> None:
        """Delete the step.

        Raises:
            OSError: The file system refuses.
        """
        doomed = self.path / f"{_DELETING}{step.name}-{step.stamp}"
        step.path.rename(doomed)
        shutil.rmtree(doomed)

    def finish_deleting(self) -> None:
        """Delete what a process that was killed has left of judged steps.

        Raises:
            OSError: The file system refuses.
        """
        for name in os.listdir(self.path):
            path = self.path / name
            if _IS_DELETED.fullmatch(name) and stat.S_ISDIR(path.lstat().st_mode):
                shutil.rmtree(path)

    def _complete(self, path: Path) -> DumpedStep | None:
        ranks = ranks_of(path)
        if not ranks or not all(map(self._is_closed, ranks)):
            return None
        states = [(rank / DUMP_FILE).lstat() for rank in ranks]
        signs = [f"{rank.name} {one.st_mtime_ns} {one.st_size}" for rank, one in zip(ranks, states, strict=True)]
        identity = hashlib.sha256("\n".join([path.name, *signs]).encode()).hexdigest()[:16]
        if identity in self.left:
            return None
        newest_s = max(state.st_mtime for state in states)
        link = _first_link(path)
        wanted = len(ranks) if link is not None else self._num_ranks or _world_size(ranks[0])
        if len(ranks) < wanted and not self._is_final and abs(time.time() - newest_s) < self._settle_s:
            return None
        return DumpedStep(path, tuple(ranks), time.strftime(_STAMP, time.localtime(newest_s)), identity, link)

    def _is_closed(self, rank: Path) -> bool:
        return is_closed(rank) or (self._is_final and (rank / DUMP_FILE).is_file() and not _is_behind(rank))


def _first_link(path: Path) -> Path | None:
    """Return a link in the folder of a step, or something else that is neither file nor folder; None: there is none."""
    for folder, folders, files in os.walk(path):
        for name in folders + files:
            found = Path(folder, name)
            mode = found.lstat().st_mode
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                return found
    return None


def info_of(rank: Path) -> dict[str, Any]:
    """Return the facts on the dump of a rank; {} if it has none, as msprobe's, or they cannot be read."""
    try:
        found = json.loads((rank / INFO_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _world_size(rank: Path) -> int:
    """Return how many ranks dump their part of a step, as far as the dump of one of them says; else 1."""
    try:
        axes = info_of(rank)["layout"]["axes"]
        return math.prod(int(size) for axis, (_, size) in axes.items() if axis != "ep")  # ep divides dp
    except (KeyError, TypeError, ValueError, AttributeError):
        return 1


def _is_behind(rank: Path) -> bool:
    """Return whether the final files do not have all that was recorded."""
    lines = info_of(rank).get(LINES_BYTES)
    partial = rank / PARTIAL_FILE
    return not isinstance(lines, int) or partial.stat().st_size > lines
