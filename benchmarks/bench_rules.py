"""Cost, false alarms and recall of the alert rules.

    OMP_NUM_THREADS=1 python benchmarks/bench_rules.py            # everything, about 5 minutes of CPU time
    OMP_NUM_THREADS=1 python benchmarks/bench_rules.py --only cost

Cost is CPU time per step of one rank. False alarms and recall are measured on synthetic statistics whose noise is
harder than that of real runs: heavy tails, correlation in time and between series, levels that wander, a start whose
levels change quickly. The defaults were tuned on the even seeds; the odd ones are the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.journal import Header
from trainermon.core.values import STATISTICS, Alert, Coordinates, Kind, Placement, SeriesKey, StatBlock

KINDS = (Kind.GRAD_REDUCED, Kind.UPDATE, Kind.ACTV)
NUM_SINGLES = 2  # loss and step time stand first

COST_RULES = """
rules:
  - {name: nonfinite, severity: critical, on: {kind: grad_reduced}, when: {nonfinite: true}, summary: "{worst}"}
  - {name: dead, severity: warning, on: {kind: grad_reduced}, when: {dead: {steps: 20}}, summary: "{worst}"}
  - name: rms-spike
    severity: warning
    on: {kind: grad_reduced, statistic: rms}
    when: {spike: {score: 10, window: WINDOW}}
    summary: "{worst}"
  - name: absmax-spike
    severity: warning
    on: {kind: grad_reduced, statistic: absmax}
    when: {spike: {score: 10, window: WINDOW}}
    summary: "{worst}"
