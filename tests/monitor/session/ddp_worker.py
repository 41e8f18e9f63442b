"""One rank: trains in DistributedDataParallel under the monitor, and writes what its gradients should be.

The truth comes from a copy of the model outside DDP: its gradients on this rank's batches are the unreduced ones, and
their mean over the ranks, taken in float64 by an all-reduce of this script's own, are the reduced ones.
"""

import contextlib
import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from trainermon import TrainerMon

VARIANTS = {
    "default": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "reentrant": {"static_graph": True},
    "no_sync_forgotten": {},
}
MICRO_STEPS = {"static_graph": 1, "reentrant": 1}  # a static graph knows no accumulation


class Net(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.reentrant = reentrant

    def body(self, x):
        return torch.tanh(self.first(x))

    def forward(self, x):
        x = checkpoint(self.body, x, use_reentrant=True) if self.reentrant else self.body(x)
        return self.last(x)


def local_gradients(model, batches):
    copied = copy.deepcopy(model)
    copied.zero_grad()
    for batch in batches:
        copied(batch).square().mean().backward()
    return {name: p.grad.double() for name, p in copied.named_parameters()}


def average(gradients):
    reduced = {}
    for name, gradient in gradients.items():
        reduced[name] = gradient.clone()
        dist.all_reduce(reduced[name])
        reduced[name] /= dist.get_world_size()
    return reduced


def train(name, options, folder):
    torch.manual_seed(0)
    inner = Net(reentrant=name == "reentrant")
    model = DistributedDataParallel(inner, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    num_micro_steps = MICRO_STEPS.get(name, 2)
    truth = []
    with TrainerMon({"run_id": name, "agent": {"start": False}}) as monitor:
        monitor.set_monitor(model, num_micro_steps, optimizer)  # the order of msprobe's manual
        for _ in range(3):
            batches = [torch.randn(4, 6, generator=generator).requires_grad_() for _ in range(num_micro_steps)]
            unreduced = local_gradients(inner, batches)
            for index, batch in enumerate(batches):
                synchronised = index == num_micro_steps - 1 or name == "no_sync_forgotten"
                with contextlib.nullcontext() if synchronised else model.no_sync():
                    model(batch).square().mean().backward()
            truth.append({"unreduced": unreduced, "reduced": average(unreduced)})
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    torch.save(truth, folder / f"{name}-{dist.get_rank()}.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for variant, variant_options in VARIANTS.items():
        if variant in sys.argv[2:]:
            train(variant, variant_options, Path(sys.argv[1]))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own end is not always clean
