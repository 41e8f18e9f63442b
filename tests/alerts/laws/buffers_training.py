"""A model with a BatchNorm on two gloo ranks of DDP.

    python buffers_training.py CASE FOLDER

CASE: `broadcast` (as DDP does), `local` (broadcast_buffers=False), `frozen` (the norm does not learn statistics).
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainermon import TrainerMon


def main(case: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    inner.register_buffer("seen", torch.full((2,), float(dist.get_rank())), persistent=False)  # may differ
    model = DistributedDataParallel(inner, broadcast_buffers=case == "broadcast")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = TrainerMon({"output_dir": str(folder), "spool_dir": str(folder), "agent": {"start": False}})
    monitor.set_monitor(model, optimizer, grad_acc_steps=2)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _step in range(25):
        inner[1].train(case != "frozen")
        for is_last in (False, True):
            model.require_backward_grad_sync = is_last
            loss = model(torch.randn(16, 8, generator=draw)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
