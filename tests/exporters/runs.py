"""Made-up runs: series tables, and blocks whose moments numpy computes from whole tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from trainermon.core.catalogue import LOSS_SERIES, STEP_TIME_SERIES
from trainermon.core.journal import Header
from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey, StatBlock

LOSS = SeriesKey(Kind.LOSS, LOSS_SERIES)
SLOTS = {
    Kind.ACTV: "output.0",
    Kind.ACTV_GRAD: "output.0",
    Kind.COMM: "post.0",
    Kind.FEATURE: "spectral_norm",
    Kind.STATE: "momentum_buffer",
}
RECORDED = SeriesKey(Kind.STEP, "learning_rate")  # by the script: the rank's own have a slot
STEP_TIME = SeriesKey(Kind.STEP, STEP_TIME_SERIES)


def header_of(rank: int = 0, *, world_size: int = 2, local_world_size: int = 2, attempt: int = 1) -> Header:
    place = Coordinates(rank=rank, world_size=world_size, local_world_size=local_world_size, dp=rank)
    return Header(run_id="run", attempt=attempt, coordinates=place, host="node", pid=1, started_s=0.0, version="1 0.1")


def moments_of(elements: np.ndarray) -> np.ndarray:
    finite = elements[np.isfinite(elements)].astype(np.float64)
    smallest, largest = (finite.min(), finite.max()) if finite.size else (np.inf, -np.inf)
    nans, infs = np.isnan(elements).sum(), np.isinf(elements).sum()
    zeros = (elements == 0).sum()
    return np.array([elements.size, smallest, largest, finite.sum(), np.square(finite).sum(), zeros, nans, infs])


def block_of(tensors: Mapping[SeriesKey, np.ndarray], keys: Sequence[SeriesKey], *, step: int = 0) -> StatBlock:
    series = np.array([keys.index(key) for key in tensors], dtype=np.uint32)
    values = np.ascontiguousarray(np.array([moments_of(np.asarray(t)) for t in tensors.values()], dtype=np.float64).T)
    return StatBlock(step=step, time_s=1.7e9 + step, series=series, values=values)


@dataclasses.dataclass(frozen=True)
class LargeRun:
    """One rank's table of a GPT-like model with `num_layers`, 9 tensors a layer, for each of `kinds`, and `others`."""

    num_layers: int
    kinds: Sequence[Kind] = (Kind.GRAD_REDUCED, Kind.PARAM_ORIGIN, Kind.EXP_AVG)
    others: Sequence[SeriesKey] = (RECORDED,)

    def keys(self) -> list[SeriesKey]:
        slots = {kind: SLOTS.get(kind, "") for kind in self.kinds}
        return [
            LOSS,
            STEP_TIME,
            *self.others,
            *(SeriesKey(kind, name, slots[kind]) for kind in slots for name in self._sizes()),
        ]

    def placements(self) -> list[Placement | None]:
        sizes = self._sizes().values()
        shown_alone = [None] * (2 + len(self.others))
        return [*shown_alone, *(Placement(dtype="bfloat16", shape=(size,)) for _ in self.kinds for size in sizes)]

    def block(self, *, step: int = 0, seed: int = 0) -> StatBlock:
        size = len(self.keys())
        values = np.random.default_rng(seed).random((8, size))
        values[0] = 1000.0
        values[6:] = 0.0
        return StatBlock(step=step, time_s=1.7e9 + step, series=np.arange(size, dtype=np.uint32), values=values)

    def _sizes(self) -> dict[str, int]:
        sizes = {f"self_attn.{name}_proj.weight": 8192 * 8192 for name in "qkvo"}
        sizes |= {f"mlp.{name}_proj.weight": 8192 * 28672 for name in ("gate", "up", "down")}
        sizes |= {"input_layernorm.weight": 8192, "post_attention_layernorm.weight": 8192}
        layers = {f"model.layers.{i}.{name}": size for i in range(self.num_layers) for name, size in sizes.items()}
        ends = {"model.norm.weight": 8192, "lm_head.weight": 1 << 30}
        return {"model.embed_tokens.weight": 1 << 30, **layers, **ends}
