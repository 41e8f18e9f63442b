"""Who is blamed for a rank that hangs or dies: small gloo jobs that go wrong, as their agent tells it.

    python -m benchmarks.bench_hangs [--only ddp] [--json FILE]

Every job is divided over its ranks in one way, and has faults of which it goes on, or one of which it ends. A verdict
is right if it names the rank with the fault and no other; of a deadlock or of two ranks in different collectives, none.
It is run with the torch of the Python that runs it: docs/hangs.md has the figures of the CPU and of the CUDA build.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.agent.hang.jobs import Job

SPLITS = ("plain", "ddp", "fsdp", "tp", "pp")


class Scenario(NamedTuple):
    """A job and its faults, each `<step>:<kind>:<rank>`; `nobody`: there is no rank to blame."""

    name: str
    faults: tuple[str, ...]
    split: str = "plain"
    world_size: int = 2
    forks: bool = False
    nobody: bool = False


ENDS = ("kill", "exception", "segfault", "os_exit")
SCENARIOS = (
    *(Scenario("hangs", ("3:spin:1", "6:still:0", "9:stop:1"), split) for split in SPLITS),
    *(Scenario(f"{end} of rank {rank}", (f"3:{end}:{rank}",), split)
      for split in SPLITS for end, rank in (("kill", 1), ("exception", 0))),
    Scenario("lock and data loader", ("3:lock:1", "6:data:1")),
    Scenario("segfault", ("3:segfault:1",)),
    Scenario("os._exit", ("3:os_exit:1",)),
    Scenario("parent waits for rank 0 first", ("3:kill:1",), "ddp", forks=True),
    Scenario("parent waits for rank 0 first", ("3:exception:1",), "ddp", forks=True),
    Scenario("parent waits for rank 0 first", ("3:kill:0",), "ddp", forks=True),
    Scenario("parent waits for rank 0 first", ("3:os_exit:1",), "ddp", forks=True),
    Scenario("one of four", ("3:mismatch:2",), world_size=4),
    Scenario("one of four", ("3:spin:2",), "pp", world_size=4),
    Scenario("one of four", ("3:chain:2",), world_size=4),
    Scenario("one of four", ("3:kill:2",), "ddp", world_size=4),
    Scenario("other collective", ("3:mismatch:1",), nobody=True),
    Scenario("deadlock", ("3:order:1",), nobody=True),
)  # fmt: skip


class Outcome(NamedTuple):
    scenario: str
    split: str
    fault: str
    is_right: bool
    text: str


def outcomes(scenario: Scenario) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
        options = {"world_size": scenario.world_size, "split": scenario.split, "forks": scenario.forks}
        job = Job(Path(folder), *scenario.faults, **options)
        try:
            for fault in scenario.faults:
                yield judged(job, scenario, fault)
        finally:
            job.close()


def judged(job: Any, scenario: Scenario, fault: str) -> Outcome:
    step, kind, rank = fault.split(":")
    try:
        job.reached(int(step))
        if kind == "stop":
            job.signal(int(rank), signal.SIGSTOP)
        verdict = job.report("rank-dead" if kind in ENDS else "hang", int(step))["verdict"]
    except AssertionError as error:
        return Outcome(scenario.name, scenario.split, fault, is_right=False, text=str(error).splitlines()[0])
    finally:
        job.go(int(step))
        if kind == "stop":
            job.signal(int(rank), signal.SIGCONT)
    blamed = [culprit["rank"] for culprit in verdict["culprits"]]
    is_right = blamed == ([] if scenario.nobody else [int(rank)])
    return Outcome(scenario.name, scenario.split, fault, is_right, verdict["text"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SPLITS, help="only jobs that are divided in this way")
    parser.add_argument("--json", type=Path, help="where to write every verdict")
    options = parser.parse_args()
    found = []
    for scenario in SCENARIOS:
        if options.only in (None, scenario.split):
            for outcome in outcomes(scenario):
                found.append(outcome)
                sign = "right" if outcome.is_right else "WRONG"
                print(f"{sign}  {outcome.split:5} {outcome.fault:14} {outcome.scenario}: {outcome.text}", flush=True)
    num_right = sum(outcome.is_right for outcome in found)
    print(f"torch {torch.__version__}: {num_right} of {len(found)} verdicts right ({num_right / len(found):.0%})")
    if options.json:
        options.json.write_text(json.dumps([outcome._asdict() for outcome in found], indent=1))
    sys.exit(num_right < 0.95 * len(found))


if __name__ == "__main__":
    main()
