"""A long run under every exporter at once, with servers that come and go: does anything grow, and does all arrive?

    python -m benchmarks.bench_soak                     # 100,000 steps: 14 minutes, and some for reading what arrived
    python -m benchmarks.bench_soak --steps 3000 --up-s 3 --down-s 3

One rank trains a tiny model, at most `--rate` steps a second, so that everything behind it is at work all the time. A
real InfluxDB and a real Pushgateway are stopped and started meanwhile; store, csv, TensorBoard, MindFormers, MLflow and
Weights & Biases (offline) are written beside them. The slope is that of the least squares line through the second half
of the samples: caches are full by then. It ends with status 1 where a step is missing or twice in any form.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak.arrivals import (
    GRADIENTS,
    Arrivals,
    in_csv,
    in_events,
    in_influxdb,
    in_mlflow,
    in_store,
    in_wandb,
    missing_and_doubled,
)
from benchmarks.soak.servers import ComingAndGoing
from benchmarks.soak.usage import children_of, command_of, usage_of
from trainermon.agent.lifecycle.lock import read_status

FORMATS = ("influxdb", "pushgateway", "csv", "tensorboard", "mindformers", "mlflow", "wandb", "api", "null")
WEIGHTS = ("0.weight", "0.bias", "2.weight", "2.bias")
NEEDED = {
    "store": (*WEIGHTS, "loss"),
    "influxdb": (*WEIGHTS, "loss"),
    "csv": (*WEIGHTS, "loss"),
    "tensorboard": (*(f"{GRADIENTS}/vp0:{name}/norm" for name in WEIGHTS), "scalars/loss"),
    "mindformers": ("rank_0/loss",),
    "mlflow": ("loss",),
    "wandb": ("loss",),
}
"""Series that must have arrived, by form, as that form names them."""
EXPORT_LIMIT_S = 3600


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What came of a run.

    Attributes:
        samples: By process, then over the run, `step`, `rss_mb`, `files`, `threads`, and for the rank `cpu_s`.
        wrong: By form, by series, how many steps are missing and how many are there twice; nothing else.
        num_series: By form, how many series were looked at.
        num_outages: How often the servers were stopped.
        wall_s: From the first step to the end of the agent.
        log: Of the agent.
    """

    samples: Mapping[str, Sequence[Mapping[str, float]]]
    wrong: Mapping[str, Mapping[str, tuple[int, int]]]
    num_series: Mapping[str, int]
    num_outages: int
    wall_s: float
    log: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=120.0, help="steps per second")
    parser.add_argument("--up-s", type=float, default=20.0, help="how long the servers are there each time")
    parser.add_argument("--down-s", type=float, default=20.0, help="and how long they are not")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        soak = run(Path(folder), options.steps, options.rate, up_s=options.up_s, down_s=options.down_s)
    _print(soak, options.steps)
    return 1 if any(soak.wrong.values()) else 0


def run(folder: Path, steps: int, rate: float, *, up_s: float, down_s: float) -> Soak:
    """Train, with the servers coming and going; afterwards let `trainermon export` write what is left, and count."""
    run_dir, spool_dir = folder / "output" / "soak", folder / "spool"
    began_s = time.monotonic()
    servers = ComingAndGoing(folder, up_s=up_s, down_s=down_s)
    with servers:
        config = _config(folder, servers)
        samples = _train(config, steps, rate, spool_dir)
        while any(spool_dir.glob("*/agent.status.json")):
            time.sleep(0.2)
    wall_s = time.monotonic() - began_s
    with servers.up() as server:
        export = [sys.executable, "-m", "trainermon", "export", str(run_dir), "--wait", str(EXPORT_LIMIT_S)]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        arrivals = _arrivals(run_dir, lambda: in_influxdb(server))
    wrong = {form: dict(_wrong(form, arrived, steps)) for form, arrived in arrivals.items()}
    num_series = {form: len(NEEDED[form]) for form in arrivals}
    (log,) = run_dir.glob("nodes/*/agent.log")
    return Soak(
        samples=samples,
        wrong=wrong,
        num_series=num_series,
        num_outages=servers.num_outages,
        wall_s=wall_s,
        log=log.read_text(),
    )


