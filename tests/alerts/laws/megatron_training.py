"""Trainings of a small Megatron GPT on two gloo ranks, sound or with one silent error, each in a folder of its name.

python megatron_training.py FOLDER NAME …
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.alerts.laws.training import KINDS
from tests.frameworks.megatron import gpt
from trainermon import TrainerMon

STEPS = 6


def unmark(model: nn.Module) -> None:
    """Let the gradients of final norms be those of the rank's own part of the sequence."""
    for name, parameter in model.named_parameters():
        if "final_layernorm" in name:
            vars(parameter)["sequence_parallel"] = False


def uncount(model: nn.Module) -> None:
    """Let the norm count these weights on one tensor-parallel rank only, as if they were copies."""
    for name, parameter in model.named_parameters():
        if name.endswith("linear_fc1.weight"):
            vars(parameter)["tensor_model_parallel"] = False


def share_experts(chunk: nn.Module) -> None:
    """Average the gradients of experts over the ranks, which hold different ones."""
    for name, parameter in chunk.named_parameters():
        if "local_experts" in name:
            gradient = vars(parameter)["main_grad"]
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()


def train(folder: Path, *, break_model: Callable[[nn.Module], None] | None = None, **options: Any) -> None:
    layout = gpt.Layout(**options)
    gpt.initialise(layout)
    chunks, optimizer = gpt.build(layout)
    if break_model is unmark:
        unmark(chunks[0])
    config = KINDS | {"output_dir": str(folder), "spool_dir": str(folder), "agent": {"start": False}}
    with TrainerMon(config) as monitor:
        monitor.set_monitor(chunks, gpt.MICRO_BATCHES, optimizer)
        if break_model is uncount:
            uncount(chunks[0])  # the monitor knows by then how they are spread
        if break_model is share_experts:
            whole_step = optimizer.step
            optimizer.step = lambda: (share_experts(chunks[0]), whole_step())[1]
        for step in range(STEPS):
            gpt.train_step(layout, chunks, optimizer, step)


TRAININGS = {
    "unmarked norm": partial(train, break_model=unmark, tp=2, sp=True),
    "shared experts": partial(train, break_model=share_experts, ep=2, experts=4),
    "uncounted weights": partial(train, break_model=uncount, tp=2),
    "sequence parallel": partial(train, tp=2, sp=True),
    "context parallel": partial(train, cp=2),
    "tied stages": partial(train, pp=2),
    "experts": partial(train, ep=2, experts=4),
    "per-token loss": partial(train, per_token_loss=True),
    "clipped shards": partial(train, distributed_optimizer=True, overlap=True, dtype=torch.bfloat16, clip=0.1),
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for training in sys.argv[2:]:
        TRAININGS[training](Path(sys.argv[1], training))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own end is not always clean
