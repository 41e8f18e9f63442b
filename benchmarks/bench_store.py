"""The store: bytes and time per row, what a query costs, and what following and storing costs per rank and step.

    OMP_NUM_THREADS=1 python benchmarks/bench_store.py                      # 2 M rows of each kind, about a minute
    OMP_NUM_THREADS=1 python benchmarks/bench_store.py --rows 20000000      # as in the goals; 1.4 GB of disk
    OMP_NUM_THREADS=1 python benchmarks/bench_store.py --json               # and a RESULT line for benchmarks/report.py

Bytes per row are those of real gradients, Adam moments and parameters of a small GPT with 148 tensors in training.
All times are CPU times of one process with one DuckDB thread: median and range over the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.measure import cpu_ms
from trainermon.agent.consumers import RecordConsumer
from trainermon.agent.pipeline import RecordPipeline
from trainermon.core.journal import Header, JournalWriter
from trainermon.core.values import STATISTICS, Coordinates, Kind, SeriesKey, StatBlock
from trainermon.exporters.store.retention import RetentionPolicy, compact
from trainermon.exporters.store.segments import cover
from trainermon.exporters.store.store import SegmentWriter, open_run
from trainermon.exporters.views import RunHistory

KINDS = (Kind.GRAD_REDUCED, Kind.EXP_AVG, Kind.PARAM_UPDATED)
NUM_SERIES = 1000
NUM_RANKS = 8
FLUSH_BYTES = 8 << 20


def header_of(rank: int, keys: Sequence[SeriesKey]) -> Header:
    return Header(
        run_id="run",
        attempt=1,
        coordinates=Coordinates(rank=rank, world_size=NUM_RANKS, dp=rank, dp_size=NUM_RANKS),
        host="node",
        pid=1,
        started_s=0.0,
        series=tuple(keys),
        placements=(None,) * len(keys),
    )


def made_up_keys() -> list[SeriesKey]:
    return [SeriesKey(kind, f"layers.{at // 10}.mlp.w{at % 10}") for kind in KINDS for at in range(NUM_SERIES)]


def made_up_blocks(num_steps: int, num_series: int) -> Iterator[tuple[int, StatBlock]]:
    """Yield (rank, block) of noise with the entropy of float32 statistics."""
    rng = np.random.default_rng(0)
    series = np.arange(num_series, dtype=np.uint32)
    noisy = [STATISTICS.index(name) for name in ("min", "max", "sum", "sum_sq")]
    for step in range(num_steps):
        for rank in range(NUM_RANKS):
            values = np.zeros((len(STATISTICS), num_series))
            values[0] = 1e6
            values[noisy] = rng.random((len(noisy), num_series), dtype=np.float32)
            yield rank, StatBlock(step=step, time_s=1.7e9 + step, series=series, values=values)


def train(num_steps: int, num_ranks: int) -> Iterator[tuple[int, list[SeriesKey], StatBlock]]:
    """Yield (rank, keys, block) of small GPTs in training, one per rank."""
    import torch
    from torch import nn

    from trainermon.statistics.kernel import moments

    class Block(nn.TransformerEncoderLayer):
        def __init__(self) -> None:
            super().__init__(64, 4, 256, dropout=0.0, batch_first=True)

    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    for rank in range(num_ranks):
        torch.manual_seed(rank)
        model = nn.Sequential(
            nn.Embedding(256, 64), *(Block() for _ in range(12)), nn.LayerNorm(64), nn.Linear(64, 256)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        names = [name for name, _ in model.named_parameters()]
        kinds = (Kind.GRAD_UNREDUCED, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.PARAM_UPDATED)
        keys = [SeriesKey(kind, name) for kind in kinds for name in names]
        for step in range(num_steps):
            start = torch.randint(len(text) - 257, (4,))
            tokens = torch.stack([text[at : at + 65] for at in start])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            parameters = list(model.parameters())
            tensors = [parameter.grad for parameter in parameters]
            tensors += [
                optimizer.state[parameter][what] for what in ("exp_avg", "exp_avg_sq") for parameter in parameters
            ]
            rows = torch.zeros(len(keys), len(STATISTICS), dtype=torch.float64)
            moments([*tensors, *(parameter.detach() for parameter in parameters)], rows)
            values = np.ascontiguousarray(rows.numpy().T)
            ids = np.arange(len(keys), dtype=np.uint32)
            yield rank, keys, StatBlock(step=step, time_s=1.7e9 + step, series=ids, values=values)


def bench_bytes(directory: Path) -> dict[str, float]:
    writer = SegmentWriter(directory)
    headers: dict[int, Header] = {}
    for rank, keys, block in sorted(train(50, 4), key=lambda item: item[2].step):
        header = headers.setdefault(rank, header_of(rank, keys))
        writer.add(header, header.series, block)
    num_rows = writer.num_rows
    path = writer.commit({})
    assert path is not None
    return {"bytes_per_row": path.stat().st_size / num_rows, "rows": num_rows}


def bench_write(directory: Path, rows_per_kind: int) -> dict[str, float]:
    """Fill the store, one segment per 8 MB, joined later, as the agent does."""
    keys = made_up_keys()
    writer = SegmentWriter(directory)
    headers = [header_of(rank, keys) for rank in range(NUM_RANKS)]
    num_rows, seconds = 0, 0.0
    for rank, block in made_up_blocks(rows_per_kind // (NUM_SERIES * NUM_RANKS), len(keys)):
        seconds += cpu_ms(lambda rank=rank, block=block: writer.add(headers[rank], keys, block)) / 1e3
        num_rows += len(keys)
        if writer.size_bytes >= FLUSH_BYTES:
            seconds += cpu_ms(lambda: writer.commit({})) / 1e3
    seconds += cpu_ms(lambda: writer.commit({})) / 1e3
    joining = (
        cpu_ms(lambda: compact(directory, RetentionPolicy(max_bytes=1 << 50, full_detail_s=math.inf), now_s=1.8e9))
        / 1e3
    )
    return {
        "rows": num_rows,
        "rows_per_cpu_s": num_rows / seconds,
        "joined_per_cpu_s": num_rows / joining,
        "segments": len(cover(directory)),
    }


def bench_queries(run_dir: Path, rows_per_kind: int, rounds: int) -> dict[str, dict[str, float]]:
    width = -(-rows_per_kind // (NUM_SERIES * NUM_RANKS) // 1000)  # steps in one of 1 000 columns
    queries = {
        "heat map": f"""SELECT name, step // {width} AS bucket, sqrt(sum(sum_sq) / sum(finite)), max(nonfinite)
            FROM stats WHERE kind = 'grad_reduced' GROUP BY ALL""",
        "one series": "SELECT step, rms FROM stats WHERE kind = 'exp_avg' AND name = 'layers.50.mlp.w5' AND rank = 3",
        "first non-finite": "SELECT min(step) FROM stats WHERE nonfinite > 0",
    }
    found = {}
    for name, sql in queries.items():

        def ask(sql: str = sql) -> None:
            with open_run(run_dir) as connection:
                connection.execute(sql).fetchnumpy()

        ask()
        found[name] = spread([cpu_ms(ask) / 1e3 for _ in range(rounds)])
    return found


class InlineExecutor(Executor):
    """Commits at once, so that its cost is in the same sum."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments, **options))
        return future


