"""Dumps two steps of one small model on the same batches, whole or shared by two ranks: by DDP, by FSDP2, by DTensors.

    torch_splits_worker.py FOLDER

writes `FOLDER/NAME/step<S>/rank<R>` of every variant for the ranks that there are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trainermon import PrecisionDebugger

WIDTH, BATCH, LAYERS, STEPS = 8, 4, 2, 2
LEVELS = ("L0", "mix")
VARIANTS = {1: ("one",), 2: ("ddp", "fsdp2", "tp", "ddp-fault", "fsdp2-fault", "tp-fault")}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shared(model: Net, name: str) -> nn.Module:
    if name.startswith("ddp"):
        return DistributedDataParallel(model)
    if name.startswith("fsdp2"):
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    if name.startswith("tp"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def train(folder: Path, name: str, level: str) -> None:
    torch.manual_seed(5)
    model = Net()
    root = shared(model, name)
    if name.endswith("fault"):
        model.blocks[1].norm.register_forward_hook(lambda module, args, result: result * 1.01)
    optimizer = torch.optim.AdamW(root.parameters(), lr=0.01)
    parts = 1 if name.startswith("tp") else dist.get_world_size()
    debugger = PrecisionDebugger(dump_path=folder, level=level, task="tensor")
    for step in range(STEPS):
        batch = torch.randn(BATCH, 5, WIDTH, generator=torch.Generator().manual_seed(step))
        debugger.start(root)
        loss = root(batch.chunk(parts)[dist.get_rank() % parts]).pow(2).mean()
        loss.backward()
        debugger.stop()
        debugger.step()
        optimizer.step()
        optimizer.zero_grad()
    debugger.close()
    PrecisionDebugger.close()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in VARIANTS[dist.get_world_size()]:
        for level in LEVELS:
            train(Path(sys.argv[1]) / level / name, name, level)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