def slope_per_10_000(samples: Sequence[Mapping[str, float]], what: str) -> float:
    """Return by how much `what` grows in 10,000 steps, over the second half of the samples; NaN for fewer than two.

    >>> slope_per_10_000([{"step": 10_000 * k, "rss_mb": 5.0 + k} for k in range(6)], "rss_mb")
    1.0
    """
    half = [(one["step"], one[what]) for one in samples if what in one][len(samples) // 2 :]
    if len(half) < 2:
        return float("nan")
    steps, values = np.array(half).T
    return round(float(np.polyfit(steps, values, 1)[0]) * 1e4, 6)


def _config(folder: Path, servers: ComingAndGoing) -> dict[str, Any]:
    return {
        "run_id": "soak",
        "output_dir": str(folder / "output"),
        "spool_dir": str(folder / "spool"),
        "wg_distribution": True,
        "format": list(FORMATS),
        "ndigits": 17,
        "step_count_per_record": 10_000,
        "influxdb": {"url": servers.influxdb_url, "api": "v1", "max_backoff_s": 2.0},
        "pushgateway": {"url": servers.pushgateway_url, "interval_s": 1.0},
        "wandb": {"mode": "offline"},
        "agent": {"linger_s": 0, "flush_s": 2},
    }


def _train(config: Mapping[str, Any], steps: int, rate: float, spool_dir: Path) -> dict[str, list[dict[str, float]]]:
    """Run the rank; return, by process, what it held after every twentieth of the steps."""
    samples: dict[str, list[dict[str, float]]] = {}
    command = [sys.executable, "-m", "benchmarks.soak.training", json.dumps(config), str(steps), str(rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        for line in rank.stdout:
            said = json.loads(line)
            samples.setdefault("rank", []).append(said)
            for name, pid in _processes(spool_dir):
                samples.setdefault(name, []).append({"step": said["step"], **usage_of(pid)})
    if rank.returncode:
        raise SystemExit(f"the rank ended with status {rank.returncode}")
    return samples


def _processes(spool_dir: Path) -> Iterator[tuple[str, int]]:
    """Yield the agent and what it has started, as (name, pid)."""
    for path in spool_dir.glob("*/agent.status.json"):
        agent = int((read_status(path.parent) or {})["pid"])
        yield "agent", agent
        for child in children_of(agent):
            if "export_process" in command_of(child):
                yield "exporters", child
                yield from (("wandb-core", one) for one in children_of(child) if "wandb-core" in command_of(one))


def _arrivals(run_dir: Path, influxdb: Any) -> dict[str, Arrivals]:
    return {
        "store": in_store(run_dir),
        "influxdb": influxdb(),
        "csv": in_csv(run_dir),
        "tensorboard": in_events(run_dir, "tensorboard"),
        "mindformers": in_events(run_dir, "mindformers"),
        "mlflow": in_mlflow(run_dir),
        "wandb": in_wandb(run_dir),
    }


def _wrong(form: str, arrived: Arrivals, steps: int) -> Iterator[tuple[str, tuple[int, int]]]:
    for name in NEEDED[form]:
        found = missing_and_doubled(arrived.get(name, ()), range(steps))
        if any(found):
            yield name, found


def _print(soak: Soak, steps: int) -> None:
    print(f"{steps} steps in {soak.wall_s:.0f} s, servers stopped {soak.num_outages} times")
    print(f"{'process':12}{'RSS, MB':>20}{'MB per 10,000 steps':>22}{'open files':>14}{'threads':>12}")
    for name, samples in soak.samples.items():
        known = [one for one in samples if "rss_mb" in one]
        shown = {what: f"{known[0][what]:.0f} to {known[-1][what]:.0f}" for what in ("rss_mb", "files", "threads")}
        slope = slope_per_10_000(known, "rss_mb")
        print(f"{name:12}{shown['rss_mb']:>20}{slope:>+22.2f}{shown['files']:>14}{shown['threads']:>12}")
    rank = soak.samples["rank"]
    paces = np.diff([0.0, *(one["cpu_s"] for one in rank)]) / np.diff([0.0, *(one["step"] for one in rank)]) * 1e3
    print(f"CPU time of a step  {' '.join(f'{pace:.2f}' for pace in paces[1:])} ms, by twentieths of the run")
    for form, wrong in soak.wrong.items():
        print(f"{form:12}{soak.num_series[form]} series of {steps} steps: {wrong or 'each step once'}")


if __name__ == "__main__":
    sys.exit(main())
