"""Made-up runs: everything that the page can ask an agent for, without any training."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.rules import load_rules
from trainermon.analysis.diagnosis.findings import (
    BadParameter,
    BadTensor,
    Contrast,
    Diagnosis,
    DiagnosisVerdict,
    FaultPhase,
    LevelFinding,
    NextCollection,
    PathLink,
    PlaceLevel,
    RankFinding,
    RankRole,
)
from trainermon.core.errors import QueryError
from trainermon.core.values import Alert, AlertState, Finding, Kind, SeriesKey, Severity, as_plain, measured_as_plain
from trainermon.dump.files.verdicts import NonfiniteCause, OperationVerdict, Reproducibility
from trainermon.exporters.heat_rows import statistics_of
from trainermon.exporters.store.curves import Curve, CurveLine, CurveQuery

MEASURES = ("global_grad_norm", "learning_rate", "clip_ratio", "loss_scale", "skipped", "tokens_per_second")
FAULT_STEP = 1640
DUMP = {"id": "gradient-nonfinite-1-1640", "attempt": 1, "step": FAULT_STEP}
DIAGNOSIS_URL = "/api/diagnosis/gradient-nonfinite-1-1640/1/1640"


def layer_names(num_blocks: int) -> list[str]:
    """Return the weights of a GPT in the order of its definition: 4 per block and 4 more."""
    parts = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight")
    blocks = [f"h.{block}.{part}" for block in range(num_blocks) for part in parts]
    return ["wte.weight", "wpe.weight", *blocks, "ln_f.weight", "head.weight"]


class Run:
    """The state of a run as plain attributes, which a test changes at will.

    Steps count from 1. As in the agent, NaN says that nothing was recorded and infinity that something was not finite.
    """

    def __init__(self, *, num_steps: int = 2000, num_blocks: int = 48, world_size: int = 8) -> None:
        random = np.random.default_rng(0)
        time_ = np.arange(num_steps) / 2000
        noise = random.standard_normal((3, num_steps))
        self.run_id = "gpt-124m-byte"
        self.state = "running"
        self.rows = layer_names(num_blocks)
        self.ranks = [f"rank {rank}" for rank in range(world_size)]
        self.loss = 2.2 + 8.4 * np.exp(-5.2 * time_) + 0.055 * noise[0] * (1 + np.exp(-4 * time_))
        self.grad_norm = (0.55 + 6 * np.exp(-9 * time_)) * np.exp(0.16 * noise[1])
        self.step_time = 0.412 + 0.012 * noise[2]
        self.heat = self._heat(random)
        self.rank_time = self.step_time * np.exp(0.015 * random.standard_normal((world_size, num_steps)))
        self.alerts: list[dict[str, Any]] = []
        self.dumps: list[dict[str, Any]] = []
        self.diagnoses: dict[str, dict[str, Any]] = {}
        self.dead: set[int] = set()
        self.kinds = ["grad_reduced", "param_updated", "actv"]
        self.stored: Path | None = None  # a run directory: curves are read from it
        self.rank_quantities = ["step_time", "loss", "grad_norm", "lag"]

    @property
    def num_steps(self) -> int:
        """Number of steps so far."""
        return len(self.loss)

    def _heat(self, random: np.random.Generator) -> NDArray[np.float32]:
        shape = (len(self.rows), self.num_steps)
        depth = np.linspace(0, 1, shape[0])[:, None]
        time_ = np.linspace(0, 1, shape[1])[None, :]
        own = 0.5 * random.standard_normal((shape[0], 1)) + 0.35 * (np.arange(shape[0]) % 4)[:, None]
        walk = 0.004 * np.cumsum(random.standard_normal(shape), axis=1)
        noise = 0.18 * random.standard_normal(shape)
        return np.exp(-7.2 - 1.6 * depth + 2.6 * np.exp(-8 * time_) + own + walk + noise).astype(np.float32)

    def measure(self) -> None:
        """Have everything that a framework may tell of a step, and what is collected only when asked."""
        steps = np.arange(self.num_steps)
        self.global_grad_norm = self.grad_norm.copy()
        self.learning_rate = 3e-4 * np.minimum(1, (steps + 1) / 100) * (1 - 0.9 * steps / self.num_steps)
        self.clip_ratio = np.minimum(1, 1 / self.grad_norm)
        self.skipped = (steps % 777 == 500).astype(np.float64)
        self.loss_scale = 65536 / 2 ** np.cumsum(self.skipped)
        self.tokens_per_second = 524_288 / self.step_time
        self.kinds += ["state/momentum_buffer", "mg_direction", "comm/wait_seconds", "feature/attention_max_logit"]
        self.rank_quantities.append("wait")

    def slow_rank(self, rank: int, first: int, last: int) -> None:
        """Make a rank a third slower for some steps."""
        self.rank_time[rank, first - 1 : last] *= 1.33

    def spike(self, step: int) -> None:
        """Let the gradients of the later half jump, and the loss with them."""
        first, length = step - 1, 22
        decay = np.exp(-np.arange(length) / 6)
        self.loss[first : first + length] += 1.9 * decay
        self.grad_norm[first : first + length] *= 1 + 9 * decay
        self.heat[len(self.rows) * 5 // 9 :, first : first + length] *= 1 + 11 * decay[None, :]

    def fault(self, step: int) -> None:
        """Let nothing be finite any more after the gradients of `step` upstream of block 23 are not."""
        self.grad_norm[step - 1 :] = math.inf
        self.heat[: len(self.rows) // 2, step - 1] = math.inf
        self.heat[:, step:] = math.inf
        self.loss[step:] = math.inf

    def summary(self) -> dict[str, Any]:
        """Return the newest step as the step event has it."""
        known = self.num_steps > 0
        values = {
            "loss": float(self.loss[-1]) if known else math.nan,
            "grad_norm": float(self.grad_norm[-1]) if known else math.nan,
            "step_time_s": float(self.step_time[-1]) if known else math.nan,
        }
        values |= {name: float(getattr(self, name)[-1]) for name in MEASURES if known and hasattr(self, name)}
        plain = {name: measured_as_plain(value) for name, value in values.items()}
        return {"step": self.num_steps if known else None, "time_s": time.time(), **plain}

    def describe(self) -> dict[str, Any]:
        """Return the answer of /api/run."""
        ranks = [
            {"rank": rank, "alive": rank not in self.dead, "step": self.num_steps, "phase": "step", "lag_s": 0.03}
            for rank in range(len(self.ranks))
        ]
        return {
            **self.summary(),
            "run_id": self.run_id,
            "attempt": 1,
            "host": "node-07",
            "state": self.state,
            "started_s": 1_785_000_000.0,
            "world_size": len(ranks),
            "output": f"/data/runs/{self.run_id}",
            "ranks": ranks,
            "alerts_firing": sum(entry["state"] == "firing" for entry in self.alerts),
            "bytes_per_step": 192_000,
            "skipped_records": 0,
            "lag_s": 0.04,
            "version": "0.1.0",
            "rules": 9,
            "problem": None,
            "takes_orders": True,
            "diagnosis_pages": True,
            "model": {"parameters": 124_439_808, "is_whole": True},
            "heatmaps": [{"kind": kind, "statistics": list(statistics_of(kind))} for kind in self.kinds],
            "rank_quantities": self.rank_quantities,
        }

    def lines(self, names: list[str]) -> dict[str, Any]:
        """Return the answer of /api/lines."""
        nothing = np.empty(0)
        series = {
            name: [None if math.isnan(value) else value for value in getattr(self, name, nothing).tolist()]
            for name in names
        }
        return {"steps": list(range(1, self.num_steps + 1)), "series": series}

    def curve(self, query: CurveQuery) -> Curve:
        """Return a row of the heat map as lines, like the store: infinity is an element that was not finite."""
        if query.row not in self.rows:
            raise QueryError(f"{query.row!r} is no row")
        first, last = query.first or 1, min(query.last or self.num_steps, self.num_steps)
        values = self.heat[self.rows.index(query.row), first - 1 : last].astype(np.float64)
        stride = max(1, math.ceil(len(values) / query.points))
        lines = []
        for rank in range(len(self.ranks)) if query.by_rank else [None]:
            own = values * (1 if rank is None else 1 + 0.05 * rank)
            padded = np.pad(own, (0, -len(own) % stride), constant_values=np.nan).reshape(-1, stride)
            bad = np.isinf(padded)
            padded[bad] = np.nan
            steps = np.arange(first, first + padded.size, stride, dtype=np.float64)
            low, high = np.fmin.reduce(padded, axis=1), np.fmax.reduce(padded, axis=1)
            lines.append(CurveLine(rank, steps, low, high, (low + high) / 2, bad.sum(axis=1).astype(np.float64)))
        return Curve(lines, len(lines), stride)

    def append(self) -> dict[str, Any]:
        """Add one ordinary step; return its event."""
        random = np.random.default_rng(self.num_steps)
        self.loss = np.append(self.loss, 2.2 + 0.055 * random.standard_normal())
        self.grad_norm = np.append(self.grad_norm, 0.56 * np.exp(0.16 * random.standard_normal()))
        self.step_time = np.append(self.step_time, 0.412 + 0.012 * random.standard_normal())
        cells = np.exp(-8 + 0.18 * random.standard_normal((len(self.rows), 1))).astype(np.float32)
        self.heat = np.append(self.heat, cells, axis=1)
        for name in MEASURES:
            if hasattr(self, name):
                setattr(self, name, np.append(getattr(self, name), getattr(self, name)[-1]))
        times = self.step_time[-1] * np.exp(0.015 * random.standard_normal((len(self.ranks), 1)))
        self.rank_time = np.append(self.rank_time, times, axis=1)
        return self.summary()


def frame(rows: list[str], values: NDArray[Any], columns: int, **header: Any) -> bytes:
    """Return rows x steps in the binary form, pooled to at most `columns` by the largest value."""
    stride = max(1, math.ceil(values.shape[1] / columns))
    padded = np.pad(values.astype(np.float32), ((0, 0), (0, -values.shape[1] % stride)), constant_values=np.nan)
    pooled = np.fmax.reduce(padded.reshape(len(rows), -1, stride), axis=2) if stride > 1 else padded
    text = json.dumps({"rows": rows, "first_step": 1, "stride": stride, "columns": pooled.shape[1], **header}).encode()
    text += b" " * (-len(text) % 4)
    return struct.pack("<I", len(text)) + text + pooled.astype("<f4").tobytes()


def alert(*, diagnosis: str | None = None, **changes: Any) -> dict[str, Any]:
    """Return an alert as the agent's JSON has it; `changes` are fields of `Alert`."""
    series = SeriesKey(Kind.GRAD_REDUCED, "h.23.mlp.proj.weight")
    usual = Alert(
        id="alert-1",
        rule="gradient-nonfinite",
        severity=Severity.FATAL,
        state=AlertState.FIRING,
        attempt=1,
        rank=3,
        step=FAULT_STEP,
        first_step=FAULT_STEP,
        time_s=1_785_000_680.0,
        kind=Kind.GRAD_REDUCED,
        value=12.0,
        baseline=0.0,
        num_series=98,
        findings=(Finding(series=series, value=12.0, baseline=0.0),),
        message="gradient-nonfinite: NaN or Inf in 98 of 196 gradients at step 1640, worst h.23.mlp.proj.weight",
    )
    plain: dict[str, Any] = as_plain(dataclasses.replace(usual, **changes))
    statistics = {rule.name: rule.on.statistic for rule in load_rules()}
    plain["statistic"] = statistics.get(plain["rule"])
    return {**plain, "dump": DUMP["id"] if diagnosis else None, "diagnosis": diagnosis}


