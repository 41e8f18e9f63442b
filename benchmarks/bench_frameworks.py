"""What a monitor costs a step of Megatron-Core or DeepSpeed: two jobs of two ranks in turn, one of them watched.

python benchmarks/bench_frameworks.py --workload megatron-dp-distributed --level state --monitor trainermon
python benchmarks/bench_frameworks.py --workload megatron-tp --level collectives-alone --pairs 100

CPU times are the mean of both ranks. Of the collectives alone, the least that it could cost is told too: their
operands, each read once by the best plain reader of the same run, and 4 us for each call. With `--base activations`,
the other job is watched as well, on that level.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.bench_step_limit import StepLimit
from benchmarks.lockstep import Job, compare

JOB = Path(__file__).with_name("framework_jobs.py")
WORKLOADS = (
    "megatron-dp",
    "megatron-dp-distributed",
    "megatron-dp-distributed-bf16",
    "megatron-tp",
    "deepspeed-1",
    "deepspeed-2",
    "deepspeed-3",
)
ALONE = "collectives-alone"
LEVELS = ("gradients", "state", "activations", "collectives", ALONE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default=WORKLOADS[1])
    parser.add_argument("--level", choices=LEVELS, default="gradients")
    parser.add_argument("--monitor", choices=["trainermon", "mindstudio"], default="trainermon")
    parser.add_argument("--base", choices=["none", *LEVELS], default="none", help="level of the other job")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"

        def start(level: str, monitor: str, name: str) -> Job:
            options = [arguments.workload, level, monitor, f"{folder}/{name}"]
            return Job.start(sys.executable, JOB, options, world_size=2, log=log)

        limit_ms = least_ms(start(ALONE, "limit", "limit"), Path(folder) / "limit") if arguments.level == ALONE else 0.0
        base = "none" if arguments.base == "none" else arguments.monitor
        jobs = start(arguments.base, base, "base"), start(arguments.level, arguments.monitor, "watched")
        ratio, peak_mb = compare(*jobs, pairs=arguments.pairs, warm_up=2)
    if arguments.json:
        print("RESULT " + json.dumps(dataclasses.asdict(ratio) | {"peak_mb": peak_mb}))
        return
    limit = f", limit {limit_ms:.2f} ms, {ratio.extra_ms / limit_ms:.2f} x" if limit_ms else ""
    print(f"{arguments.monitor} {arguments.workload} {arguments.level}: {ratio.text()}{limit}, peak {peak_mb:+.0f} MB")


def least_ms(job: Job, folder: Path) -> float:
    """Return the least CPU time in milliseconds that the collectives of a step take to read, the mean of the ranks."""
    try:
        job.ready()
        job.finish()
    finally:
        job.kill()
    least = []
    for rank in range(len(job.ranks)):
        found = json.loads((folder / str(rank)).read_text())
        least.append(StepLimit(found["bytes"], found["calls"]).ms(found["bytes_per_ms"]))
    return sum(least) / len(least)


if __name__ == "__main__":
    main()
