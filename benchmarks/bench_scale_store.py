"""What reading a run of 10,240 ranks costs: 1,280 folders of nodes, each with segments of 8 ranks, by SQL and in serve.

    python -m benchmarks.bench_scale_store          # 1,280 nodes x 2 segments x 8 ranks x 10 steps x 12 series
    python -m benchmarks.bench_scale_store --nodes 128

Times are CPU time of this process, which does what `trainermon query` and `trainermon serve` do. Segments are small, as
in the first minute of a run; later ones are joined, so that a node has some ten of them.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import cpu_ms
from trainermon.agent.runs.run_list import RunList
from trainermon.agent.runs.stored_run import StoredRun
from trainermon.core.journal import Header
from trainermon.core.values import STATISTICS, Coordinates, Kind, SeriesKey, StatBlock
from trainermon.exporters.store.store import SegmentWriter, open_run

RANKS = 8
KEYS = (
    SeriesKey(Kind.LOSS, "loss"),
    SeriesKey(Kind.STEP, "duration_seconds"),
    *(SeriesKey(Kind.GRAD_REDUCED, f"h.{layer}.w") for layer in range(10)),
)
QUERIES = {
    "loss of the newest steps": "SELECT step, loss FROM steps ORDER BY step DESC LIMIT 10",
    "loss of every rank at a step": "SELECT rank, loss FROM step_values WHERE step = 7",
    "one gradient on one rank": "SELECT step, rms FROM stats WHERE rank = 4711 AND name = 'h.3.w'",
    "largest gradients of all ranks": "SELECT name, rank, max(max) AS m FROM stats WHERE kind = 'grad_reduced' "
    "GROUP BY name, rank ORDER BY m DESC LIMIT 10",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1280)
    parser.add_argument("--segments", type=int, default=2, help="of each node")
    parser.add_argument("--steps", type=int, default=10, help="of each segment")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        run_dir = Path(name) / "run"
        size = write_run(run_dir, options.nodes, options.segments, options.steps)
        rows = options.nodes * options.segments * options.steps * RANKS * len(KEYS)
        shape = f"{options.nodes} nodes, {RANKS * options.nodes} ranks, {options.segments} segments a node"
        print(f"{shape}: {rows / 1e6:.1f} M rows, {size / rows:.1f} bytes a row")
        opened = open_run(run_dir)
        _say("open the run", lambda: open_run(run_dir).close())
        for what, query in QUERIES.items():
            _say(what, functools.partial(_rows, opened, query))
        opened.close()
        runs = RunList([Path(name)])
        _say("trainermon serve, first look", runs.scan)
        _say("trainermon serve, next look", runs.scan)
        _say("trainermon serve, page of the run", lambda: asyncio.run(_page(runs, is_whole=False)))
        _say("trainermon serve, all of the page", lambda: asyncio.run(_page(runs, is_whole=True)))
    print(f"memory, peak                       {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:8.0f} MB")
    return 0


def _rows(connection: Any, query: str) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = connection.execute(query).fetchall()
    return found


async def _page(runs: RunList, *, is_whole: bool) -> None:
    """Read the run as its page needs it: first what it shows at once, then where `is_whole` everything."""
    ((key, place),) = runs.places.items()
    with ThreadPoolExecutor(1) as executor:
        run = StoredRun(place.path, executor=executor, facts=lambda: runs.facts[key])
        await run.refresh(max_age_s=0.0)
        if is_whole:
            await run.complete()
        else:
            await run.close()


def write_run(
    run_dir: Path, num_nodes: int, num_segments: int, num_steps: int, *, keys: Sequence[SeriesKey] = KEYS
) -> int:
    """Write the segments of all nodes; return their bytes."""
    random = np.random.default_rng(0)
    world_size = RANKS * num_nodes
    size = 0
    for node in range(num_nodes):
        folder = run_dir / "nodes" / f"node{node:04d}" / "segments"
        folder.mkdir(parents=True)
        writer = SegmentWriter(folder)
        for segment in range(num_segments):
            for step in range(segment * num_steps, (segment + 1) * num_steps):
                for rank in range(RANKS * node, RANKS * (node + 1)):
                    writer.add(_header(rank, world_size, keys), keys, _block(random, step, len(keys)))
            path = writer.commit({})
            assert path is not None
            size += path.stat().st_size
    return size


def _header(rank: int, world_size: int, keys: Sequence[SeriesKey]) -> Header:
    place = Coordinates(rank=rank, world_size=world_size, local_world_size=RANKS, dp=rank // 8, tp=rank % 8)
    return Header(run_id="run", attempt=1, coordinates=place, host="node", pid=1, started_s=0.0, series=tuple(keys))


def _block(random: np.random.Generator, step: int, num_series: int) -> StatBlock:
    values = np.zeros((len(STATISTICS), num_series))
    values[0] = 1e4
    values[1:5] = random.lognormal(0.0, 0.1, (4, num_series)) * [[-1.0], [1.0], [1.0], [1e4]]
    return StatBlock(step=step, time_s=1.7e9 + step, series=np.arange(num_series, dtype=np.uint32), values=values)


def _say(what: str, work: Callable[[], object]) -> None:
    began_s = time.monotonic()
    print(f"{what:34} {cpu_ms(work):8.0f} ms CPU, {1e3 * (time.monotonic() - began_s):8.0f} ms")


if __name__ == "__main__":
    sys.exit(main())