def single(kind: Kind, name: str, value: float, baseline: float) -> dict[str, Any]:
    """Return the fields of an alert about one series."""
    finding = Finding(series=SeriesKey(kind, name), value=value, baseline=baseline)
    return {"kind": kind, "value": value, "baseline": baseline, "num_series": 1, "findings": (finding,)}


def past_alerts() -> list[dict[str, Any]]:
    """Return a slow rank and a spike, both over."""
    names = layer_names(48)[110:116]
    findings = tuple(
        Finding(series=SeriesKey(Kind.GRAD_REDUCED, name), value=0.0121 - place * 1e-3, baseline=0.00081)
        for place, name in enumerate(names)
    )
    over: dict[str, Any] = {"severity": Severity.WARNING, "state": AlertState.RESOLVED}
    spike: dict[str, Any] = {"value": 0.0121, "baseline": 0.00081, "num_series": 86, "findings": findings}
    left = "gradient-spike: 86 of 196 gradients left their usual range"
    slow = "step-time-slow: rank 5 is 1.33 times slower than the median rank"
    time_ = single(Kind.STEP, "duration_seconds", 0.548, 0.412)
    return [
        alert(
            id="alert-spike", rule="gradient-spike", step=1322, first_step=1296, rank=0, message=left, **spike, **over
        ),
        alert(id="alert-slow", rule="step-time-slow", step=1241, first_step=903, rank=5, message=slow, **time_, **over),
    ]


