"""Reads what MindFormers' monitor has left: one array of numpy for each number, and event files of TensorBoard.

In graph mode the framework writes each norm and loss to a file `local_norm__<parameter>_<type>_<id>.npy`, and
`finish_step_<type>_<id>.npy` at the end of a step; before MindSpore 2.5 the id stood first. Their monitor removes the
files as it reads them, so what is there is what it did not come to. Nothing is removed here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainermon.core.errors import ConfigError, StoreError

_log = logging.getLogger(__name__)
_RANK = re.compile(r"rank_(\d{1,5})")
_METRIC = r"(?P<tag>finish_step|local_loss|device_local_norm|local_norm__(?P<parameter>.+?))"
_NEW_NAME = re.compile(rf"{_METRIC}_[A-Za-z]+\d+_(?P<id>\d+)")
_OLD_NAME = re.compile(rf"(?P<id>\d+)_{_METRIC}")
_END = "finish_step"


class DumpedNumber(NamedTuple):
    """One number of one step.

    Attributes:
        step: The step, as its file counts: arrays from 1, event files as MindFormers wrote them.
        tag: MindFormers' name of it, such as `local_norm/layers.0.wq.weight`.
        value: The number.
    """

    step: int
    tag: str
    value: float


class _NamedFile(NamedTuple):
    """A file of one number: what it is of, and its place in the order of writing."""

    number: int
    tag: str
    path: Path


def rank_folders(path: Path) -> dict[int, Path]:
    """Return the folders `rank_<r>` of `path` by rank.

    Raises:
        StoreError: There is none.
    """
    found = {int(name[1]): child for child in path.glob("rank_*") if (name := _RANK.fullmatch(child.name))}
    if not found:
        raise StoreError(
            f"{path}: found no folder such as rank_0; give the one above them (dump_path, tensorboard_dir)"
        )
    return dict(sorted(found.items()))


def read_folder(folder: Path) -> Iterator[DumpedNumber]:
    """Yield the numbers of one rank's folder: of its arrays by step and order of writing, then of its event files.

    Arrays behind the last end of a step belong to one that was not finished: they are left out, and that is logged, as
    is a file that cannot be read.

    Raises:
        ConfigError: There are event files, and the package tensorboard is not installed.
    """
    yield from _of_arrays(folder)
    yield from _of_events(sorted(folder.glob("**/events.*")))


def _of_arrays(folder: Path) -> Iterator[DumpedNumber]:
    step, waiting = 1, list[_NamedFile]()
    for file in sorted(_named_files(folder)):
        if file.tag != _END:
            waiting.append(file)
            continue
        yield from (DumpedNumber(step, one.tag, value) for one in waiting for value in _values(one.path))
        step, waiting = step + 1, []
    if waiting:
        _log.warning("%s: %d arrays of a step that was not finished are left out", folder, len(waiting))


def _named_files(folder: Path) -> Iterator[_NamedFile]:
    for path in folder.glob("*.npy"):
        name = _OLD_NAME.fullmatch(path.stem) or _NEW_NAME.fullmatch(path.stem)
        if name is not None:
            parameter = name["parameter"]
            tag = name["tag"] if parameter is None else f"local_norm/{parameter}"
            yield _NamedFile(int(name["id"]), tag, path)


def _values(path: Path) -> Iterator[float]:
    """Yield the number in a file, or nothing if there is none."""
    try:
        array = np.load(path, allow_pickle=False)
        yield float(np.asarray(array, np.float64).reshape(-1).mean())
    except (OSError, ValueError, EOFError, TypeError) as error:
        _log.warning("%s is left out: %s", path, error)


def _of_events(paths: Sequence[Path]) -> Iterator[DumpedNumber]:
    if not paths:
        return
    try:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    except ImportError as error:
        raise ConfigError(
            f"{paths[0]} needs the package tensorboard, which is not installed here: pip install tensorboard"
        ) from error
    for path in paths:
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    yield DumpedNumber(event.step, value.tag, value.simple_value)
