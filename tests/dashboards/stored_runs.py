"""Made-up runs as they lie on disk: written by the store's own writer, with numbers that a test knows.

`python -m tests.dashboards.stored_runs DIR [COUNT]` writes some, for looking at `trainermon serve DIR`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.exporters.runs import LOSS, STEP_TIME, header_of
from trainermon.core.catalogue import TOKENS_PER_SECOND_SERIES, TOKENS_SERIES
from trainermon.core.journal import Header
from trainermon.core.values import Alert, AlertState, Kind, Placement, SeriesKey, Severity, StatBlock, as_plain
from trainermon.exporters.store.store import SegmentWriter

Floats = npt.NDArray[np.float64]

LAYERS = ("wte.weight", "h.0.attn.weight", "h.0.mlp.weight", "h.1.attn.weight", "h.1.mlp.weight", "ln_f.weight")
MODULES = ("", "wte", "h", "h.0", "h.0.attn", "h.0.mlp", "h.1", "h.1.attn", "h.1.mlp", "ln_f")
GRADIENTS = tuple(SeriesKey(Kind.GRAD_REDUCED, name) for name in LAYERS)
NUMBERS = (LOSS, STEP_TIME, SeriesKey(Kind.STEP, TOKENS_SERIES), SeriesKey(Kind.STEP, TOKENS_PER_SECOND_SERIES))
KEYS = (*NUMBERS, *GRADIENTS)
TOKENS = 4096.0
ELEMENTS = 1000


@dataclasses.dataclass(frozen=True)
class StoredCurves:
    """What every rank recorded, by step from 0: loss, unless it `has_none`, and the rms of every gradient."""

    loss: Floats
    rms: Floats
    started_s: float = 1.79e9
    has_none: bool = False

    @classmethod
    def made(cls, num_steps: int, *, seed: int = 0, started_s: float = 1.79e9) -> StoredCurves:
        random = np.random.default_rng(seed)
        place = np.arange(num_steps) / max(1, num_steps)
        loss = 2.2 + 6 * np.exp(-5 * place) + 0.06 * random.standard_normal(num_steps) + 0.1 * (seed % 7)
        return cls(loss, np.exp(-3 - 2 * place + 0.2 * random.standard_normal(num_steps)), started_s)

    def block(self, step: int, *, rank: int = 0) -> StatBlock:
        loss, rms = self.loss[step], self.rms[step]
        rows = [_one(loss), _one(0.4 + 0.01 * rank), _one(TOKENS), _one(TOKENS / 0.4)]
        rows += [_gradient(rms) for _ in GRADIENTS]
        first = int(self.has_none)
        series = np.arange(first, len(KEYS), dtype=np.uint32)
        values = np.array(rows[first:]).T.copy()
        return StatBlock(step=step, time_s=self.started_s + 0.4 * (step + 1), series=series, values=values)


def header(rank: int = 0, *, world_size: int = 2, attempt: int = 1, started_s: float = 1.79e9) -> Header:
    placements = tuple(Placement(dtype="float32", shape=(ELEMENTS,), in_global_norm=rank == 0) for _ in KEYS)
    made = header_of(rank, world_size=world_size, local_world_size=world_size, attempt=attempt)
    return dataclasses.replace(made, series=KEYS, placements=placements, started_s=started_s)


def store_run(
    run: Path,
    curves: StoredCurves,
    *,
    world_size: int = 2,
    segments: int = 2,
    tags: Sequence[str] = (),
    alerts: Sequence[Alert] = (),
    is_up: bool = False,
) -> Path:
    """Write a run as ranks and agent leave it; `is_up`: with the address of an agent that has not ended."""
    node = run / "nodes" / "node-a"
    (run / "ranks").mkdir(parents=True)
    for steps in np.array_split(np.arange(len(curves.loss)), segments):
        add_segment(run, curves, steps.tolist(), world_size=world_size)
    about: dict[str, Any] = {"run_id": run.name, "attempt": 1, "started_s": curves.started_s, "world_size": world_size}
    (run / "run.json").write_text(json.dumps({**about, "version": "0", "config": {"tags": list(tags)}}))
    for rank in range(world_size):
        told = {"rank": rank, "framework": "plain", "parameters": 6000, "modules": MODULES, "bytes_per_step": 680}
        (run / "ranks" / f"rank{rank:05d}.json").write_text(json.dumps(told))
    (node / "alerts.jsonl").write_text("".join(json.dumps(as_plain(alert)) + "\n" for alert in alerts))
    (node / "prometheus_sd.json").write_text(json.dumps([{"targets": ["node-a:1"]}] if is_up else []))
    return run


def add_segment(run: Path, curves: StoredCurves, steps: Sequence[int], *, world_size: int = 2) -> None:
    """Commit one more segment with these steps."""
    writer = SegmentWriter(run / "nodes" / "node-a" / "segments")
    headers = [header(rank, world_size=world_size, started_s=curves.started_s) for rank in range(world_size)]
    for step in steps:
        for rank, made in enumerate(headers):
            writer.add(made, KEYS, curves.block(step, rank=rank))
    writer.commit({})


def alert_of(**changes: Any) -> Alert:
    """Return an alert that fires since step 3; `changes` are fields of it."""
    usual = Alert(
        id="alert-1",
        rule="gradient-nonfinite",
        severity=Severity.CRITICAL,
        state=AlertState.FIRING,
        attempt=1,
        rank=0,
        step=3,
        first_step=3,
        time_s=1.79e9,
        kind=Kind.GRAD_REDUCED,
        value=12.0,
        baseline=0.0,
        num_series=1,
        findings=(),
        message="12 gradients are not finite",
    )
    return dataclasses.replace(usual, **changes)


def _one(value: float) -> list[float]:
    if np.isnan(value):
        return [1, np.inf, -np.inf, 0, 0, 0, 1, 0]
    return [1, value, value, value, value**2, 0, 0, 0]


def _gradient(rms: float) -> list[float]:
    if not np.isfinite(rms):
        return [ELEMENTS, np.inf, -np.inf, 0, 0, 0, 0, ELEMENTS]
    return [ELEMENTS, -rms, rms, 0, ELEMENTS * rms**2, 0, 0, 0]


def main() -> None:
    folder, count = Path(sys.argv[1]), int((sys.argv[2:] or ["12"])[0])
    names = ("gpt-124m-base", "gpt-124m-lr-6e-4", "gpt-124m-warmup", "llama-1b-fsdp", "moe-8x7b-ep", "grpo-math")
    for number in range(count):
        name = f"{names[number % len(names)]}-{number:03d}"
        curves = StoredCurves.made(400 + 100 * (number % 5), seed=number, started_s=1.79e9 - 86_400 * number / 3)
        if number % 6 == 2:
            curves.loss[300:] = np.nan
        store_run(folder / name, curves, tags=("baseline", "sweep-7")[: number % 3], is_up=number == 0)


if __name__ == "__main__":
    main()