def fault_alerts() -> list[dict[str, Any]]:
    """Return what fires after the fault: on every rank, and on the one where it began."""
    begun = "gradient-nonfinite-local: rank 3 is an origin: NaN or Inf in 98 of 196 gradients before they were reduced"
    local: dict[str, Any] = {"rule": "gradient-nonfinite-local", "kind": Kind.GRAD_UNREDUCED, "message": begun}
    lost = "loss-nonfinite: the loss is NaN or Inf at step 1641 on rank 0"
    loss: dict[str, Any] = {"rule": "loss-nonfinite", "message": lost, **single(Kind.LOSS, "loss", 1.0, 0.0)}
    return [
        *(alert(id=f"alert-{rank}", rank=rank, diagnosis=DIAGNOSIS_URL) for rank in range(8)),
        alert(id="alert-local", severity=Severity.CRITICAL, diagnosis=DIAGNOSIS_URL, **local),
        alert(id="alert-loss", severity=Severity.CRITICAL, rank=0, step=1641, first_step=1641, **loss),
    ]


def _chain() -> tuple[PathLink, ...]:
    hidden, wide = (4, 256, 768), (4, 256, 3072)

    def link(module: str, class_name: str, shape: tuple[int, ...], *, nans: int = 0, infs: int = 0) -> PathLink:
        count = math.prod(shape)
        largest, smallest = (11.52, -9.87) if nans else (None, None)
        numbers = {"count": count, "nans": nans or count, "infs": infs}
        tensor = BadTensor(slot="output.0", dtype="torch.float32", shape=shape, max=largest, min=smallest, **numbers)
        return PathLink(module=module, class_name=class_name, direction="forward", call=0, tensor=tensor)

    return (
        link("h.23.mlp.fc", "Linear", wide, nans=512, infs=512),
        link("h.23.mlp.act", "GELU", wide, nans=1024),
        link("h.23.mlp.proj", "Linear", hidden),
        link("h.23", "Block", hidden),
        dataclasses.replace(link("ln_f", "LayerNorm", hidden), omitted=143),
        link("head", "Linear", (4, 256, 256)),
        link("(loss)", "", ()),
    )