class HistoryConsumer(RecordConsumer):
    def __init__(self) -> None:
        self.history = RunHistory()

    def on_header(self, header: Header) -> None:
        self.history.start(header)

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        self.history.add(header, keys, block)


def bench_pipeline(directory: Path, consumers: Sequence[RecordConsumer], num_steps: int) -> float:
    """Return rank-steps per CPU second, of journals that are there already."""
    spool = directory / "spool"
    spool.mkdir(parents=True, mode=0o700)
    keys = made_up_keys()
    journals = [JournalWriter(spool, header_of(rank, keys)) for rank in range(NUM_RANKS)]
    for rank, block in made_up_blocks(num_steps, len(keys)):
        assert journals[rank].append_block(block)
    pipeline = RecordPipeline(
        spool, directory / "segments", executor=InlineExecutor(), consumers=consumers, flush_bytes=FLUSH_BYTES
    )

    def work() -> None:
        while pipeline.step():
            pass
        done = pipeline.flush()
        while not done.done():
            pipeline.step()

    milliseconds = cpu_ms(work)
    pipeline.close()
    assert pipeline.status.num_blocks == NUM_RANKS * num_steps
    return 1e3 * NUM_RANKS * num_steps / milliseconds


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def text(values: dict[str, float], unit: str) -> str:
    return f"{values['median']:.3g} {unit} [{values['low']:.3g}-{values['high']:.3g}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of one kind (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainermon-bench-") as name:
        root = Path(name)
        rates = {
            what: spread([bench_pipeline(root / f"{what}{at}", consumers(), 40) for at in range(3)])
            for what, consumers in (("store", list), ("store and page", lambda: [HistoryConsumer()]))
        }
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        run_dir = root / "run"
        written = bench_write(run_dir / "nodes" / "node" / "segments", arguments.rows)
        queries = bench_queries(run_dir, arguments.rows, arguments.rounds)
        size = bench_bytes(root / "real")
    print(f"bytes per row   {size['bytes_per_row']:.1f} (real moments, {size['rows']} rows)")
    print(f"write           {written['rows_per_cpu_s'] / 1e6:.2f} M rows/s ({written['rows']} rows)")
    print(f"join            {written['joined_per_cpu_s'] / 1e6:.2f} M rows/s (to {written['segments']} segments)")
    for what, seconds in queries.items():
        print(f"{what:15} {text(seconds, 's')} ({arguments.rows} rows of a kind, {len(KINDS)} kinds)")
    for what, rate in rates.items():
        print(f"{what:15} {text(rate, 'rank-steps/s')} ({len(KINDS)} x {NUM_SERIES} series)")
    print(f"peak memory     {peak_mb:.0f} MB (following, storing, page history; {NUM_RANKS} ranks)")
    if arguments.json:
        result = {"size": size, "write": written, "queries": queries, "rates": rates, "peak_mb": peak_mb}
        print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
