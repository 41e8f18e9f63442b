"""What the agents of a large job cost a real Prometheus: series, size of a scrape, memory per series, CPU per sample.

    python -m benchmarks.bench_prometheus                  # 20, then 60 agents; about five minutes
    python -m benchmarks.bench_prometheus --targets 10 20 --seconds 20

A real agent follows 8 ranks of 3,000 series each; what it answers to a scrape is then served for every target, with
other ranks and other digits in turn. Memory and CPU time are those of the Prometheus process, per series as the slope
between the numbers of targets. "Of ranks" are the series without the label `module`, which shards pass on.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.bench_agent import Agent, Rank
from benchmarks.bench_controller import cpu_s
from benchmarks.many_servers import Answer, ManyServers
from benchmarks.soak.usage import usage_of
from tests.ports import free_port
from tests.server_programs import find_program, running

INTERVAL_S = 5
RANKS, SERIES, STEPS = 8, 3000, 40
TEXT = "text/plain; version=0.0.4; charset=utf-8"
CONFIGURATION = """
global: {{scrape_interval: {interval_s}s}}
scrape_configs:
- job_name: trainermon
  file_sd_configs: [{{files: ["{targets}"]}}]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs=2, default=[20, 60])
    parser.add_argument("--seconds", type=float, default=60.0, help="of scraping, for each number of targets")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        scrape = scrape_of_an_agent(Path(name))
        lines = [line for line in scrape.splitlines() if line and not line.startswith(b"#")]
        of_ranks = [line for line in lines if b'module="' not in line]
        packed = len(gzip.compress(scrape, 1))
        print(f"an agent of {RANKS} ranks x {SERIES} series: {len(lines)} series, {len(of_ranks)} of them of ranks")
        print(f"one scrape              {len(scrape) / 1e3:.0f} kB, {packed / 1e3:.0f} kB in gzip")
        found = [_measure(Path(name), scrape, number, options.seconds) for number in options.targets]
    (few, few_mb, few_cpu), (many, many_mb, many_cpu) = found
    num_series = (many - few) * len(lines)
    per_series = 1e6 * (many_mb - few_mb) / num_series
    per_sample_us = 1e6 * (many_cpu - few_cpu) * INTERVAL_S / num_series
    print(f"memory                  {few_mb:.0f} and {many_mb:.0f} MB: {per_series:.0f} bytes a series")
    print(f"CPU                     {few_cpu:.1%} and {many_cpu:.1%} of a core: {per_sample_us:.2f} us a sample")
    return 0


def scrape_of_an_agent(folder: Path) -> bytes:
    """Return what a real agent answers to a scrape, after some steps of its ranks."""
    spool = folder / "spool"
    spool.mkdir(mode=0o700)
    settings = {"run_id": "bench", "output": str(folder / "run"), "agent": {"linger_s": 0}}
    (spool / "agent.json").write_text(json.dumps(settings))
    ranks = [Rank(spool, number, world_size=RANKS, series=SERIES) for number in range(RANKS)]
    for step in range(STEPS):
        for rank in ranks:
            rank.write(step)
    agent = Agent(spool)
    agent.wait_stored(ranks)
    content = agent.get("metrics")
    for rank in ranks:
        rank.close()
    while spool.exists():
        time.sleep(0.05)
    return content


def _measure(folder: Path, scrape: bytes, num_targets: int, seconds: float) -> tuple[int, float, float]:
    """Return the number of targets, the resident memory in MB, and the share of a core, after so many seconds."""
    place = folder / f"prometheus{num_targets}"
    place.mkdir()
    with _targets(scrape, num_targets) as addresses, _prometheus(place, addresses) as pid:
        time.sleep(seconds / 2)  # series are made in the first scrapes
        before_s, began_s = cpu_s(pid), time.monotonic()
        time.sleep(seconds / 2)
        share = (cpu_s(pid) - before_s) / (time.monotonic() - began_s)
        return num_targets, usage_of(pid)["rss_mb"], share


@contextmanager
def _prometheus(folder: Path, addresses: Sequence[str]) -> Iterator[int]:
    targets, configuration, port = folder / "targets.json", folder / "prometheus.yml", free_port()
    targets.write_text(json.dumps([{"targets": [one], "labels": {"host": f"n{k}"}} for k, one in enumerate(addresses)]))
    configuration.write_text(CONFIGURATION.format(interval_s=INTERVAL_S, targets=targets))
    command = [
        find_program("prometheus"),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(
        command, log=folder / "log", ready=lambda: b"TSDB started" in (folder / "log").read_bytes()
    ) as process:
        yield process.pid


@contextmanager
def _targets(scrape: bytes, number: int) -> Iterator[list[str]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, scrape, number))
    process.start()
    yield ours.recv()
    ours.send("end")
    process.join()


def _serve(pipe: Connection, scrape: bytes, number: int) -> None:
    asyncio.run(_serving(pipe, scrape, number))


async def _serving(pipe: Connection, scrape: bytes, number: int) -> None:
    variants = [re.sub(rb"(\.\d)\d", rb"\g<1>%d" % digit, scrape) for digit in range(4)]
    num_asked = 0

    def answer(port: int, method: str, path: str, body: bytes) -> Answer:
        nonlocal num_asked
        del port, method, path, body
        num_asked += 1
        return 200, TEXT, variants[num_asked % len(variants)]

    servers = ManyServers(answer)
    await servers.start(number)
    pipe.send([f"127.0.0.1:{port}" for port in servers.ports])
    await asyncio.to_thread(pipe.recv)
    await servers.cleanup()


if __name__ == "__main__":
    sys.exit(main())
