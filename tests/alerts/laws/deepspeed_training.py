"""Trainings of a small model with DeepSpeed on two gloo ranks, sound or with one silent error, each in its own folder.

python deepspeed_training.py FOLDER NAME …
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.alerts.laws.training import KINDS
from tests.frameworks.deepspeed.engines import Case, loss_of, make_engine, start, step_engine, tokens_of
from trainermon import TrainerMon

STEPS, MICRO_STEPS = 6, 2
CASES = {
    "lost on one": Case(0, "fp32", MICRO_STEPS),
    "stage 0": Case(0, "bf16", MICRO_STEPS),
    "stage 1": Case(1, "bf16", MICRO_STEPS),
    "stage 2": Case(2, "bf16", MICRO_STEPS),
    "stage 3": Case(3, "bf16", MICRO_STEPS),
}


def lose_on_one(engine: Any) -> None:
    """Let rank 1 lose half of what every reduction gave it."""
    reduce = engine.allreduce_gradients

    def reduce_and_lose(*arguments: Any, **options: Any) -> None:
        reduce(*arguments, **options)
        if dist.get_rank() == 1 and engine.is_gradient_accumulation_boundary():
            for parameter in engine.module.parameters():
                if isinstance(parameter.grad, torch.Tensor):
                    parameter.grad.mul_(0.5)

    engine.allreduce_gradients = reduce_and_lose


def train(folder: Path, name: str) -> None:
    engine = make_engine(CASES[name])
    if name == "lost on one":
        lose_on_one(engine)
    config = KINDS | {"output_dir": str(folder), "spool_dir": str(folder), "agent": {"start": False}}
    with TrainerMon(config) as monitor:
        monitor.set_monitor(engine, grad_acc_steps=MICRO_STEPS)
        for step in range(STEPS):
            for micro_step in range(MICRO_STEPS):
                engine.backward(loss_of(engine, tokens_of(step, micro_step, dist.get_rank())))
                step_engine(engine)


if __name__ == "__main__":
    start()
    for case in sys.argv[2:]:
        train(Path(sys.argv[1], case), case)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