def _rank(rank: int, *, origin: bool) -> RankFinding:
    role, replay = (RankRole.ORIGIN, "nonfinite") if origin else (RankRole.INNOCENT, "clean")
    return RankFinding(rank=rank, role=role, replay=replay, unreduced=98 if origin else 0, reduced=98)


def fault_diagnosis() -> dict[str, Any]:
    """Return the report of a weight that went to Inf."""
    weight: dict[str, Any] = {"dtype": "torch.float32", "shape": (3072, 768), "count": 2_359_296, "nans": 0, "infs": 1}
    report = Diagnosis(
        verdict=DiagnosisVerdict.LOCATED,
        run_id="gpt-124m-byte",
        headline="h.23.mlp.fc: a weight was not finite before step 1640 on rank 3",
        reason="h.23.mlp.fc.weight held 1 Inf before the forward of step 1640 on rank 3, and on no other rank. "
        "Every later module on the way to the loss received it.",
        step=FAULT_STEP,
        attempt=1,
        rank=3,
        module="h.23.mlp.fc",
        class_name="Linear",
        micro_step=0,
        phase=FaultPhase.PARAMETER,
        tensor=BadTensor(slot="parameters.weight", max=0.184, min=-0.179, **weight),
        source="examples/ddp_gpt.py:88 x = x + self.mlp(self.ln_2(x))",
        classification=OperationVerdict(
            operation="", cause=NonfiniteCause.INHERITED, reason="the parameter was not finite before"
        ),
        reproducibility=Reproducibility.REPRODUCIBLE,
        reproducibility_reason="the replay's forwards gave the same bits as the step's",
        chain=_chain(),
        ranks=tuple(_rank(rank, origin=rank == 3) for rank in range(8)),
        parameters=(BadParameter(name="h.23.mlp.fc.weight", count=2_359_296, nans=0, infs=1),),
        consequences=(
            "98 of 196 gradients of rank 3 were not finite before the reduction; after it, those of all 8 ranks.",
        ),
        evidence=("replay of step 1640 on ranks 0 to 7", "statistics of steps 1632 to 1640"),
        dump="dumps/gradient-nonfinite-1-1640/attempt1/step1640/rank3",
        levels=(
            LevelFinding(level=PlaceLevel.RANK, answer="3", reason="only its gradients were bad before the reduction"),
            LevelFinding(
                level=PlaceLevel.MODULE, answer="h.23.mlp.fc", reason="its weight held 1 Inf", source="dump.json"
            ),
        ),
        contrasts=(
            Contrast(
                rank=3, place="param_origin h.23.mlp.fc.weight", value={"rms": 7.5}, usual={"rms": 0.02}, relative=374.0
            ),
        ),
        collect=NextCollection(
            reason="record the step before", monitor={"targets": {"h.23.mlp": {}}, "wg_distribution": True}
        ),
    )
    plain: dict[str, Any] = as_plain(report)
    return plain


def healthy_run() -> Run:
    """Return a run with two alerts that are over."""
    run = Run()
    run.slow_rank(5, 902, 1240)
    run.spike(1296)
    run.alerts = past_alerts()
    return run


def broken_run() -> Run:
    """Return the same run, in which a weight goes to Inf at step 1640: alerts, dump and diagnosis included."""
    run = Run(num_steps=1780)
    run.slow_rank(5, 902, 1240)
    run.spike(1296)
    run.fault(FAULT_STEP)
    run.alerts = [*past_alerts(), *fault_alerts()]
    path = f"dumps/{DUMP['id']}/attempt1/step{FAULT_STEP}"
    run.dumps = [{**DUMP, "ranks": list(range(8)), "path": path, "status": "nonfinite", "diagnosis": DIAGNOSIS_URL}]
    run.diagnoses[str(DUMP["id"])] = fault_diagnosis()
    return run
