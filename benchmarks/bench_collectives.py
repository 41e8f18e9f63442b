"""What it costs to watch a collective: an all-reduce over a gloo group of one, bare and watched in turn in one process.

    python benchmarks/bench_collectives.py --monitor trainermon
    python benchmarks/bench_collectives.py --monitor mindstudio     # in an environment with mindstudio-probe

Of trainermon, what it costs beside the statistics kernel is told too: that of a call which is followed by the kernel is
taken off. And what it costs per step to count the collectives of six groups when no call is watched, and per call to
note it, as is done for all. In training, a step's other work has emptied the caches before each call: `cold_us` and
`cold_note_us` are the extra time of a call, by the clock, after 32 MB were copied.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.measure import summarise

CALLS = 200
GROUPS = 6
COLD_CALLS = 40


class NoJournal:
    def add_series(self, *_: Any) -> None: ...

    def append_block(self, *_: Any) -> None: ...


def own_us(action: Callable[[], object]) -> float:
    """Return the CPU time of this thread in microseconds: gloo's threads are no part of what a monitor costs."""
    begin = time.thread_time_ns()
    action()
    return (time.thread_time_ns() - begin) / 1e3


def calls_of(action: Callable[[], object]) -> float:
    """Return the CPU time of a call in microseconds, over a step of 200 of them."""

    def step() -> None:
        for _ in range(CALLS):
            action()

    return own_us(step) / CALLS


def ours(action: Callable[[], object], operand: torch.Tensor, *, before: bool) -> Callable[[], tuple[float, float]]:
    """Return what measures a watched step of ours: cost of a call, and of the kernel where it runs between calls."""
    from trainermon.core.config import CollectivesConfig
    from trainermon.hooks.guard import FaultGuard
    from trainermon.monitor.taps import process_groups
    from trainermon.monitor.taps.collectives import CollectiveTaps
    from trainermon.monitor.taps.collector import Collector
    from trainermon.statistics.kernel import moments

    process_groups._PLAIN_BACKENDS = frozenset()  # read what a group of one writes, as of any other group
    collector = Collector(torch.device("cpu"), NoJournal())  # type: ignore[arg-type]
    config = CollectivesConfig(enable=True, cc_pre_hook=before)
    taps = CollectiveTaps(collector, FaultGuard(print), purposes={}, config=config)
    row = torch.empty(1, 8, dtype=torch.float64)

    def with_kernel() -> None:
        action()
        moments((operand,), row)

    def measure() -> tuple[float, float]:
        with_kernel_us = calls_of(with_kernel)
        taps.attach()
        watched_us = calls_of(action)
        taps.detach()
        collector.reset_step()
        return watched_us, with_kernel_us

    return measure


def theirs(action: Callable[[], object], folder: str, *, before: bool) -> Callable[[], tuple[float, float]]:
    """Return what measures a watched step of the other monitor; it has no kernel of its own to take off."""
    os.environ["MONITOR_OUTPUT_DIR"] = folder
    from msprobe.pytorch import TrainerMon
    from msprobe.pytorch.monitor.module_hook import api_register

    path = Path(folder, "config.json")
    wanted = {"enable": True, "cc_pre_hook": before}
    config = {"targets": {}, "format": "csv", "ops": ["min", "max", "mean", "norm", "nans"], "cc_distribution": wanted}
    path.write_text(json.dumps(config))
    watcher = TrainerMon(str(path), params_have_main_grad=False)
    model = torch.nn.Linear(2, 2)
    watcher.set_monitor(model, optimizer=torch.optim.AdamW(model.parameters()), grad_acc_steps=1)
    api_register.restore_api()

    def measure() -> tuple[float, float]:
        bare_us = calls_of(action)
        api_register.redirect_api()
        watched_us = calls_of(action)
        api_register.restore_api()
        for context in watcher.cc_context.values():
            context.reset()
        return watched_us, bare_us

    return measure


