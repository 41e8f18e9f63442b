"""CPU time of `/metrics` with about 5 000 series: our renderer against prometheus_client, in back-to-back pairs.

    python benchmarks/bench_metrics.py [--pairs N]

Both write the same families, labels and values: prometheus_client collects them from metric families that were built
beforehand, so that only rendering is compared. CPU time of this process is taken, not wall time; a pair is two adjacent
runs, so a noisy machine spoils both or neither. Also: the cost of taking in one step of one rank.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from importlib import metadata

import numpy as np
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest as library_text
from prometheus_client.openmetrics.exposition import generate_latest as library_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

from trainermon.core.journal import Header
from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey, Severity, StatBlock
from trainermon.exporters.prometheus.exposition import Exposition
from trainermon.exporters.prometheus.openmetrics import OPENMETRICS, TEXT

KINDS = (Kind.GRAD_REDUCED, Kind.PARAM_ORIGIN, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
NUM_RANKS = 20
NUM_LAYERS = 108


class Parsed:
    """A registry for prometheus_client that holds finished families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families


def series_table() -> tuple[list[SeriesKey], list[Placement | None]]:
    keys = [SeriesKey(Kind.LOSS, "loss"), SeriesKey(Kind.STEP, "step_time")]
    placements: list[Placement | None] = [None, None]
    for kind in KINDS:
        for layer in range(NUM_LAYERS):
            for name in ("attn.qkv", "attn.out", "mlp.up", "mlp.down", "norm.1", "norm.2"):
                keys.append(SeriesKey(kind, f"h.{layer}.{name}.weight"))
                placements.append(Placement(dtype="bfloat16", shape=(4096, 4096)))
    return keys, placements


def fill(exposition: Exposition) -> Callable[[], None]:
    """Update every rank a few times; return one further update of one rank."""
    keys, placements = series_table()
    random = np.random.default_rng(0)
    values = random.random((8, len(keys)))
    values[0], values[6:] = 1e6, 0.0
    block = StatBlock(step=812, time_s=1.8e9, series=np.arange(len(keys), dtype=np.uint32), values=values)

    def update(rank: int) -> None:
        place = Coordinates(rank=rank, world_size=NUM_RANKS, local_world_size=NUM_RANKS)
        header = Header(run_id="run", attempt=1, coordinates=place, host="node", pid=1, started_s=0.0)
        exposition.update(header, keys, block, placements=placements)

    for rank in range(NUM_RANKS):
        for _ in range(5):
            update(rank)
    return lambda: update(0)


def cpu_ms(function: Callable[[], object], *, repeats: int = 1) -> float:
    begin = time.process_time()
    for _ in range(repeats):
        function()
    return (time.process_time() - begin) / repeats * 1e3


def spread(values: list[float]) -> str:
    return f"median {statistics.median(values):7.3f} (range {min(values):.3f} to {max(values):.3f})"


def compare(exposition: Exposition, content_type: str, *, pairs: int) -> None:
    body, _ = exposition.render(OPENMETRICS)
    registry = Parsed(parse(body.decode()))
    library = library_openmetrics if content_type == OPENMETRICS else library_text
    ours, theirs = [], []
    for _ in range(pairs):
        ours.append(cpu_ms(lambda: exposition.render(content_type)))
        theirs.append(cpu_ms(lambda: library(registry)))
    body, _ = exposition.render(content_type)
    lines = sum(not line.startswith(b"#") for line in body.splitlines())
    print(f"{content_type.partition(';')[0]}: {lines} series, {len(body) / 1e3:.0f} kB")
    print(f"  trainermon         {spread(ours)} ms CPU")
    print(f"  prometheus_client  {spread(theirs)} ms CPU")
    print(f"  ratio              {spread([b / a for a, b in zip(ours, theirs, strict=True)])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    exposition = Exposition("run", rules={f"rule_{i}": Severity.WARNING for i in range(12)})
    update = fill(exposition)
    exposition.render()
    print(
        f"Python {platform.python_version()}, prometheus_client {metadata.version('prometheus_client')}, {pairs} pairs"
    )
    for content_type in (TEXT, OPENMETRICS):
        compare(exposition, content_type, pairs=pairs)
    costs = [cpu_ms(update, repeats=20) for _ in range(pairs)]
    print(f"update, {len(series_table()[0])} series of one rank: {spread(costs)} ms CPU")


if __name__ == "__main__":
    main()
