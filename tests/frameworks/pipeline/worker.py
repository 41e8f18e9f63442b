"""A pipeline of torch's own with two stages of equal modules, or one that the script makes with send and recv.

The arguments are a folder and names of variants `<pipeline>-<what breaks>`; what breaks does so in step 2.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from trainermon import TrainerMon

STEPS, BAD_STEP, SIZE = 4, 2, 8
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
TORCH = [f"{kind}-{what}" for kind in SCHEDULES for what in ("backward", "forward", "target")]
OWN = ["own-backward", "own-forward"]


class NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


class Fragile(nn.Module):
    broken = ""

    def forward(self, x):
        if self.broken == "backward":
            return NanGradient.apply(x)
        return (x - x) / (x - x) if self.broken == "forward" else x + 0


def loss_of(output, target):
    return (output - target).pow(2).mean()


class OwnPipeline:
    """Runs one micro batch forwards and backwards through two ranks, behind the interface of torch's schedules."""

    def __init__(self, model):
        self.model = model

    def step(self, x=None, target=None, losses=None):
        if x is not None:
            output, gradient = self.model(x), torch.empty(len(x), SIZE)
            dist.send(output.detach(), 1)
            dist.recv(gradient, 1)
            output.backward(gradient)
            return
        given = torch.empty(len(target), SIZE)
        dist.recv(given, 0)
        loss_of(self.model(given.requires_grad_()), target).backward()
        dist.send(given.grad, 0)


def pipeline_of(kind, model):
    if kind == "own":
        return OwnPipeline(model)
    stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
    return SCHEDULES[kind](stage, 2, loss_fn=loss_of)


def train(name, rank):
    kind, what = name.split("-")
    torch.manual_seed(rank)
    fragile = Fragile()
    model = nn.Sequential(nn.Linear(SIZE, SIZE), fragile, nn.Linear(SIZE, SIZE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pipeline = pipeline_of(kind, model)
    monitor = TrainerMon({"run_id": name, "agent": {"linger_s": 1}, "hang": {"enabled": False}})
    monitor.set_monitor(model, optimizer)
    for step in range(STEPS):
        x, target = torch.randn(4, SIZE), torch.randn(4, SIZE)
        is_bad = step == BAD_STEP
        breaks_at = 0 if what == "forward" else 1
        fragile.broken = what if is_bad and rank == breaks_at else ""
        if is_bad and what == "target":
            target *= float("nan")
        if rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=target, losses=[])
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()


def main(folder, *names):
    dist.init_process_group("gloo")
    for name in names:
        train(name, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
