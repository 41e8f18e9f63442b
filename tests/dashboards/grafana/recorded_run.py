"""A made-up run of eight ranks on two nodes, through the real exporters, as Prometheus and InfluxDB come to hold it.

Two pipeline stages, tensor and data parallel; Adam in mixed precision, everything collected. In the middle rank 5 is
slow for a while; after three quarters the gradients of one layer explode, steps are skipped, alerts fire, a dump is
made.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from trainermon.alerts.rules import load_rules
from trainermon.core.journal import Header
from trainermon.core.values import (
    Alert,
    AlertState,
    Coordinates,
    Kind,
    Placement,
    SeriesKey,
    Severity,
    StatBlock,
)
from trainermon.exporters.influxdb.points import RankPoints
from trainermon.exporters.prometheus.budget import SeriesBudget
from trainermon.exporters.prometheus.exposition import Exposition
from trainermon.exporters.store.segment_follower import StoredSeries

RUN_ID = "gpt-7b-2026-11-21"
SCRAPE_S = 15.0
STEP_S = 5.0
NODES = ("node-1:9400", "node-2:9400")
RANKS_PER_NODE = 4
LAYERS_PER_STAGE = 8
SLOW_RANK = 5
BAD_LAYER = 11

_OF_PARAMETERS = (
    Kind.GRAD_UNREDUCED,
    Kind.GRAD_REDUCED,
    Kind.PARAM_ORIGIN,
    Kind.UPDATE,
    Kind.RATIO,
    Kind.EXP_AVG,
    Kind.EXP_AVG_SQ,
    Kind.MG_DIRECTION,
)
_SIZES = {
    Kind.GRAD_UNREDUCED: 3e-4,
    Kind.GRAD_REDUCED: 2e-4,
    Kind.PARAM_ORIGIN: 2e-2,
    Kind.UPDATE: 6e-2,
    Kind.RATIO: 8e-2,
    Kind.EXP_AVG: 2e-5,
    Kind.EXP_AVG_SQ: 1e-8,
    Kind.MG_DIRECTION: 0.55,
    Kind.ACTV: 0.9,
    Kind.ACTV_GRAD: 1e-5,
}
_ELEMENTS = 1_000_000
_GROUPS = ("dp", "tp", "pp")
_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*?)\})? (?P<value>\S+)(?: # .*)?")


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank of the run: its table, and its steps."""

    number: int
    num_steps: int
    end_s: float

    @property
    def coordinates(self) -> Coordinates:
        dp, tp, pp = self.number % 2, self.number // 2 % 2, self.number // 4
        sizes = {"dp_size": 2, "tp_size": 2, "pp_size": 2}
        local = {"local_rank": self.number % RANKS_PER_NODE, "local_world_size": RANKS_PER_NODE}
        return Coordinates(rank=self.number, world_size=8, dp=dp, tp=tp, pp=pp, **sizes, **local)

    @cached_property
    def modules(self) -> list[str]:
        first = self.coordinates.pp * LAYERS_PER_STAGE
        layers = [f"h.{layer}.{part}" for layer in range(first, first + LAYERS_PER_STAGE) for part in ("attn", "mlp")]
        return ["wte", *layers] if self.coordinates.pp == 0 else [*layers, "ln_f", "head"]

    @cached_property
    def keys(self) -> list[SeriesKey]:
        step = [
            SeriesKey(Kind.STEP, name)
            for name in (
                "duration_seconds",
                "global_grad_norm",
                "clip_ratio",
                "loss_scale",
                "skipped",
                "tokens",
                "tokens_per_second",
                "perplexity",
            )
        ]
        rates = [SeriesKey(Kind.STEP, "learning_rate", group) for group in "01"]
        parameters = [SeriesKey(kind, f"{name}.weight") for kind in _OF_PARAMETERS for name in self.modules]
        slots = ("sequence", "in_flight", "bytes", "unseen", "unfinished")
        calls = [SeriesKey(Kind.COMM, group, slot) for group in _GROUPS for slot in slots]
        waits = [SeriesKey(Kind.COMM, f"{group}.all_reduce", "wait_seconds") for group in _GROUPS]
        operands = [SeriesKey(Kind.COMM, f"{group}.all_reduce", s) for group in _GROUPS for s in ("pre.0", "post.0")]
        blocks = [name for name in self.modules if name.startswith("h.")]
        activations = [SeriesKey(kind, n, "output.0") for kind in (Kind.ACTV, Kind.ACTV_GRAD) for n in blocks]
        features = [SeriesKey(Kind.FEATURE, n, "attention_entropy") for n in blocks if n.endswith("attn")]
        loss = [SeriesKey(Kind.LOSS, "loss")] if self.coordinates.pp == 1 else []
        later = [SeriesKey(Kind.STEP, name) for name in (*_ROLLOUTS, *_ACCELERATOR)]
        return [*loss, *step, *rates, *parameters, *calls, *waits, *operands, *activations, *features, *later]

    @property
    def placements(self) -> list[Placement]:
        counts = self.coordinates.dp == 0
        return [Placement(dtype="bfloat16", shape=(_ELEMENTS,), in_global_norm=counts) for _ in self.keys]

    @property
    def header(self) -> Header:
        return Header(
            run_id=RUN_ID,
            attempt=1,
            coordinates=self.coordinates,
            host=f"node-{self.number // RANKS_PER_NODE + 1}",
            pid=100 + self.number,
            started_s=self.end_s - self.num_steps * STEP_S,
            version="0.1.0",
            series=tuple(self.keys),
            placements=tuple(self.placements),
        )

    def is_slow(self, step: int) -> bool:
        return self.number == SLOW_RANK and 0.45 <= step / self.num_steps < 0.62

    def is_bad(self, step: int) -> bool:
        return 0 <= step - math.ceil(0.75 * self.num_steps) < max(3, self.num_steps // 40)

    def block(self, step: int) -> StatBlock:
        """Return one step: moments that have the sizes chosen here."""
        random = np.random.default_rng([self.number, step])
        columns = [self._moments(key, step, random) for key in self.keys]
        values = np.ascontiguousarray(np.array(columns, dtype=np.float64).T)
        time_s = self.end_s - (self.num_steps - step) * STEP_S + 0.002 * self.number
        return StatBlock(step=step, time_s=time_s, series=np.arange(len(columns), dtype=np.uint32), values=values)

    def _moments(self, key: SeriesKey, step: int, random: np.random.Generator) -> list[float]:
        if key.kind in (Kind.LOSS, Kind.STEP, Kind.FEATURE) or (
            key.kind is Kind.COMM and not key.slot.startswith(("pre", "post"))
        ):
            value = self._value(key, step, random)
            return [1, value, value, value, value**2, 0, 0, 0]
        size = self._size(key, step, random)
        bad = 40 if self.is_bad(step) and f"h.{BAD_LAYER}." in key.name and key.kind in _BROKEN else 0
        finite = _ELEMENTS - bad
        mean = size if key.kind is Kind.MG_DIRECTION else 0.0
        return [_ELEMENTS, -4 * size, 4 * size, mean * finite, finite * size**2, 3, bad, 0]

    def _size(self, key: SeriesKey, step: int, random: np.random.Generator) -> float:
        if key.kind is Kind.COMM:
            return 3e-4 * math.exp(0.1 * random.standard_normal())
        layer = int(found[1]) if (found := re.search(r"h\.(\d+)", key.name)) else LAYERS_PER_STAGE
        share = step / self.num_steps
        if key.kind is Kind.MG_DIRECTION:
            return 0.5 + 0.1 * math.exp(-2 * share) + 0.01 * random.standard_normal()
        if key.kind is Kind.PARAM_ORIGIN:
            return _SIZES[key.kind] * (1 + 0.3 * share) * (1.4 if "mlp" in key.name else 1.0)
        falls = math.exp(-1.2 * share) if key.kind is not Kind.ACTV else 1 + 0.4 * share
        depth = math.exp(0.12 * layer if key.kind is Kind.ACTV else -0.12 * layer)
        noise = math.exp(0.15 * random.standard_normal())
        wide = 1.8 if "mlp" in key.name else 1.0
        burst = 1.0
        if key.kind in _BROKEN and self.is_bad(step):
            burst = 60 * math.exp(-0.5 * abs(layer - BAD_LAYER))
        return _SIZES[key.kind] * falls * depth * wide * noise * max(1.0, burst)

    def _value(self, key: SeriesKey, step: int, random: np.random.Generator) -> float:
        share, noise = step / self.num_steps, random.standard_normal()
        bad = self.is_bad(step)
        loss = 2.1 + 5.5 * math.exp(-5 * share) + 0.04 * noise + (2.5 if bad else 0)
        if key.kind is Kind.LOSS:
            return loss
        if key.kind is Kind.FEATURE:
            return 3.2 - 0.8 * share + 0.05 * noise
        duration = STEP_S * (1.35 if 0.45 <= share < 0.62 else 1.0) + 0.06 * noise
        if key.kind is Kind.COMM:
            return self._collective(key, step, abs(noise))
        norm = np.random.default_rng(step).standard_normal()  # the same on all ranks
        tokens = 524288.0 / 8
        return {
            "duration_seconds": duration,
            "global_grad_norm": 1.4 * math.exp(-share + 0.12 * norm) * (45 if bad else 1),
            "clip_ratio": min(1.0, 1 / (1.4 * math.exp(-share + 0.12 * norm) * (45 if bad else 1))),
            "loss_scale": 65536.0 * 2.0 ** (math.floor(share * 4) - (3 if share > 0.75 else 0)),
            "skipped": float(bad),
            "tokens": tokens,
            "tokens_per_second": tokens / duration,
            "perplexity": math.exp(min(loss, 5)),
            **{name: typical * math.exp(0.1 * noise) for name, typical in (_ROLLOUTS | _ACCELERATOR).items()},
            "accelerator_throttled": float(self.is_slow(step)),
            "learning_rate": (3e-4 if key.slot == "0" else 1e-4) * min(1.0, 10 * share) * (1 - 0.8 * share),
        }[key.name]

    def _collective(self, key: SeriesKey, step: int, noise: float) -> float:
        waits = 0.35 if 0.45 <= step / self.num_steps < 0.62 and not self.is_slow(step) else 0.03
        per_step = {"dp": 6, "tp": 64, "pp": 16}[key.name.partition(".")[0]]
        return {
            "sequence": float(per_step * step - (self.is_slow(step) and step % 3 == 0)),
            "in_flight": float(step % 2),
            "bytes": per_step * 2.5e8,
            "unseen": 0.0,
            "unfinished": float(step % 11 == 0),
            "wait_seconds": waits * (1 + noise) * {"dp": 3, "tp": 1, "pp": 2}[key.name.partition(".")[0]],
        }[key.slot]


# Typical values, around which those of a step lie.
_ROLLOUTS = {"rl_mean_abs": 0.012, "rl_p99_abs": 0.08, "rl_max_abs": 0.4, "rl_ratio": 1.0, "rl_ess": 0.97}
_ACCELERATOR = {
    "accelerator_utilization": 0.9,
    "accelerator_memory_bytes": 6.2e10,
    "accelerator_memory_ratio": 0.77,
    "accelerator_power_watts": 610.0,
    "accelerator_temperature_celsius": 62.0,
    "accelerator_clock_hertz": 1.7e9,
    "accelerator_throttled": 0.0,
}
_SCRAPED_ACCELERATOR = {
    "utilization_ratio": 0.9,
    "memory_used_bytes": 6.2e10,
    "memory_size_bytes": 8.0e10,
    "power_watts": 610.0,
    "temperature_celsius": 62.0,
    "clock_hertz": 1.7e9,
    "uncorrected_errors": 0.0,
    "xid": 0.0,
}
_BROKEN = frozenset({Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.ACTV_GRAD})


@dataclasses.dataclass(frozen=True)
class GrafanaRun:
    """The run: `num_steps` steps, the last of them at `end_s` (Unix time)."""

    num_steps: int
    end_s: float

    @cached_property
    def ranks(self) -> list[Rank]:
        return [Rank(number, self.num_steps, self.end_s) for number in range(len(NODES) * RANKS_PER_NODE)]

    @property
    def start_s(self) -> float:
        return self.end_s - self.num_steps * STEP_S

    def line_protocol(self) -> Iterator[str]:
        """Return the points that InfluxDB's exporter would send, times in microseconds."""
        for rank in self.ranks:
            table = [
                StoredSeries(key, _ELEMENTS, placement)
                for key, placement in zip(rank.keys, rank.header.placements, strict=True)
            ]
            points = RankPoints(RUN_ID, rank.number, table, budget=300)
            for step in range(1, self.num_steps + 1):
                yield from points.lines(rank.block(step), attempt=1).text

    def openmetrics(self) -> str:
        """Return every scrape of every node in one text, with times, as `promtool tsdb` takes it."""
        heads: dict[str, list[str]] = {}
        samples: dict[str, list[str]] = {}
        for node, instance in enumerate(NODES):
            for time_s, text in self._scrapes(node):
                family = ""
                for line in text.splitlines():
                    if line.startswith("# "):
                        family = line.split(" ")[2] if line != "# EOF" else ""
                        known = heads.setdefault(family, [])
                        if family and line not in known:
                            known.append(line)
                        continue
                    found = _SAMPLE.fullmatch(line)
                    assert found, line
                    labels = f'instance="{instance}",job="trainermon",{found["labels"] or ""}'.rstrip(",")
                    samples.setdefault(family, []).append(f"{found['name']}{{{labels}}} {found['value']} {time_s:.3f}")
        return "\n".join("\n".join([*heads[name], *samples[name]]) for name in heads if name in samples) + "\n# EOF\n"

    def _scrapes(self, node: int) -> Iterator[tuple[float, str]]:
        exposition = Exposition(
            RUN_ID,
            rules={rule.name: rule.severity for rule in load_rules()},
            budget=SeriesBudget(per_rank=360),  # no module of the recorded run is merged, however many rules there are
        )
        ranks = self.ranks[node * RANKS_PER_NODE : (node + 1) * RANKS_PER_NODE]
        per_scrape = int(SCRAPE_S / STEP_S)
        for step in range(1, self.num_steps + 1):
            for rank in ranks:
                exposition.update(rank.header, rank.keys, rank.block(step))
            if step % per_scrape == 0:
                time_s = self.start_s + step * STEP_S
                self._tell(exposition, ranks, step, time_s)
                yield time_s, exposition.render("application/openmetrics-text")[0].decode()

    def _tell(self, exposition: Exposition, ranks: list[Rank], step: int, now_s: float) -> None:
        """Set what the agent says, not the ranks."""
        share = step / self.num_steps
        faults = int(share > 0.75)
        is_second = ranks[0].number > 0
        for rank in ranks:
            slow = rank.is_slow(step)
            ratio = 1.38 if slow else 1 + 0.02 * math.sin(rank.number + step / 7)
            exposition.set("trainermon_rank_slowness_ratio", ratio, rank=rank.number)
            exposition.set("trainermon_rank_straggling", float(slow), rank=rank.number)
            exposition.set("trainermon_rank_hung", 0.0, rank=rank.number)
            accelerator = {f"trainermon_accelerator_{name}": value for name, value in _SCRAPED_ACCELERATOR.items()}
            accelerator["trainermon_accelerator_throttled"] = float(slow)
            exposition.set_accelerator(rank.number, accelerator, uuid=f"GPU-{rank.number}", model="H100")
            exposition.set("trainermon_last_heartbeat_timestamp_seconds", now_s - 1 - step % 3, rank=rank.number)
        exposition.set_alerts(list(self._alerts(ranks, step, now_s)), now_s=now_s)
        evaluating = len(ranks) if step % 60 > 54 else 0
        exposition.set("trainermon_ranks_in_phase", len(ranks) - evaluating, phase="step")
        exposition.set("trainermon_ranks_in_phase", evaluating, phase="evaluation")
        told = {
            "trainermon_escalations_total": faults,
            "trainermon_suppressed_escalations_total": faults * is_second,
            "trainermon_dumps_total": 4 * faults,
            "trainermon_dump_failures_total": 0,
            "trainermon_journal_lag_seconds": 0.04 + 0.03 * abs(math.sin(step)),
            "trainermon_last_commit_timestamp_seconds": now_s - (7 * step) % 30,
            "trainermon_commits_total": step // 6,
            "trainermon_refused_rows_total": 0,
            "trainermon_damaged_segments": 0,
            "trainermon_integrity_checks_total": 4 * step,
            "trainermon_checksum_comparisons_total": step // 10,
        }
        for name, value in told.items():
            exposition.set(name, value)
        for exporter, scale in (("csv", 1), ("influxdb", 0)):
            exposition.set("trainermon_exported_steps_total", 4 * step * scale, exporter=exporter)
            exposition.set("trainermon_export_dropped_steps_total", 0, exporter=exporter)
            exposition.set("trainermon_export_errors_total", 0, exporter=exporter)
            exposition.set("trainermon_export_busy_seconds_total", 0.02 * step * (2 - scale), exporter=exporter)
        away = 0.3 < share < 0.4
        durable = {
            "trainermon_exported_points_total": 900.0 * (step if not away else int(0.3 * self.num_steps)),
            "trainermon_export_rejected_points_total": 0,
            "trainermon_export_nonfinite_values_total": 12 * faults,
            "trainermon_export_retries_total": 5 * (share > 0.3),
            "trainermon_export_waiting_bytes": 4e5 * (step - 0.3 * self.num_steps) if away else 2e4,
            "trainermon_export_last_success_timestamp_seconds": now_s - (300 * (share - 0.3) if away else 4),
        }
        for name, value in durable.items():
            exposition.set(name, value, exporter="influxdb")

    def _alerts(self, ranks: list[Rank], step: int, now_s: float) -> Iterator[Alert]:
        share = step / self.num_steps
        slow = [rank for rank in ranks if rank.number == SLOW_RANK]
        if slow and share >= 0.47:
            yield self._alert("straggler", Severity.WARNING, SLOW_RANK, 0.47, now_s, over=share >= 0.62)
        if share >= 0.75:
            for rank in ranks:
                yield self._alert("gradient-nonfinite", Severity.FATAL, rank.number, 0.75, now_s, over=share >= 0.8)
                if rank.coordinates.pp == 1:
                    yield self._alert("loss-spike", Severity.WARNING, rank.number, 0.75, now_s, over=False)

    def _alert(self, rule: str, severity: Severity, rank: int, since: float, now_s: float, *, over: bool) -> Alert:
        first = math.ceil(since * self.num_steps)
        return Alert(
            id=f"{rule}-{rank}-{first}",
            rule=rule,
            severity=severity,
            state=AlertState.RESOLVED if over else AlertState.FIRING,
            attempt=1,
            rank=rank,
            step=first,
            first_step=first,
            time_s=now_s - 3600 if over else now_s,
            kind=Kind.GRAD_REDUCED,
            value=1.0,
            baseline=0.0,
            num_series=1,
            findings=(),
            message="",
        )
