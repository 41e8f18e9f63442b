"""A synchronous job: rank 1 works 1.5 times as long from step 40 on. `ddp`, or `own`: gradients reduced by itself."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from trainermon import TrainerMon

NUM_STEPS, FIRST_SLOW = 70, 40
WORK_S = 0.1  # long beside what a busy machine adds to it


def main(folder: str, way: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    watched = nn.parallel.DistributedDataParallel(model) if way == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {
        "spool_dir": f"{folder}/spool",
        "output_dir": folder,
        "run_id": "run",
        "agent": {"start": False},
        "cc_distribution": {"enable": way == "own"},
    }
    with TrainerMon(settings) as monitor:
        monitor.set_monitor(watched, optimizer)
        for step in range(NUM_STEPS):
            time.sleep(WORK_S * (1.5 if rank == 1 and step >= FIRST_SLOW else 1.0))
            watched(torch.randn(4, 16)).square().mean().backward()
            for parameter in model.parameters() if way == "own" else ():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
