"""A small training, whose environment a test has recorded: alone, or on two ranks under a kind of sharding."""

import sys

import torch
from torch import nn

KINDS = ("ddp", "fsdp2", "tp")


class SmallModel(nn.Module):
    """Two layers and a norm."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, batch):
        """Return the sum of the results."""
        return self.norm(self.second(self.first(batch["x"]).relu())).sum()


def build():
    """Return the model, the same wherever it is built."""
    torch.manual_seed(3)
    return SmallModel()


def sharded(kind):
    """Return the model as `kind` holds it on this rank."""
    from torch.distributed.device_mesh import init_device_mesh

    model, mesh = build(), init_device_mesh("cpu", (2,))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=mesh)
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def record(model, output, optimizer=None, steps=1):
    """Train two steps, and record."""
    from trainermon import EnvironmentRecorder

    with EnvironmentRecorder(model, optimizer, steps, output=output):
        for _ in range(2):
            model({"x": torch.arange(12.0).reshape(2, 6) / 7}).backward()


def record_forward(model, output, batch):
    """Record one forward, and nothing else."""
    from trainermon import EnvironmentRecorder

    with EnvironmentRecorder(model, output=output, draws=False):
        model(batch)


def main(folder):
    """Record under each kind of sharding; run by each of two ranks."""
    torch.distributed.init_process_group("gloo")
    for kind in KINDS:
        record(sharded(kind), f"{folder}/{kind}.zip")
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
