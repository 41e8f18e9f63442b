"""One rank of a small job that trains under the monitor, and goes wrong as it is told.

    python rank_worker.py FOLDER SETTINGS FAULT...

`SPLIT` says how the model is divided over the ranks, which decides in which call the others wait; with `FORKS` this
process is the parent of all ranks, and waits for them one after the other.

A fault is `<step>:<kind>:<rank>`: on that step that rank does something else before the step's one collective in the
group world, whose number is therefore step + 1. It says so by the file `FOLDER/reached<step>`, and where the fault is a
standstill it goes on when there is `FOLDER/go<step>`.
"""

import datetime
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainermon import TrainerMon

FOLDER, SETTINGS = Path(sys.argv[1]), json.loads(sys.argv[2])
FAULTS = {int(step): (kind, int(rank)) for step, kind, rank in (fault.split(":") for fault in sys.argv[3:])}
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SPLIT = os.environ.get("SPLIT", "plain")
STEPS = max(FAULTS) + 3
PAUSE_S = 3.0
"""Of a checkpoint or an evaluation: twenty times a step of this job, and more than the tests allow a step."""


class Items(Dataset):
    """Item i is that of step i; that of a step with the fault `data` does not come."""

    def __len__(self):
        return 100

    def __getitem__(self, step):
        if FAULTS.get(step, ("", 0))[0] == "data":
            stand_still(step)
        return torch.ones(4)


def reached(step):
    (FOLDER / f"reached{step}").touch()


def stand_still(step):
    reached(step)
    while not (FOLDER / f"go{step}").exists():
        time.sleep(0.01)


def spin(step):
    reached(step)
    while not (FOLDER / f"go{step}").exists():
        pass


def hold_the_lock(step):
    """Be in C code that keeps the interpreter's lock, so that no Python runs in this process."""
    import ctypes

    reached(step)
    while not (FOLDER / f"go{step}").exists():
        ctypes.PyDLL(None).sleep(4)


def gather_instead(step):
    reached(step)
    dist.all_gather([torch.empty(3) for _ in range(SIZE)], torch.ones(3))


def sum_more(step):
    stand_still(step)
    dist.all_reduce(torch.ones(40_000))


def segfault(step):
    import ctypes

    stand_still(step)
    ctypes.string_at(0)


def fail(step):
    reached(step)
    raise RuntimeError("the batch is empty")


def leave(step):
    stand_still(step)
    os._exit(7)


def kill(step):
    reached(step)
    os.kill(os.getpid(), signal.SIGKILL)


def send_nothing(step):
    """Stand still while the ranks before and after this one wait for it in a chain of receives."""
    stand_still(step)
    pass_on(step)


def pass_on(step):
    x = torch.empty(1)
    if RANK:
        dist.recv(x, RANK - 1)
    if RANK < SIZE - 1:
        dist.send(x, RANK + 1)


KINDS = {
    "spin": spin,
    "still": stand_still,
    "stop": stand_still,  # and whoever waits for it to be reached stops the process
    "kill": kill,
    "lock": hold_the_lock,
    "mismatch": gather_instead,
    "sizes": sum_more,
    "segfault": segfault,
    "exception": fail,
    "os_exit": leave,
    "chain": send_nothing,
}


class Plain:
    """A model on each rank, whose gradient the script reduces itself."""

    model: Any

    def __init__(self):
        self.model = nn.Linear(4, 1, bias=False)

    def compute(self, x, go_wrong):
        self.model(x).sum().backward()
        go_wrong()
        dist.all_reduce(self.model.weight.grad)


class Ddp(Plain):
    """The others wait in the backward, in C++."""

    def __init__(self):
        self.model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1, bias=False))

    def compute(self, x, go_wrong):
        loss = self.model(x).sum()
        go_wrong()
        loss.backward()


class Fsdp(Ddp):
    """The others wait in the forward, which gathers the parameters."""

    def __init__(self):
        from torch.distributed.fsdp import fully_shard

        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        for module in (*self.model, self.model):
            fully_shard(module)

    def compute(self, x, go_wrong):
        go_wrong()
        self.model(x).sum().backward()


class Tensors(Fsdp):
    """The others wait for the sum of the halves of a product, in the forward."""

    def __init__(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        self.model = parallelize_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), mesh, plan)


class Pipeline(Plain):
    """Each rank waits for its neighbour in receives that it begins as Megatron does."""

    def __init__(self):
        self.model = nn.Linear(4, 4, bias=False)

    def compute(self, x, go_wrong):
        go_wrong()
        if RANK:
            self._receive(x, RANK - 1)
        y = self.model(x)
        gradient = torch.ones_like(y)
        if RANK < SIZE - 1:
            self._pass(dist.isend, y.detach(), RANK + 1)
            self._receive(gradient, RANK + 1)
        y.backward(gradient)
        if RANK:
            self._pass(dist.isend, x, RANK - 1)

    def _receive(self, x, rank):
        self._pass(dist.irecv, x, rank)

    def _pass(self, call, x, rank):
        for handle in dist.batch_isend_irecv([dist.P2POp(call, x, rank)]):
            handle.wait()


SPLITS = {"plain": Plain, "ddp": Ddp, "fsdp": Fsdp, "tp": Tensors, "pp": Pipeline}


class Rank:
    def __init__(self):
        self.split = SPLITS[SPLIT]()
        self.model = self.split.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.pair = dist.new_group(list(range(SIZE)), group_desc="pair")
        self.monitor = TrainerMon(SETTINGS)
        self.monitor.set_monitor(self.model, self.optimizer)
        self.data = None
        if any(kind == "data" and rank == RANK for kind, rank in FAULTS.values()):
            self.data = iter(DataLoader(Items(), batch_size=1, num_workers=1, prefetch_factor=1))

    def go_wrong(self, step, kind, rank):
        """Do the fault's part of this rank; faults of all ranks come first."""
        if kind == "order":
            reached(step)
            for group in (self.pair, None) if rank == RANK else (None, self.pair):
                dist.all_reduce(torch.ones(3), group=group)
        elif kind == "chain" and rank != RANK:
            pass_on(step)
        elif rank != RANK:
            return
        elif kind == "checkpoint":
            torch.save(self.model.state_dict(), FOLDER / "checkpoint.pt")
            time.sleep(PAUSE_S)
        elif kind == "evaluation":
            with self.monitor.phase("evaluation"):
                time.sleep(PAUSE_S)
        elif kind == "inference":
            with torch.no_grad():
                self.model(torch.ones(1, 4))
                time.sleep(PAUSE_S)
        elif kind in KINDS:
            KINDS[kind](step)

    def step(self, step):
        x = torch.ones(1, 4) if self.data is None else next(self.data)
        self.split.compute(x, lambda: self.go_wrong(step, *FAULTS[step]) if step in FAULTS else None)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3600))
    rank = Rank()
    for step in range(STEPS):
        rank.step(step)
    rank.monitor.close()
    dist.destroy_process_group()


def as_rank(rank):
    global RANK
    RANK = rank
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    main()


def fork_ranks():
    """Be a launcher that hears of a rank's end only when all ranks before it have ended."""
    ranks = [multiprocessing.get_context("fork").Process(target=as_rank, args=(rank,)) for rank in range(SIZE)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    if os.environ.get("FORKS"):
        fork_ranks()
    else:
        main()
