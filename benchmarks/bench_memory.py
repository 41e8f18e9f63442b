"""What a monitor adds to the memory of a rank: bare and watched ranks train the same GPT, each in a process of its own.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_memory               # a minute
    OMP_NUM_THREADS=1 python -m benchmarks.bench_memory --tokens 2048

Printed are the medians of the peak of resident memory, and of what is resident after the last step, over those of the
bare ranks. Both are of the whole process, so with everything that the monitor imports.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.bench_step import CONTEXT, LEVELS, make_step, watch

BARE = "bare"
NOTHING_DUE = "nothing due"


def train(level: str, tokens: int, steps: int) -> dict[str, float]:
    """Train in this process, watched by `level`; return the peak of its memory and what it has at the end, in MB."""
    torch.set_num_threads(1)
    model, optimizer, step = make_step(torch.float32, tokens // CONTEXT)
    step()
    with tempfile.TemporaryDirectory() as folder:
        if level != BARE:
            interval = 1_000_000 if level == NOTHING_DUE else 1
            watch(
                "trainermon", "gradients" if level == NOTHING_DUE else level, interval, Path(folder), model, optimizer
            )
        for _ in range(steps):
            step()
        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "end": resident_mb()}


def resident_mb() -> float:
    """Return the memory of this process that is resident now, in MB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def measured(level: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Return what `train` finds in a new process."""
    command = [sys.executable, "-m", "benchmarks.bench_memory", "--train", level]
    command += ["--tokens", str(arguments.tokens), "--steps", str(arguments.steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        print(json.dumps(train(arguments.train, arguments.tokens, arguments.steps)))
        return
    levels = [BARE, NOTHING_DUE, *LEVELS]
    rounds = [{level: measured(level, arguments) for level in levels} for _ in range(arguments.repeats)]
    print("| level | peak | after the last step |\n|---|---|---|")
    for level in levels:
        peak, end = (statistics.median(each[level][what] for each in rounds) for what in ("peak", "end"))
        more = [statistics.median(each[level][what] - each[BARE][what] for each in rounds) for what in ("peak", "end")]
        print(f"| {level} | {peak:,.0f} MB, {more[0]:+.0f} | {end:,.0f} MB, {more[1]:+.0f} |")


if __name__ == "__main__":
    main()
