"""Trainings on two ranks in which no wrapper reduces all gradients, or one does so with loss, each in its own folder.

python reduced_by_hand.py FOLDER NAME …
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.alerts.laws.training import KINDS
from trainermon import TrainerMon

STEPS = 12
IGNORED = ("2.weight", "2.bias")
SOUND = (
    "plain, in place",
    "plain, in one buffer",
    "plain, clipped",
    "ddp ignores, in place",
    "ddp ignores, clipped",
    "fsdp2 ignores, in place",
    "fsdp2 ignores, replaced",
    "fsdp2 ignores, clipped",
    "ddp compresses",
    "ddp averages models",
)
UNREDUCED = ("ddp ignores, not reduced", "fsdp2 ignores, not reduced")


def wrapped(inner: nn.Module, name: str) -> nn.Module:
    if name.startswith("fsdp2"):
        return fully_shard(inner, ignored_params={inner.get_parameter(ignored) for ignored in IGNORED})  # type: ignore[return-value]
    if name.startswith("ddp ignores"):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, IGNORED)
    if name.startswith("ddp"):
        model = DistributedDataParallel(inner)
        if "compresses" in name:
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        if "averages" in name:
            alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
            local = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
            model.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        return model
    return inner


def reduce(parameters: Sequence[nn.Parameter], name: str) -> None:
    """Average the gradients of these parameters over ranks, in one of the ways in which scripts do so."""
    for parameter in parameters if "not reduced" not in name else []:
        gradient = parameter.grad
        assert gradient is not None
        if "replaced" in name or "one buffer" in name:
            buffer = gradient.clone() / dist.get_world_size()
            dist.all_reduce(buffer)
            if "replaced" in name:
                parameter.grad = buffer
            else:
                gradient.copy_(buffer)
        else:  # torch counts no write of a collective
            gradient.data.div_(dist.get_world_size())
            dist.all_reduce(gradient)


def clip(parameters: Sequence[nn.Parameter]) -> None:
    """Clip all to a norm that is always exceeded; torch's own function takes no mixture of shards and whole tensors."""
    gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in parameters]
    shares = [
        g.square().sum() / (1 if hasattr(p.grad, "to_local") else 2) for p, g in zip(parameters, gradients, strict=True)
    ]
    square = sum(shares, torch.zeros(()))
    dist.all_reduce(square)
    for gradient in gradients:
        gradient.mul_(0.01 / square.sqrt())


def train(folder: Path, name: str) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    )
    by_hand = [inner.get_parameter(ignored) for ignored in IGNORED]
    model = wrapped(inner, name)
    parameters = [*model.parameters()]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1)
    if "averages" in name:
        from torch.distributed.optim import PostLocalSGDOptimizer  # which warns where tests are collected

        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=4, warmup_steps=2))
    draw, target = torch.Generator().manual_seed(1 + dist.get_rank()), torch.randn(16, 8)
    config = KINDS | {"output_dir": str(folder), "spool_dir": str(folder), "agent": {"start": False}}
    with TrainerMon(config) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(STEPS):
            batch = torch.randn(32, 16, generator=draw)
            nn.functional.mse_loss(model(batch), batch @ target).backward()
            if "compresses" not in name and "averages" not in name:
                reduce(parameters if name.startswith("plain") else by_hand, name)
            if "clipped" in name:
                clip(parameters)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for case in sys.argv[2:]:
        train(Path(sys.argv[1], case), case)
    dist.destroy_process_group()