def per_step_us(steps: int) -> float:
    """Return what it costs to count a step's collectives of six groups without watching one."""
    from trainermon.core.config import CollectivesConfig
    from trainermon.hooks.guard import FaultGuard
    from trainermon.monitor.taps.collectives import CollectiveTaps
    from trainermon.monitor.taps.collector import Collector

    groups = [dist.new_group([0]) for _ in range(GROUPS - 1)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    collector = Collector(torch.device("cpu"), NoJournal())  # type: ignore[arg-type]
    taps = CollectiveTaps(collector, FaultGuard(print), purposes={}, config=CollectivesConfig())
    taps.attach()

    def step() -> None:
        taps.step_ended()
        taps.new_step()

    step()
    return statistics.median(own_us(step) for _ in range(steps))


def note_us(action: Callable[[], object], pairs: int) -> float:
    """Return what it costs to note a call that is waited for at once."""
    from trainermon.monitor.taps.noted_calls import NotedCalls

    extra_us = []
    for _ in range(pairs):
        bare_us = calls_of(action)
        noted = NotedCalls()
        noted.attach()
        extra_us.append(calls_of(action) - bare_us)
        noted.detach()
    return statistics.median(extra_us)


def cold_call_us(action: Callable[[], object], passing: list[torch.Tensor]) -> float:
    """Return the median time of a call in microseconds, each made after `passing` has gone through the caches."""
    times_us = []
    for _ in range(COLD_CALLS):
        for tensor in passing:
            tensor.add_(1.0)
        begin = time.perf_counter_ns()
        action()
        times_us.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times_us)


def cold_us(elements: int, pairs: int, *, before: bool) -> dict[str, float]:
    """Return what it costs to watch and to note a call that communicates with nobody, from cold caches."""
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    from trainermon.core.config import CollectivesConfig
    from trainermon.hooks.guard import FaultGuard
    from trainermon.monitor.taps.collectives import CollectiveTaps
    from trainermon.monitor.taps.collector import Collector
    from trainermon.monitor.taps.noted_calls import NotedCalls

    group, operand = dist.new_group([0], backend="fake"), torch.ones(elements)
    passing = [torch.zeros(1 << 22) for _ in range(2)]
    collector = Collector(torch.device("cpu"), NoJournal())  # type: ignore[arg-type]
    config = CollectivesConfig(enable=True, cc_pre_hook=before)
    taps = CollectiveTaps(collector, FaultGuard(print), purposes={}, config=config)
    extra_us: dict[str, list[float]] = {"cold_us": [], "cold_note_us": []}
    for _ in range(pairs):
        for name, watcher in (("cold_us", taps), ("cold_note_us", NotedCalls())):
            bare_us = cold_call_us(lambda: dist.all_reduce(operand, group=group), passing)
            watcher.attach()
            extra_us[name].append(cold_call_us(lambda: dist.all_reduce(operand, group=group), passing) - bare_us)
            watcher.detach()
        collector.reset_step()
    return {name: statistics.median(values) for name, values in extra_us.items()}


def arguments_of(line: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--monitor", choices=["trainermon", "mindstudio"], default="trainermon")
    parser.add_argument("--elements", type=int, default=1024)
    parser.add_argument("--before", action="store_true", help="operands before the call too")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(line)


def main() -> None:
    arguments = arguments_of(sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    operand = torch.ones(arguments.elements)

    def action() -> None:
        dist.all_reduce(operand)

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        if arguments.monitor == "trainermon":
            measure = ours(action, operand, before=arguments.before)
        else:
            measure = theirs(action, folder, before=arguments.before)
        measure()
        rows = [(calls_of(action), *measure()) for _ in range(arguments.pairs)]
        sides = 1 + arguments.before
        result = dataclasses.asdict(summarise([(bare, watched) for bare, watched, _ in rows]))
        result["bare_us"], result["extra_us"] = result.pop("base_ms"), result.pop("extra_ms")
        if arguments.monitor == "trainermon":
            beside = [watched - bare - sides * (kernel - bare) for bare, watched, kernel in rows]
            result |= {"beside_kernel_us": statistics.median(beside), "count_step_us": per_step_us(arguments.pairs)}
            result["note_us"] = note_us(action, arguments.pairs)
            result |= cold_us(arguments.elements, arguments.pairs, before=arguments.before)
    if arguments.json:
        print("RESULT " + json.dumps(result))
    else:
        numbers = ", ".join(f"{name} {value:.2f}" for name, value in result.items())
        print(f"{arguments.monitor}, all-reduce of {arguments.elements} elements: {numbers}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
