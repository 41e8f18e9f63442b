"""One checkpoint looked at: its tensors with norm, NaN and Inf, and whether every element is there once."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trainermon.analysis.checkpoint.boxes import coverage, intersections
from trainermon.analysis.checkpoint.changes import refuse_changed, stamps_of
from trainermon.analysis.checkpoint.comparison import faults_of
from trainermon.analysis.checkpoint.pieces import Checkpoint, TensorPieces
from trainermon.analysis.checkpoint.placed import placed
from trainermon.analysis.checkpoint.sums import MappedFiles, sums_of
from trainermon.analysis.checkpoint.values import tensors_beside
from trainermon.analysis.checkpoint.verdicts import WEIGHTS
from trainermon.analysis.tensor.dtypes import storage_dtype
from trainermon.core.errors import CheckpointError
from trainermon.core.terminal.progress import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTensor:
    """A tensor of a checkpoint.

    Attributes:
        kind: `WEIGHTS`, the kind of optimizer state, or `OUTSIDE` and a key.
        name: Its name.
        shape: Of the whole.
        dtype: Torch's name.
        num_pieces: In how many pieces it lies.
        norm: Of its finite elements; None if it could not be read.
        nans: NaNs.
        infs: Infinities.
        faults: What is missing, or said twice and differently.
        notes: What its reader said.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    num_pieces: int
    norm: float | None = None
    nans: int = 0
    infs: int = 0
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its name, with the kind if it is none of the model's."""
        return self.name if self.kind == WEIGHTS else f"{self.kind}: {self.name}"

    @property
    def num_elements(self) -> int:
        """The product of the sizes."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """What the whole takes, without replicas."""
        return self.num_elements * storage_dtype(self.dtype).itemsize


def check_tensors(checkpoint: Checkpoint, part: str = "", *, jobs: int = 0) -> list[CheckedTensor]:
    """Return every tensor in whose name `part` is found, read once; replicas are compared.

    Memory does not grow with the checkpoint. `jobs` threads, 0: one per core.

    Raises:
        CheckpointError: a file was written while it was read.
    """
    local = threading.local()
    stamps = stamps_of([checkpoint])

    def check(work: tuple[str, TensorPieces]) -> CheckedTensor:
        files = local.__dict__.setdefault("files", MappedFiles())
        try:
            return _checked(files, *work)
        finally:
            files.let_go()

    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        chosen = [work for work in all_tensors(checkpoint) if part in work[1].name]
        found = list(counted(pool.map(check, chosen), len(chosen), "tensors"))
    refuse_changed(stamps)
    return found


def all_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, TensorPieces]]:
    """Yield each tensor of a checkpoint behind its kind, `WEIGHTS` first."""
    yield from ((WEIGHTS, tensor) for tensor in checkpoint.tensors.values())
    for kind, tensors in tensors_beside(checkpoint).items():
        yield from ((kind, tensor) for tensor in tensors.values())


def _checked(files: MappedFiles, kind: str, tensor: TensorPieces) -> CheckedTensor:
    faults: list[str] = []
    norm, nans, infs = None, 0, 0
    try:
        whole = placed(tensor)
        cover = coverage(whole.views, whole.shape)
        sums = sums_of(files, [pair for view in cover.views for pair in intersections([view], [view])])
        norm, nans, infs = sums.our_norm, sums.our_nans, sums.our_infs
        faults += faults_of(files, cover, whole)
    except CheckpointError as error:
        faults.append(str(error))
    return CheckedTensor(
        kind=kind,
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        num_pieces=len(tensor.pieces),
        norm=norm,
        nans=nans,
        infs=infs,
        faults=tuple(faults),
        notes=tensor.notes,
    )
