"""A training on two gloo ranks under torch's `Join`: three epochs of five batches on rank 0, of seven on rank 1.

python joined_training.py FOLDER HOW

Where HOW is "enabled" it is sound. "disabled, moved": both ranks have five, and rank 1 moves its weights.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.alerts.laws.training import KINDS
from trainermon import TrainerMon

EPOCHS, BATCHES = 3, (5, 7)


def main(folder: Path, how: str) -> None:
    dist.init_process_group("gloo")
    rank, is_enabled = dist.get_rank(), how == "enabled"
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    draw, target = torch.Generator().manual_seed(1 + rank), torch.randn(16, 8)
    checks = {"checksum_interval": 1, "output_dir": str(folder), "spool_dir": str(folder), "agent": {"start": False}}
    with TrainerMon(KINDS | checks) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(EPOCHS):
            with Join([model], enable=is_enabled):
                for _ in range(BATCHES[rank if is_enabled else 0]):
                    batch = torch.randn(32, 16, generator=draw)
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(model(batch), batch @ target)
                    monitor.record(loss=loss)
                    loss.backward()
                    optimizer.step()
            schedule.step()
            if "moved" in how and rank == 1:
                with torch.no_grad():
                    model.module[0].weight.mul_(1.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
