"""What it costs to try the calls of a training step while it runs: task free_benchmark, and AccuracyDispatch.

    python benchmarks/bench_online.py
    python benchmarks/bench_online.py --only add_noise --dtype bfloat16 --pairs 10

A bare step and one whose calls are tried are run in turn, on a GPT with four layers (width 192, 256 tokens); what
counts is the ratio of their CPU times, one thread. Where most steps are idle, ten in a row count as one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import bench_step
from benchmarks.measure import interleaved
from trainermon import AccuracyDispatch, PrecisionDebugger

CASES: dict[str, dict[str, Any]] = {
    "improve_precision": {},
    "add_noise": {"pert_mode": "add_noise"},
    "bit_noise": {"pert_mode": "bit_noise"},
    "change_value": {"pert_mode": "change_value"},
    "no_change": {"pert_mode": "no_change"},
    "relations": {"pert_mode": "relations"},
    "improve_precision every 50": {"every": 50},
    "add_noise every 50": {"pert_mode": "add_noise", "every": 50},
}
DISPATCHES: dict[str, dict[str, Any]] = {
    "dispatch device64": {"reference": "device64"},
    "dispatch cpu, 1 of 100": {"reference": "cpu", "sample": 100},
}


STEPS_AT_ONCE = 10


def training(dtype: torch.dtype) -> Callable[[], object]:
    """Return a step without its optimizer."""
    bench_step.LAYERS, bench_step.WIDTH, bench_step.VOCABULARY = 4, 192, 2048
    torch.manual_seed(0)
    model = bench_step.GPT().to(dtype)
    tokens = torch.randint(bench_step.VOCABULARY, (bench_step.BATCH, bench_step.CONTEXT + 1))

    def step() -> None:
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        model.zero_grad()

    return step


@contextlib.contextmanager
def tried(case: str, step: Callable[[], object], folder: Path) -> Iterator[Callable[[], object]]:
    """Give the step with its calls tried as `case` says."""
    if case in DISPATCHES:
        dispatch = AccuracyDispatch(dump_path=folder, **DISPATCHES[case])

        def judged() -> None:
            with dispatch:
                step()

        yield judged
        return
    config = folder / "config.json"
    task = {"task": "free_benchmark", "dump_path": str(folder / "free"), "free_benchmark": CASES[case]}
    config.write_text(json.dumps(task))
    debugger = PrecisionDebugger(config)

    def debugged() -> None:
        debugger.start()
        step()
        debugger.stop()
        debugger.step()

    yield debugged
    PrecisionDebugger.close()


def measure(case: str, dtype: torch.dtype, pairs: int) -> dict[str, Any]:
    """Return the ratio of the CPU times of a tried step and a bare one: median, smallest and largest of the pairs."""
    step = training(dtype)
    with tempfile.TemporaryDirectory() as folder, tried(case, step, Path(folder)) as trying:
        steps = STEPS_AT_ONCE if "50" in case or "100" in case else 1
        ratio = interleaved(_repeated(step, steps), _repeated(trying, steps), pairs=pairs, warm_up=2)
    numbers = {key: round(value, 3) for key, value in dataclasses.asdict(ratio).items()}
    return {"case": case, "dtype": str(dtype).removeprefix("torch."), **numbers}


def _repeated(step: Callable[[], object], times: int) -> Callable[[], object]:
    def steps() -> None:
        for _ in range(times):
            step()

    return steps


def main() -> None:
    """Print one JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the name of a case")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--pairs", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in (*CASES, *DISPATCHES):
        if arguments.only in case:
            print(json.dumps(measure(case, getattr(torch, arguments.dtype), arguments.pairs)), flush=True)


if __name__ == "__main__":
    main()
