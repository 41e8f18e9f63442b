"""One rank of one training under the monitor, started as the guide says.

python benchmarks/silent/worker.py CASE healthy|broken FOLDER FIRST [unwatched]

It trains from step FIRST to the end, or to the step before which the case restarts; then a checkpoint lies in FOLDER.
Where it is unwatched, no monitor runs, and digests of the weights are kept after each step.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.silent.case import FRAMEWORKS, SilentCase, cases_of
from benchmarks.silent.loop import Loop, digest, rank_of_job
from trainermon import TrainerMon

CONFIG = Path(__file__).parents[2] / "examples" / "monitor_config.json"
HEAVY = {"deepspeed": "benchmarks.silent.deepspeed_zero.engine", "megatron": "benchmarks.silent.megatron_core.gpt"}
"""What is imported once for all ranks, before the cases, which are as well."""


def main() -> None:
    name, variant, folder, first = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    framework = name.partition("-")[0]
    case = next(case for case in cases_of(framework) if case.name == name)
    if framework == "deepspeed":
        importlib.import_module(HEAVY["deepspeed"]).start()
    elif case.ranks > 1 or framework == "megatron":
        dist.init_process_group("gloo")
    train(case, folder, first, broken=variant == "broken", unwatched=sys.argv[5:] == ["unwatched"])
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own end is not always clean


def train(case: SilentCase, folder: Path, first: int, *, broken: bool, unwatched: bool) -> None:
    """Train one rank, and write down its losses and a digest of its weights."""
    torch.manual_seed(0)
    loop = case.build(broken=broken)
    torch.manual_seed(1000 + rank_of_job() + first)  # dropout is each rank's own
    kept, is_first = folder / f"checkpoint{rank_of_job()}.pt", first == 0 and case.restart > 0
    if first:
        loop.resume(torch.load(kept, weights_only=False))
    last = case.restart if is_first else loop.steps
    facts = _bare(loop, first, last) if unwatched else _watched(loop, folder, first, last)
    if is_first:
        torch.save(loop.checkpoint(), kept)
    facts |= {"digest": digest(loop.model)}
    (folder / f"rank{rank_of_job()}-{first}.json").write_text(json.dumps(facts), encoding="utf-8")


def _watched(loop: Loop, folder: Path, first: int, last: int) -> dict[str, Any]:
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    config |= {"run_id": "run", "output_dir": str(folder), "spool_dir": str(folder / "spool")}
    monitor = TrainerMon(config | {"agent": {"linger_s": 0, "wait_s": 60}})
    options = {"start_iteration": first} if first else {}
    optimizer = () if loop.optimizer is None else (loop.optimizer,)
    monitor.set_monitor(loop.model, *optimizer, grad_acc_steps=loop.micro_steps, **options)
    losses = loop.run(monitor, first, last)
    monitor.close()
    return {"losses": losses}


class _Nobody:
    """Stands in for the monitor."""

    def record(self, **_values: Any) -> None:
        """Do nothing."""


def _bare(loop: Loop, first: int, last: int) -> dict[str, Any]:
    losses, digests = [], []
    for step in range(first, last):
        losses += loop.run(_Nobody(), step, step + 1)
        digests.append(digest(loop.model))
    return {"losses": losses, "after_steps": digests}


if __name__ == "__main__":
    main()
elif len(sys.argv) > 1 and (framework := sys.argv[1].partition("-")[0]) in FRAMEWORKS:
    if framework in HEAVY:
        importlib.import_module(HEAVY[framework])
    cases_of(framework)
