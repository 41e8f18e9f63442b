"""One rank of a small DDP training that goes on until it is told to stop; the last rank's targets go wrong on demand.

    python training_with_a_fault.py FOLDER RULES

`FOLDER/fault` starts the fault; the time of the first step with it is then in `FOLDER/fault.time`. `FOLDER/stop` ends
the training on all ranks after the same step.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainermon import TrainerMon

PACE_S = 0.1


def main(folder: Path, rules: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    monitor = TrainerMon({"rules": rules, "agent": {"linger_s": 0, "flush_s": 1}})
    monitor.set_monitor(model, optimizer)
    is_over = torch.zeros(1)
    while not is_over.item():
        is_bad = rank == dist.get_world_size() - 1 and (folder / "fault").exists()
        inputs = torch.randn(32, 8)
        targets = inputs.sum(1, keepdim=True) + 10 * is_bad
        loss = nn.functional.mse_loss(model(inputs), targets)
        monitor.record(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_bad and not (folder / "fault.time").exists():
            (folder / "fault.time").write_text(str(time.time()))
        time.sleep(PACE_S)  # the rest of a step
        is_over[:] = (folder / "stop").exists()
        dist.all_reduce(is_over)
    monitor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
