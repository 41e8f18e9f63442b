"""What the agent costs: start, CPU time per step of a rank, memory, and how far its rules are behind the ranks.

    OMP_NUM_THREADS=1 python benchmarks/bench_agent.py            # about a minute

A whole agent runs as in a job: journals, default rules, metrics, page, Parquet store. First it works off what 8 ranks
have left, then as much again, written as fast as they can (CPU time per rank and step without the start), then
they write at a fixed rate (the same, and the lag from the end of a step to its evaluation, sampled). Compare figures of
one run only; other load on the machine changes CPU time less than wall time, but changes it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainermon.agent.lifecycle.lock import read_status
from trainermon.core.control import ControlPage, Phase
from trainermon.core.journal import Cursor, Header, JournalWriter
from trainermon.core.launcher import start_agent
from trainermon.core.spool import RankLock
from trainermon.core.values import STATISTICS, Coordinates, Kind, SeriesKey, StatBlock

KINDS = (Kind.GRAD_REDUCED, Kind.UPDATE, Kind.ACTV)


class Rank:
    """One rank's side, in this process: lock, page and journal."""

    def __init__(self, spool: Path, rank: int, *, world_size: int, series: int) -> None:
        self._lock = RankLock(spool, rank)
        self._page = ControlPage(spool, rank)
        keys = [SeriesKey(Kind.LOSS, "loss"), SeriesKey(Kind.STEP, "duration_seconds")]
        keys += [SeriesKey(kind, f"h.{n // 10}.w{n % 10}") for kind in KINDS for n in range(series // len(KINDS))]
        self._series = np.arange(len(keys), dtype=np.uint32)
        self._random = np.random.default_rng(rank)
        header = Header(
            run_id="bench",
            attempt=1,
            coordinates=Coordinates(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size),
            host=socket.gethostname(),
            pid=os.getpid(),
            started_s=time.time(),
            series=tuple(keys),
            placements=(None,) * len(keys),
        )
        self._journal = JournalWriter(spool, header, budget_bytes=4 << 30)

    @property
    def cursor(self) -> Cursor:
        return self._journal.cursor

    def write(self, step: int) -> None:
        values = np.zeros((len(STATISTICS), len(self._series)))
        values[0] = 1e4
        values[1:5] = self._random.lognormal(0.0, 0.1, (4, len(self._series))) * [[-1.0], [1.0], [1.0], [1e4]]
        self._page.beat(step, Phase.STEP, time.time())
        self._journal.append_block(StatBlock(step=step, time_s=time.time(), series=self._series, values=values))

    def close(self) -> None:
        self._journal.close()
        self._page.close()
        self._lock.close()


class Agent:
    """The agent process, from outside."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        begin_s = time.monotonic()
        start_agent(spool)
        self.spawn_s = time.monotonic() - begin_s
        self.url = self._wait_for("url")
        self.get("healthz")
        self.start_s = time.monotonic() - begin_s
        self._pid = int(self._wait_for("pid"))

    def _wait_for(self, key: str) -> Any:
        while not (read_status(self._spool) or {}).get(key):
            time.sleep(0.005)
        return (read_status(self._spool) or {})[key]

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            content: bytes = answer.read()
            return content

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self, name: str) -> float:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(name))

    def wait_stored(self, ranks: list[Rank]) -> None:
        while True:
            flushed = (read_status(self._spool) or {})["flushed"]
            reached = [Cursor(*flushed.get(str(number), (0, 0))) for number in range(len(ranks))]
            if all(at >= rank.cursor for at, rank in zip(reached, ranks, strict=True)):
                return
            time.sleep(0.02)


def measure(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, float, str]]:
    spool = folder / "spool"
    spool.mkdir(mode=0o700)
    output = folder / "run"
    settings = {"run_id": "bench", "output": str(output), "agent": {"linger_s": 0, "flush_s": 5}}
    (spool / "agent.json").write_text(json.dumps(settings))
    ranks = [Rank(spool, number, world_size=options.ranks, series=options.series) for number in range(options.ranks)]
    write_backlog(ranks, range(options.backlog))
    agent = Agent(spool)
    yield "start_agent returns after", agent.spawn_s, "s"
    yield "first HTTP answer after", agent.start_s, "s"
    agent.wait_stored(ranks)
    yield "CPU time of start and backlog", agent.cpu_s(), "s"
    begin_cpu_s = agent.cpu_s()
    write_backlog(ranks, range(options.backlog, 2 * options.backlog))
    agent.wait_stored(ranks)
    spent_s, num_rank_steps = agent.cpu_s() - begin_cpu_s, options.ranks * options.backlog
    yield "CPU time of a rank-step", 1e3 * spent_s / num_rank_steps, "ms"
    yield "rank-steps per CPU-second", num_rank_steps / spent_s, "1/s"
    yield "memory after the backlog", agent.memory_mb("VmRSS"), "MB"
    yield from measure_live(agent, ranks, options)
    agent.get("metrics")
    yield "memory at the end", agent.memory_mb("VmRSS"), "MB"
    yield "memory, peak", agent.memory_mb("VmHWM"), "MB"
    for rank in ranks:
        rank.close()
    while spool.exists():
        time.sleep(0.05)


def write_backlog(ranks: list[Rank], steps: range) -> None:
    for step in steps:
        for rank in ranks:
            rank.write(step)


def measure_live(agent: Agent, ranks: list[Rank], options: argparse.Namespace) -> Iterator[tuple[str, float, str]]:
    begin_s, begin_cpu_s = time.monotonic(), agent.cpu_s()
    lags = list(write_live(agent, ranks, options))
    live_s = time.monotonic() - begin_s
    live_cpu_s = agent.cpu_s() - begin_cpu_s
    yield "CPU while live", 100 * live_cpu_s / live_s, "% of a core"
    yield "CPU time of a rank-step, live", 1e3 * live_cpu_s / (options.ranks * len(lags)), "ms"
    yield "lag, median", 1e3 * statistics.median(lags), "ms"
    yield "lag, 99th percentile", 1e3 * float(np.quantile(lags, 0.99)), "ms"


def write_live(agent: Agent, ranks: list[Rank], options: argparse.Namespace) -> Iterator[float]:
    """Write steps of all ranks at the rate asked for; yield the agent's lag after each."""
    next_s = time.monotonic()
    first = 2 * options.backlog
    for step in range(first, first + int(options.rate * options.seconds)):
        for rank in ranks:
            rank.write(step)
        next_s += 1 / options.rate
        time.sleep(max(0.0, next_s - time.monotonic()))
        yield json.loads(agent.get("api/run"))["lag_s"]


def main() -> int:
    parser = argparse.ArgumentParser(description="What the agent costs.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--series", type=int, default=3000, help="per rank, over three kinds")
    parser.add_argument("--backlog", type=int, default=200, help="steps written before the agent starts, and again")
    parser.add_argument("--rate", type=float, default=5.0, help="steps per second while live")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    sys.stdout.write(
        f"{options.ranks} ranks x {options.series} series, {options.backlog} steps, then {options.rate:g}/s\n"
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        for name, value, unit in measure(options, Path(folder)):
            sys.stdout.write(f"{name:<32}{value:10.2f} {unit}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
