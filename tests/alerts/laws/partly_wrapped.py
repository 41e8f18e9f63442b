"""Trainings on two ranks, each in its own folder: DistributedDataParallel wraps a part of the model alone.

python partly_wrapped.py FOLDER NAME …
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.alerts.laws.training import KINDS
from trainermon import TrainerMon

STEPS = 25
OUTSIDE = {"1.weight", "1.bias"}
UNREDUCED = ("list", "module")
SOUND = ("list, reduced", "module, reduced", "list, both wrapped", "list, frozen", "list, experts", "list, in halves")


class Model(nn.Module):
    """A wrapped body and a head in one module, which calls both."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.add_module("0", body)
        self.add_module("1", head)

    def forward(self, x: Tensor) -> Tensor:
        return both(self, x)


def both(model: nn.Module, x: Tensor) -> Tensor:
    body, head = model.children()
    logits: Tensor = head(body(x))
    return logits


def made(name: str) -> nn.Module:
    head: nn.Module = nn.Linear(16, 8)
    halves = [dist.new_group([rank]) for rank in range(2)] if "halves" in name else [None, None]
    body = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 16), nn.Tanh()), process_group=halves[dist.get_rank()], find_unused_parameters=False
    )
    if "wrapped" in name:
        head = DistributedDataParallel(head)
    head.requires_grad_("frozen" not in name)
    if "experts" in name:
        return nn.ModuleDict({"body": body, "experts": head})
    return Model(body, head) if "module" in name else nn.ModuleList([body, head])


def train(folder: Path, name: str) -> None:
    torch.manual_seed(0)
    model = made(name)
    head = [*model.children()][1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw, target = torch.Generator().manual_seed(1 + dist.get_rank()), torch.randn(16, 8)
    config = KINDS | {"output_dir": str(folder), "spool_dir": str(folder), "agent": {"start": False}}
    with TrainerMon(config) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(STEPS):
            batch = torch.randn(32, 16, generator=draw)
            nn.functional.mse_loss(both(model, batch), batch @ target).backward()
            for parameter in head.parameters() if "reduced" in name else ():
                assert parameter.grad is not None
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for case in sys.argv[2:]:
        train(Path(sys.argv[1], case), case)
    dist.destroy_process_group()
