"""Whether files were written while they were read, so that what was found is of no one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainermon.analysis.checkpoint.pieces import Checkpoint
from trainermon.core.errors import CheckpointError

Stamps = Mapping[Path, tuple[int, int] | None]
"""Size and time of last change of files; None of one that is gone."""


def stamps_of(checkpoints: Iterable[Checkpoint]) -> Stamps:
    """Return the stamps of all files that hold tensors of checkpoints."""
    files = {
        file
        for checkpoint in checkpoints
        for tensors in (checkpoint.tensors, *checkpoint.optimizer.values())
        for tensor in tensors.values()
        for file in tensor.files
    }
    return {file: _stamp(file) for file in files}


def refuse_changed(before: Stamps) -> None:
    """Do nothing if all files are as they were.

    Raises:
        CheckpointError: one has been written to, or is gone.
    """
    changed = sorted(file for file, stamp in before.items() if _stamp(file) != stamp)
    if changed:
        raise CheckpointError(
            f"{changed[0]} was written while it was read: wait until the checkpoint is complete, then do this again"
        )


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
