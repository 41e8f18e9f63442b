"""What judging the laws costs: CPU time of an agent per step and rank, with the default rules and without their laws.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_laws                 # healthy trainings of benchmarks/silent
    OMP_NUM_THREADS=1 python -m benchmarks.bench_laws --run RUN_DIR   # a run that is stored

The stored steps are judged again by both, in turns, `--times` times; medians are printed. What the rank itself does
for the laws is part of what `benchmarks/bench_step.py` measures.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.silent.case import cases_of
from benchmarks.silent.judge import train
from trainermon.alerts.conditions.criteria import BreaksLaw
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import AlertRule, load_rules
from trainermon.core.journal import Header
from trainermon.core.values import SeriesKey, StatBlock
from trainermon.exporters.store.blocks import GrowingTables, read_blocks

CASES = ("plain-zero-grad-missing", "ddp-same-shard", "fsdp2-stays-unsharded", "megatron-tp-embedding-mask")
Steps = Sequence[tuple[Header, list[SeriesKey], StatBlock]]


class LawCost(NamedTuple):
    """What a run costs an agent: rows of a step and rank; milliseconds of CPU per step and rank, by rules."""

    rows: float
    without_ms: float
    with_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, action="append", help="directory of a stored run; may be repeated")
    parser.add_argument("--times", type=int, default=5, help="how often each run is judged by either; default: 5")
    arguments = parser.parse_args()
    print("| run | rows a step and rank | without laws | with laws | laws |\n|---|---|---|---|---|")
    for name, steps in _stored(arguments.run) if arguments.run else _trained():
        found = cost(steps, arguments.times)
        laws_ms = found.with_ms - found.without_ms
        print(f"| {name} | {found.rows:.0f} | {found.without_ms:.2f} ms | {found.with_ms:.2f} ms | {laws_ms:.2f} ms |")


def cost(steps: Steps, times: int) -> LawCost:
    """Return what the steps of a run cost, all ranks of it together, per step and rank."""
    rules = load_rules()
    chosen = {"without": [rule for rule in rules if not isinstance(rule.when, BreaksLaw)], "with": rules}
    spent: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(times):
        for name, some in chosen.items():
            spent[name].append(1e3 * _judge(some, steps) / len(steps))
    rows = statistics.fmean(len(block.series) for _, _, block in steps)
    return LawCost(rows, *(statistics.median(spent[name]) for name in chosen))


def _judge(rules: Sequence[AlertRule], steps: Steps) -> float:
    engine = RuleEngine(rules)
    began = time.process_time()
    for header, keys, block in steps:
        engine.evaluate(header, keys, block)
    return time.process_time() - began


def _stored(runs: Sequence[Path]) -> Iterator[tuple[str, Steps]]:
    for run in runs:
        for segments in sorted(run.glob("nodes/*/segments")):
            yield run.name, _steps_of(segments)


def _trained() -> Iterator[tuple[str, Steps]]:
    for name in CASES:
        case = next(case for case in cases_of(name.partition("-")[0]) if case.name == name)
        with tempfile.TemporaryDirectory(prefix="laws-") as scratch:
            folder = Path(scratch) / "healthy"
            train(case, folder)
            for _, steps in _stored([folder / "run"]):
                yield f"{case.framework}, {case.ranks} ranks", steps


def _steps_of(segments: Path) -> Steps:
    tables = GrowingTables()
    return [tables.translate(header, block) for header, block in read_blocks(segments)]


if __name__ == "__main__":
    main()
