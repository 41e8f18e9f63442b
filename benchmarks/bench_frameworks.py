"""What a monitor costs a step of Megatron-Core or DeepSpeed: two jobs of two ranks in turn, one of them watched.

python benchmarks/bench_frameworks.py --workload megatron-dp-distributed --level state --monitor trainermon
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default=WORKLOADS[1])
    parser.add_argument("--level", choices=["gradients", "state", "activations", "collectives"], default="gradients")
    parser.add_argument("--monitor", choices=["trainermon", "mindstudio"], default="trainermon")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"

        def start(monitor: str) -> Job:
            options = [arguments.workload, arguments.level, monitor, f"{folder}/{monitor}"]
            return Job.start(sys.executable, JOB, options, world_size=2, log=log)

        ratio, peak_mb = compare(start("none"), start(arguments.monitor), pairs=arguments.pairs, warm_up=2)
    if arguments.json:
        print("RESULT " + json.dumps(dataclasses.asdict(ratio) | {"peak_mb": peak_mb}))
    else:
        print(f"{arguments.monitor} {arguments.workload} {arguments.level}: {ratio.text()}, peak {peak_mb:+.0f} MB")


if __name__ == "__main__":
    main()
