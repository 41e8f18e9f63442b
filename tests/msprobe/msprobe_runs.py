"""A small run whose tensors are known, as blocks with their series table."""

import dataclasses

import numpy as np

from tests.exporters.runs import block_of, header_of
from trainermon.core.values import Kind, Placement, SeriesKey

SHAPES = {"fc1.weight": (8, 4), "fc1.bias": (8,)}
RNG = np.random.default_rng(0)


def _keys():
    for name in SHAPES:
        for kind in (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.EXP_AVG, Kind.PARAM_UPDATED):
            yield SeriesKey(kind, name)
    for micro_step in (0, 1):
        for slot in ("input.0", "output.0"):
            yield SeriesKey(Kind.ACTV, "fc1", slot, micro_step=micro_step)
            yield SeriesKey(Kind.ACTV_GRAD, "fc1", slot, micro_step=micro_step)
        for slot in ("input.0", "input.mask", "output.0"):
            yield SeriesKey(Kind.ACTV, "attn", slot, micro_step=micro_step)
        yield SeriesKey(Kind.ACTV, "attn", "output.0", call=1, micro_step=micro_step, stage=1)
    yield SeriesKey(Kind.MG_DIRECTION, "fc1.weight")
    yield SeriesKey(Kind.LOSS, "loss")


KEYS = tuple(_keys())
PLACEMENTS = tuple(Placement(dtype="float32", shape=SHAPES[key.name]) if key.name in SHAPES else None for key in KEYS)


def header(*, rank=0, attempt=1, keys=KEYS, placements=PLACEMENTS):
    return dataclasses.replace(header_of(rank, attempt=attempt), series=keys, placements=placements, started_s=1.7e9)


def tensors(step):
    """Return the tensors of a step, by series; NaN and Inf in one each."""
    rng = np.random.default_rng(step)
    found = {key: rng.standard_normal(SHAPES.get(key.name, (3, 4))) for key in KEYS}
    found[SeriesKey(Kind.LOSS, "loss")] = rng.standard_normal(())
    found[SeriesKey(Kind.MG_DIRECTION, "fc1.weight")] = rng.choice([0.0, 1.0], (8, 4))
    found[SeriesKey(Kind.GRAD_REDUCED, "fc1.bias")][:3] = np.nan, np.inf, 0.0
    return found


def block(step, *, keys=KEYS):
    return block_of({key: tensor for key, tensor in tensors(step).items() if key in keys}, list(KEYS), step=step)