"""


NODE_KINDS = (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.PARAM_ORIGIN)  # two of them are compared between ranks


def header(rank: int = 0, attempt: int = 0, *, num_ranks: int = 1) -> Header:
    place = Coordinates(rank=rank, world_size=max(num_ranks, rank + 1), local_world_size=num_ranks, dp=rank)
    return Header(run_id="bench", attempt=attempt, coordinates=place, host="node", pid=1, started_s=0.0)


def series_table(num_series: int) -> list[SeriesKey]:
    """Return loss, step time, and `num_series` tensors: a third each gradients, updates and module outputs."""
    keys = [SeriesKey(Kind.LOSS, "loss"), SeriesKey(Kind.STEP, "step_time")]
    for number in range(num_series):
        kind = KINDS[number * len(KINDS) // num_series]
        keys.append(SeriesKey(kind, f"h.{number}", slot="output.0" if kind is Kind.ACTV else ""))
    return keys


class CleanRun:
    """Synthetic statistics of a healthy run, one step after the other.

    The logarithm of the rms of a tensor is a random walk, plus noise of its own (Student's t with 4 degrees of
    freedom, correlated in time, 2 to 30 % strong), plus noise that all tensors share, in which now and then a batch
    stands out, by a factor of two at most. `start` adds what the first steps do: gradients fall tenfold and updates
    rise with the learning rate, which then decays along a cosine.
    """

    def __init__(self, num_series: int, num_steps: int, *, seed: int, start: bool) -> None:
        self._random = np.random.default_rng(seed)
        self._num_steps = num_steps
        self._start = start
        self._size = num_series
        self._level = self._random.normal(-4.0, 2.0, num_series)
        self._strength = np.exp(self._random.uniform(np.log(0.02), np.log(0.3), num_series))
        self._noise = np.zeros(num_series)
        self._shared = 0.0
        self._kinds = np.arange(num_series) * len(KINDS) // num_series

    def moments(self, step: int) -> np.ndarray:
        """Return the moments of the next step, `[8, 2 + num_series]`."""
        random = self._random
        self._level += random.normal(0.0, 0.003, self._size)
        self._noise = 0.3 * self._noise + random.standard_t(4, self._size) * self._strength
        self._shared = 0.5 * self._shared + np.clip(random.standard_t(3) * 0.03, -0.7, 0.7)
        logarithm = self._level + self._noise + self._shared
        if self._start:
            logarithm += self._schedule(step)[self._kinds]
        count = 4096.0
        rms = np.exp(logarithm)
        loss = (2.5 + 8.5 * np.exp(-step / 300.0)) * (1.0 + 0.03 * random.standard_t(5))
        duration = 0.3 * np.exp(0.05 * random.standard_t(4)) * (4.0 if step % 100 == 99 else 1.0)
        singles = np.array([loss, duration])
        rows = np.empty((len(STATISTICS), NUM_SINGLES + self._size))
        rows[:, :NUM_SINGLES] = [np.ones(2), singles, singles, singles, singles**2, *np.zeros((3, 2))]
        rest = rows[:, NUM_SINGLES:]
        rest[:] = 0.0
        rest[0], rest[1], rest[2], rest[4] = count, -4.0 * rms, 4.0 * rms, count * rms**2
        return rows

    def _schedule(self, step: int) -> np.ndarray:
        done = step / self._num_steps
        rate = min(1.0, (step + 1) / 200.0) * (0.55 + 0.45 * np.cos(np.pi * done))
        return np.array([2.3 * np.exp(-step / 60.0), np.log(rate), 0.1 * np.log1p(step / 50.0)])


def blocks(run: CleanRun, num_steps: int, size: int) -> Iterator[StatBlock]:
    series = np.arange(size, dtype=np.uint32)
    for step in range(num_steps):
        yield StatBlock(step=step, time_s=float(step), series=series, values=run.moments(step))


def false_alarms(num_series: int, num_steps: int, *, seed: int, start: bool) -> list[Alert]:
    """Return the grouped alerts that begin in a healthy run of the default rules."""
    engine, keys = RuleEngine(load_rules()), series_table(num_series)
    run = CleanRun(num_series, num_steps, seed=seed, start=start)
    found: dict[str, Alert] = {}
    for block in blocks(run, num_steps, len(keys)):
        for alert in engine.evaluate(header(), keys, block):
            found.setdefault(alert.id, alert)
    return list(found.values())


def delays(num_series: int, factor: float, *, seed: int, lasting_steps: int = 10) -> list[int | None]:
    """Return after how many steps each of 20 injected changes of a few series was found; None: not at all.

    A sudden fall of updates is none: the learning rate may fall in steps.
    """
    random = np.random.default_rng(1000 + seed)
    engine, keys = RuleEngine(load_rules()), series_table(num_series)
    begins = [300 + 120 * number for number in range(20)]
    num_steps = begins[-1] + 100
    run = CleanRun(num_series, num_steps, seed=seed, start=True)
    found: dict[int, int] = {}
    chosen = np.zeros(0, np.intp)
    for block in blocks(run, num_steps, len(keys)):
        begin = max((step for step in begins if step <= block.step), default=-1)
        if block.step == begin:
            kind = random.choice([place for place, kind in enumerate(KINDS) if factor > 1 or kind is not Kind.UPDATE])
            third = num_series // len(KINDS)
            chosen = NUM_SINGLES + kind * third + random.choice(third, max(1, third // 100), replace=False)
        if 0 <= block.step - begin < lasting_steps and begin >= 0:
            block.values[1:3, chosen] *= factor
            block.values[4, chosen] *= factor**2
        for alert in engine.evaluate(header(), keys, block):
            if any(finding.series == keys[index] for finding in alert.findings for index in chosen):
                found.setdefault(begin, block.step - begin + 1)
    return [found.get(begin) for begin in begins]


def cost(num_series: int, rules: Any, keys: list[SeriesKey], *, num_steps: int = 600) -> list[float]:
    """Return CPU milliseconds of each step after the windows are full."""
    engine = RuleEngine(rules)
    run = CleanRun(num_series, num_steps, seed=0, start=False)
    prepared = [(run.moments(step)[:, NUM_SINGLES:]) for step in range(50)]
    series = np.arange(num_series, dtype=np.uint32)
    spent = []
    for step in range(num_steps):
        block = StatBlock(step=step, time_s=0.0, series=series, values=np.ascontiguousarray(prepared[step % 50]))
        before = time.process_time_ns()
        engine.evaluate(header(), keys, block)
        spent.append((time.process_time_ns() - before) / 1e6)
    return spent[num_steps // 2 :]


def node_cost(num_ranks: int, num_series: int, *, num_steps: int = 300) -> list[float]:
    """Return CPU milliseconds per rank and step, for steps of all ranks of a node that are compared with each other."""
    keys = [SeriesKey(NODE_KINDS[n * len(NODE_KINDS) // num_series], f"h.{n}") for n in range(num_series)]
    keys += [SeriesKey(Kind.STEP, "duration_seconds"), SeriesKey(Kind.COMM, "dp.all_reduce", "wait_seconds")]
    placement = Placement(dtype="bfloat16", shape=(4096,), replicated_over=("dp",))
    placements = (placement,) * num_series + (None, None)
    headers = [
        dataclasses.replace(header(rank, num_ranks=num_ranks), series=tuple(keys), placements=placements)
        for rank in range(num_ranks)
    ]
    engine, run = RuleEngine(load_rules()), CleanRun(num_series, num_steps, seed=0, start=False)
    prepared = [np.roll(run.moments(step), -NUM_SINGLES, axis=1) for step in range(50)]
    series = np.arange(len(keys), dtype=np.uint32)
    spent = []
    for step in range(num_steps):
        block = StatBlock(step=step, time_s=0.0, series=series, values=np.ascontiguousarray(prepared[step % 50]))
        before = time.process_time_ns()
        for each in headers:
            engine.evaluate(each, keys, block)
        spent.append((time.process_time_ns() - before) / 1e6 / num_ranks)
    return spent[num_steps // 2 :]


def report_cost() -> None:
    gradients = [SeriesKey(Kind.GRAD_REDUCED, f"h.{number}") for number in range(3000)]
    mixed = series_table(3000)[NUM_SINGLES:]
    cases: list[tuple[str, Any, list[SeriesKey]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for window in (128, 256):
            path = Path(folder) / f"{window}.yaml"
            path.write_text(COST_RULES.replace("WINDOW", str(window)))
            cases.append((f"4 rules, 2 statistics, window {window}", load_rules(path), gradients))
    cases.append((f"the {len(load_rules())} default rules, 3 kinds", load_rules(), mixed))
    print("CPU ms per step of one rank with 3000 series (median, min, p95 of 300 steps):")
    for name, rules, keys in cases:
        spent = sorted(cost(3000, rules, keys))
        p95 = spent[int(0.95 * len(spent))]
        print(f"  {name}: {statistics.median(spent):.2f}  {spent[0]:.2f}  {p95:.2f}")
    spent = sorted(node_cost(8, 3000))
    print("the default rules on a node of 8 ranks with 3000 series each, per rank and step, ranks compared:")
    print(f"  {statistics.median(spent):.2f}  {spent[0]:.2f}  {spent[int(0.95 * len(spent))]:.2f}")


def report_false_alarms(num_series: int, num_steps: int, num_seeds: int) -> None:
    print(f"false grouped alerts in {num_steps} clean steps of {num_series} series, one run per seed:")
    for start in (False, True):
        for half, first in (("tuned on", 0), ("held out", 1)):
            found = [false_alarms(num_series, num_steps, seed=seed, start=start) for seed in range(first, num_seeds, 2)]
            by_rule = dict(Counter(alert.rule for alerts in found for alert in alerts))
            kind = "quick start, decaying rate" if start else "steady"
            print(f"  {kind}, {half} seeds: {[len(alerts) for alerts in found]} {by_rule or ''}")


def report_recall(num_series: int, num_seeds: int) -> None:
    print("injected changes of 1 % of the series of one kind for 10 steps (20 per seed, held-out seeds):")
    for factor in (3.0, 5.0, 10.0, 30.0, 100.0, 0.1, 0.01):
        found = [delay for seed in range(1, num_seeds, 2) for delay in delays(num_series, factor, seed=seed)]
        seen = [delay for delay in found if delay is not None and delay <= 5]
        middle = statistics.median(seen) if seen else float("nan")
        print(f"  times {factor:g}: {len(seen)} of {len(found)} found within 5 steps, median {middle:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("cost", "false-alarms", "recall"))
    parser.add_argument("--series", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.only in (None, "cost"):
        report_cost()
    if arguments.only in (None, "false-alarms"):
        report_false_alarms(arguments.series, arguments.steps, arguments.seeds)
    if arguments.only in (None, "recall"):
        report_recall(arguments.series, arguments.seeds)


if __name__ == "__main__":
    main()
