"""What `check follow` costs: the training that dumps sampled steps, and the follower that judges them.

    python benchmarks/bench_follow.py
    python benchmarks/bench_follow.py --pairs 20 --steps 5

A bare step of a GPT with four layers (width 192, 256 tokens; float32) and one with a PrecisionDebugger in it are run in
turn; what counts is the ratio of their CPU times, one thread. The follower's cost is its own CPU time for a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.bench_online import training
from benchmarks.measure import cpu_ms, interleaved
from trainermon import PrecisionDebugger
from trainermon.cli import main as trainermon

CASES: dict[str, dict[str, Any]] = {
    "step not due": {"step_interval": 1_000_000, "step": ["1-999999"]},
    "step skipped, the folder is full": {"max_pending": 1},
    "step dumped": {},
}


def debugged(step: Callable[[], object], folder: Path, settings: dict[str, Any]) -> Callable[[], None]:
    """Return a step of a script that dumps into `folder` as `settings` say."""
    config = folder / "config.json"
    config.write_text(json.dumps({"task": "tensor", "level": "L1", "dump_path": str(folder / "dumps"), **settings}))
    debugger = PrecisionDebugger(config)

    def run() -> None:
        debugger.start()
        step()
        debugger.stop()
        debugger.step()

    return run


def training_cost(case: str, pairs: int) -> dict[str, Any]:
    """Return the ratio of the CPU times of a step with a debugger and a bare one."""
    step = training(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        ratio = interleaved(step, debugged(step, Path(folder), CASES[case]), pairs=pairs, warm_up=2)
        PrecisionDebugger.close()
    return {"case": case, **{key: round(value, 3) for key, value in dataclasses.asdict(ratio).items()}}


def follower_cost(steps: int) -> dict[str, Any]:
    """Return the CPU time in seconds of a follower for a step, the first left out; and the size of its dump."""
    step = training(torch.float32)
    with tempfile.TemporaryDirectory() as name:
        run = debugged(step, Path(name), {})
        folder = Path(name) / "dumps"
        durations = []
        size = 0
        for _ in range(steps + 1):
            run()
            size = sum(path.stat().st_size for path in folder.glob("step*/**/*") if path.is_file())
            durations.append(cpu_ms(lambda: trainermon(["check", "follow", str(folder), "--once"])) / 1e3)
        PrecisionDebugger.close()
        result = json.loads((folder / "checked" / "followed_steps.jsonl").read_text().splitlines()[-1])["result"]
    median = sorted(durations[1:])[steps // 2]
    return {"case": "follower", "cpu_s": round(median, 2), "dump_mb": round(size / 1e6, 1), "rank": result["ranks"][0]}


def main() -> None:
    """Print one JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        print(json.dumps(training_cost(case, arguments.pairs)), flush=True)
    print(json.dumps(follower_cost(arguments.steps)), flush=True)


if __name__ == "__main__":
    main()
