"""One rank of a small job that trains under the monitor, and goes wrong at step 3 as it is told.

    python rank_worker.py FAULT FOLDER SETTINGS

Ranks talk over gloo by `all_reduce` of their own in each step, so that its number in the group world is known: step s
enters #(s + 1). The last rank has the fault; the others train on and wait for it. A rank that has reached its fault
says so by the file FOLDER/reached<rank>, and goes on when there is a file FOLDER/go.
"""

import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainermon import TrainerMon

FAULT, FOLDER, SETTINGS = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
IS_LAST = RANK == SIZE - 1
FAULT_STEP, STEPS = 3, 6


class Items(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == FAULT_STEP:
            stand_still_until_told()
        return torch.ones(4)


def stand_still_until_told():
    reached()
    while not (FOLDER / "go").exists():
        time.sleep(0.01)


def spin_until_told():
    reached()
    while not (FOLDER / "go").exists():
        pass


def reached():
    (FOLDER / f"reached{RANK}").touch()


def wait_in(group):
    x = torch.ones(3)
    if FAULT == "mismatch":
        reached()
        if IS_LAST:
            dist.all_gather([torch.empty(3) for _ in range(SIZE)], x)
        else:
            dist.all_reduce(x)
    elif FAULT == "order":
        reached()
        first, second = (group, None) if IS_LAST else (None, group)
        dist.all_reduce(x, group=first)
        dist.all_reduce(x, group=second)


def die_or_stand_still(model, monitor):
    if FAULT == "spin":
        spin_until_told()
    elif FAULT in ("still", "sigstop", "sigkill"):
        stand_still_until_told()
    elif FAULT == "segfault":
        import ctypes

        reached()
        ctypes.string_at(0)
    elif FAULT == "exception":
        reached()
        raise RuntimeError("the batch is empty")
    elif FAULT == "os_exit":
        reached()
        os._exit(7)
    elif FAULT == "checkpoint":
        reached()
        torch.save(model.state_dict(), FOLDER / "checkpoint.pt")
        stand_still_until_told()
    elif FAULT == "marked":
        with monitor.phase("evaluation"):
            stand_still_until_told()
    elif FAULT == "recv":
        stand_still_until_told()


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    pair = dist.new_group(list(range(SIZE)), group_desc="pair")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = TrainerMon(SETTINGS)
    monitor.set_monitor(model, optimizer)
    data = iter(DataLoader(Items(), batch_size=1, num_workers=1, prefetch_factor=1)) if FAULT == "data" and IS_LAST else None
    for step in range(STEPS):
        x = next(data) if data is not None else torch.ones(1, 4)
        model(x).sum().backward()
        if step == FAULT_STEP:
            wait_in(pair)
            if IS_LAST:
                die_or_stand_still(model, monitor)
            if FAULT == "recv" and not IS_LAST:
                dist.recv(torch.empty(1), RANK + 1)
            elif FAULT == "recv" and RANK:
                dist.send(torch.empty(1), RANK - 1)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad) if parameter.dim() > 1 else None
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
