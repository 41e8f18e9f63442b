"""What the dump of a training step costs, beside mindstudio-probe's at the same level and task.

    python benchmarks/bench_dump.py --tool trainermon --level mix --task statistics
    python benchmarks/bench_dump.py --tool both --other-python .venv-bench/bin/python

A bare and a dumped step of one model are run in turn; what counts is the CPU time that the dump adds. Either tool has
its own process; with `both` the processes take turns, and the ratio is that of neighbours. Both write the same entries,
stacks and tree of calls for the same tensors (L0: 100 entries with 250 tensors, mix: 190 with 570). Dumps go into the
folder for temporary files: with `TMPDIR=/dev/shm` the figures are those of the tools, not of a disk's file system.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.measure import interleaved

LEVELS, TASKS = ("L0", "L1", "mix"), ("statistics", "tensor")
RESULT = "RESULT "


def measure(tool: str, level: str, task: str, pairs: int) -> dict[str, Any]:
    """Return the CPU milliseconds of a bare step, and those that the dump adds; medians of `pairs`."""
    torch.set_num_threads(1)
    model, step = _training()
    with tempfile.TemporaryDirectory() as folder:
        debugger = _debugger(tool, level, task, folder)

        def dumped() -> None:
            debugger.start(model)
            step()
            debugger.stop()
            debugger.step()

        ratio = interleaved(step, dumped, pairs=pairs, warm_up=1)
    return {"bare_ms": ratio.base_ms, "extra_ms": ratio.extra_ms}


def _training() -> tuple[torch.nn.Module, Callable[[], object]]:
    from benchmarks import bench_step

    bench_step.LAYERS, bench_step.WIDTH, bench_step.VOCABULARY = 4, 192, 2048
    torch.manual_seed(0)
    model = bench_step.GPT()
    tokens = torch.randint(bench_step.VOCABULARY, (bench_step.BATCH, bench_step.CONTEXT + 1))

    def step() -> None:
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        model.zero_grad()

    return model, step


def _debugger(tool: str, level: str, task: str, folder: str) -> Any:
    config = Path(folder) / "config.json"
    settings = {"task": task, "dump_path": f"{folder}/dump", "level": level, "rank": [], "step": [], task: {}}
    config.write_text(json.dumps(settings))
    if tool == "trainermon":
        from trainermon import PrecisionDebugger
    else:
        from msprobe.pytorch import PrecisionDebugger
    return PrecisionDebugger(str(config))


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the extra cost of both tools, and by how much ours is the cheaper one: median and range of the rounds."""
    rounds = []
    for _ in range(arguments.rounds):
        ours = _in_process(sys.executable, "trainermon", arguments)
        theirs = _in_process(arguments.other_python, "mindstudio", arguments)
        rounds.append((ours["extra_ms"], theirs["extra_ms"], ours["bare_ms"]))
    ratios = sorted(theirs / ours for ours, theirs, _ in rounds)
    return {
        "level": arguments.level,
        "task": arguments.task,
        "bare_ms": statistics.median(bare for _, _, bare in rounds),
        "trainermon_extra_ms": statistics.median(ours for ours, _, _ in rounds),
        "mindstudio_extra_ms": statistics.median(theirs for _, theirs, _ in rounds),
        "times_cheaper": statistics.median(ratios),
        "range": [ratios[0], ratios[-1]],
        "rounds": len(rounds),
    }


def _in_process(python: str, tool: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [python, __file__, "--json", "--tool", tool, "--level", arguments.level, "--task", arguments.task]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, "--pairs", str(arguments.pairs)], env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {result.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1].removeprefix(RESULT))
    return measured


def main() -> None:
    """Print one JSON line, with `--json` behind the word RESULT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=("trainermon", "mindstudio", "both"), default="both")
    parser.add_argument("--level", choices=LEVELS, default="mix")
    parser.add_argument("--task", choices=TASKS, default="statistics")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other-python", default=".venv-bench/bin/python")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.tool == "both":
        result = compare(arguments)
    else:
        result = measure(arguments.tool, arguments.level, arguments.task, arguments.pairs)
    print((RESULT if arguments.json else "") + json.dumps(result))


if __name__ == "__main__":
    main()
