"""Trains the jobs of `frameworks.replay` with and without `PrecisionDebugger`, and says whether a bit differed."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.frameworks.replay.job import Job, same
from tests.ranks import run_ranks
from trainermon import PrecisionDebugger
from trainermon.dump.files.reader import read_dump

STEPS, DUMPED = 3, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training, and the level at which its second step is dumped: with its tensors where there are modules."""

    name: str
    build: Callable[[], Job]
    level: str

    @property
    def task(self) -> str:
        """What is dumped."""
        return "statistics" if self.level == "L1" else "tensor"


def train(case: Case, folder: Path | None) -> list[torch.Tensor]:
    """Return all the bits of a training: of every step, of the end, and of the generators."""
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    job = case.build()
    if folder is not None:
        PrecisionDebugger(dump_path=folder, level=case.level, task=case.task, step=[DUMPED])
    found = []
    for step in range(STEPS):
        PrecisionDebugger.start(job.model)
        found += [tensor.detach().clone() for tensor in job.step(step)]
        PrecisionDebugger.stop()
        PrecisionDebugger.step()
    PrecisionDebugger.close()
    found += [tensor.detach().clone() for tensor in job.bits()]
    return [*found, torch.get_rng_state(), torch.tensor([random.random(), np.random.rand()])]


def run(case: Case, folder: Path, plain: list[torch.Tensor]) -> dict[str, Any]:
    """Train with the dump on; return what a test has to look at on this rank."""
    found = train(case, folder / case.name)
    dump = read_dump(folder / case.name / f"step{DUMPED}" / f"rank{dist.get_rank()}")
    return {
        "same": same(plain, found),
        "errors": dump.info.first_error,
        "complete": dump.info.complete,
        "keys": [entry.key for entry in dump.entries],
        "parameters": sorted(
            {f"{entry.module}.{p.slot}" for entry in dump.entries for p in entry.parameters if p.nans is not None}
        ),
    }


def main(cases: list[Case]) -> None:
    """Run all cases, or those that are named on the command line; each rank writes what it found.

    Cases with the same `build` are held against one training without a dump.
    """
    torch.set_num_threads(1)
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    plain: dict[Any, list[torch.Tensor]] = {}
    results = {}
    for case in cases:
        if not only or case.name in only:
            if case.build not in plain:
                plain = {case.build: train(case, None)}
            results[case.name] = run(case, folder, plain[case.build])
            dist.barrier()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def results_of(worker: str, folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """Run the named cases of a worker of this folder on two ranks, and return what each found."""
    run_ranks(Path(__file__).with_name(f"{worker}.py"), str(folder), *names, timeout_s=900)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
