"""Trains one small model on the same batches, whole or split over the ranks that there are: by DDP, by FSDP2."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainermon import TrainerMon

WIDTH, BATCH, NUM_STEPS = 6, 8, 4
ONE_RANK, TWO_RANKS = ("one",), ("ddp", "fsdp2", "fsdp2-doubled", "fsdp2-eps", "ddp-rate")
CONFIG = {
    "param_distribution": True,
    "mv_distribution": True,
    "xy_distribution": True,
    "agent": {"start": False},
    "replay": {"enabled": False},
    "escalation": {"enabled": False},
}


class Net(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH, eps=eps)
        self.down = nn.Linear(2 * WIDTH, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


def train(folder: Path, name: str) -> None:
    torch.manual_seed(5)
    model = Net(1e-3 if name.endswith("eps") else 1e-5)
    root: nn.Module = model
    if name.startswith("ddp"):
        root = DistributedDataParallel(model)
    elif name.startswith("fsdp2"):
        fully_shard(model)
    optimizer = torch.optim.AdamW(root.parameters(), lr=0.02 if name.endswith("rate") else 0.01)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = CONFIG | {"run_id": folder.name, "output_dir": str(folder.parent), "spool_dir": str(folder / "spool")}
    with TrainerMon(config) as monitor:
        monitor.set_monitor(root, optimizer)
        for step in range(NUM_STEPS):
            batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = root(batch.chunk(world_size)[rank]).pow(2).mean()
            monitor.record(loss=loss.detach())
            (loss * 2 if name.endswith("doubled") else loss).backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in ONE_RANK if dist.get_world_size() == 1 else TWO_RANKS:
        train(Path(sys.argv[1]) / name, name)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
