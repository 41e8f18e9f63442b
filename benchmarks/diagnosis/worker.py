"""One rank of a split: trains one case after the other under the real monitor.

python benchmarks/diagnosis/worker.py FOLDER CASES_JSON
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.diagnosis.cases import MEGATRON, ROLES, Case, modules_of
from benchmarks.diagnosis.faults import injected
from benchmarks.diagnosis.jobs import Job
from trainermon import TrainerMon
from trainermon.replay import agreement

ROOT = Path(__file__).parents[2]
STEPS_AFTER = 2
CONFIG = json.loads((ROOT / "examples" / "monitor_config.json").read_text(encoding="utf-8"))


def main() -> None:
    folder = Path(sys.argv[1])
    cases = [Case(**fields) for fields in json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))]
    logging.getLogger("trainermon").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    agreement.WAIT_S = 60.0  # a busy machine is not what is measured
    if cases[0].split.startswith("zero"):
        importlib.import_module("tests.frameworks.deepspeed.engines").start()
    elif cases[0].split != "plain":
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    trained = [train(case, folder, rank) for case in cases]
    mine = [dataclasses.asdict(case) for case in trained if case.rank == rank]
    (folder / f"{cases[0].split}-rank{rank}.json").write_text(json.dumps(mine), encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def train(case: Case, folder: Path, rank: int) -> Case:
    """Train one case, and return it as it was."""
    job = _build(case)
    config: dict[str, Any] = ({} if case.is_lean else CONFIG) | {"run_id": case.run_id, "agent": {"start": False}}
    config |= {"output_dir": str(folder / "output"), "spool_dir": str(folder / "spool")}
    losses: list[float] = []

    def record(loss: float) -> None:
        losses.append(loss)
        monitor.record(loss=loss)

    with TrainerMon(config) as monitor:
        monitor.set_monitor(job.model, job.optimizer, grad_acc_steps=job.micro_steps)
        for step in range(case.step + 1 + STEPS_AFTER):
            if (step, rank) == (case.step, case.rank):
                case = _settled(job, case)
                with injected(job, case):
                    job.step(record)
            else:
                job.step(record)
    if case.family:
        case = dataclasses.replace(case, harmless=_is_finite(job, losses))
    if dist.is_initialized():
        dist.barrier()
    return case


def _is_finite(job: Job, losses: list[float]) -> bool:
    weights = [
        job.weight_of(module)
        for module in job.modules.values()
        if next(module.parameters(recurse=False), None) is not None
    ]
    return all(map(math.isfinite, losses)) and all(bool(weight.isfinite().all()) for weight in weights)


def _build(case: Case) -> Job:
    if case.family:
        family_jobs = importlib.import_module("benchmarks.diagnosis.family_jobs")
        built: Job = family_jobs.build(case.split, case.family, case.seed, hooks_reduction=case.site == "reduction")
        return built
    if case.split in MEGATRON:
        megatron_jobs = importlib.import_module("benchmarks.diagnosis.megatron_jobs")
        job: Job = megatron_jobs.build(case.split, case.seed, experts=case.role == "router", recompute=case.is_lean)
        return job
    jobs = importlib.import_module("benchmarks.diagnosis.jobs")
    return jobs.build(case.split, case.seed, recompute=case.is_lean)  # type: ignore[no-any-return]


def _settled(job: Job, case: Case) -> Case:
    """Return the case with a module of whose moments this rank has a part."""
    if case.site != "moment":
        return case
    if case.family:
        names = [
            case.module,
            *importlib.import_module("benchmarks.diagnosis.family_jobs").places_of(case.family).holders,
        ]
    else:
        names = [case.module, *(name for role in (case.role, *ROLES) for name in modules_of(case.split, role))]
    held = (name for name in names if name in job.modules and job.moments_of(job.modules[name]))
    return dataclasses.replace(case, module=next(held))


if __name__ == "__main__":
    main()
