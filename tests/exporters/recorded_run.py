"""A recorded run, stored as an agent stores it: two ranks, tensors that numpy knows, one step with no finite loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.exporters.expositions import comm, step
from tests.exporters.runs import LOSS, STEP_TIME, block_of, header_of
from tests.statistics.histogram_truth import numpy_histogram
from trainermon.core.journal import Header
from trainermon.core.values import BlockHistograms, Kind, Placement, SeriesKey, StatBlock
from trainermon.exporters.store.store import SegmentWriter

NAMES = ("h.0.attn.weight", "h.0.mlp.weight", "h.1.attn.weight", "h.1.mlp.weight")
GRADIENTS = tuple(SeriesKey(Kind.GRAD_REDUCED, name) for name in NAMES)
PARAMETERS = tuple(SeriesKey(Kind.PARAM_ORIGIN, name) for name in NAMES)
FEATURE = SeriesKey(Kind.FEATURE, "h.0.attn", "attention_entropy")
SCALARS = (step("global_grad_norm"), step("loss_scale"), step("learning_rate", "0"), step("accuracy"))
GROUPS = ("dp_cp", "mp", "embedding", "world")
COLLECTIVES = tuple(comm(group, slot) for group in GROUPS for slot in ("sequence", "in_flight"))
KEYS = (LOSS, STEP_TIME, *SCALARS, *GRADIENTS, *PARAMETERS, FEATURE, *COLLECTIVES)
BAD_STEP = 3
FIRST_TIME_S = 1.7e9  # as `block_of` dates step 0


def tensors_of(rank: int, number: int) -> dict[SeriesKey, np.ndarray]:
    """Return the tensors of a step of a rank; the loss of rank 1 at `BAD_STEP` is NaN, and part of a gradient."""
    random = np.random.default_rng([rank, number])
    found = {key: random.normal(size=(6, 5)) * 10.0 ** random.integers(-8, 3) for key in KEYS}
    found |= {key: random.random(1) for key in (LOSS, STEP_TIME, *SCALARS)}
    found |= {key: np.array([float(number)]) for key in COLLECTIVES}
    if (rank, number) == (1, BAD_STEP):
        found[LOSS] = np.array([np.nan])
        found[GRADIENTS[1]][0, :2] = np.inf, np.nan
    return found


def header(rank: int, *, attempt: int = 1) -> Header:
    """Return what the journal of a rank begins with; rank 1 holds copies."""
    placements = [Placement(dtype="float32", shape=(6, 5), in_global_norm=rank == 0) for _ in KEYS]
    made = header_of(rank, attempt=attempt)
    return dataclasses.replace(made, series=KEYS, placements=tuple(placements), started_s=FIRST_TIME_S)


def block(rank: int, number: int, *, keys: Sequence[SeriesKey] = KEYS) -> StatBlock:
    """Return a step of a rank as it stands in its journal."""
    tensors: Mapping[SeriesKey, np.ndarray] = tensors_of(rank, number)
    return block_of({key: tensors[key] for key in keys}, list(KEYS), step=number)


def commit(segments: Path, steps: Sequence[int], *, ranks: Sequence[int] = (0, 1), attempt: int = 1) -> None:
    """Add one segment with these steps of the run."""
    writer = SegmentWriter(segments)
    for number in steps:
        for rank in ranks:
            writer.add(header(rank, attempt=attempt), KEYS, block(rank, number))
    writer.seal({}).write()


def counted_run(run_dir: Path, steps: Sequence[int]) -> None:
    """Store these steps of the run, in which every gradient has a histogram, as one segment."""
    segments = run_dir / "nodes" / "host-a" / "segments"
    segments.mkdir(parents=True)
    writer = SegmentWriter(segments)
    places = np.array([KEYS.index(key) for key in GRADIENTS], np.uint32)
    for number in steps:
        for rank in (0, 1):
            counts = np.array([numpy_histogram(tensors_of(rank, number)[key].ravel()) for key in GRADIENTS])
            histograms = BlockHistograms(places=places, counts=counts.astype(np.uint32))
            writer.add(header(rank), KEYS, dataclasses.replace(block(rank, number), histograms=histograms))
    writer.seal({}).write()
