"""Steps that wait in the folder of the dumps for whoever judges and deletes them. Standard library only."""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainermon.dump.files.records import DUMP_FILE, PARTIAL_FILE

STEP_FOLDER = re.compile(r"step(\d{1,18})", re.ASCII)
RANK_FOLDER = re.compile(r"rank(\d{1,9})", re.ASCII)


def waiting_steps(folder: Path) -> list[Path]:
    """Return the folders `step<N>` in the folder of the dumps, by number; links are left out. [] if it is not there."""
    return _numbered(folder, STEP_FOLDER)


def ranks_of(step: Path) -> list[Path]:
    """Return the folders `rank<R>` of a step, by number; links are left out."""
    return _numbered(step, RANK_FOLDER)


def is_closed(directory: Path) -> bool:
    """Return whether a rank is done with the dump of its step: its last rename is made, its partial file removed."""
    return (directory / DUMP_FILE).is_file() and not (directory / PARTIAL_FILE).exists()


def has_room(folder: Path, step: Path, max_pending: int) -> bool:
    """Return whether a rank may dump `step` in `folder`, where at most `max_pending` steps wait; 0: no limit.

    A step that another rank has begun has its place already. Cost: the folder is listed once.
    """
    if not max_pending or step.is_dir():
        return True
    return len(waiting_steps(folder)) < max_pending


def _numbered(folder: Path, name: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    numbers = {int(match[1]): Path(entry.path) for entry in found if (match := name.fullmatch(entry.name))}
    return [numbers[number] for number in sorted(numbers)]
