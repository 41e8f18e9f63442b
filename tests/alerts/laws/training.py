"""A small training on two gloo ranks, sound or with one silent error from step 4 on (of its data: from the start).

    python training.py FAULT FOLDER

Its loss falls either way. What the monitor writes stays in FOLDER/spool.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainermon import TrainerMon

STEPS, WRONG_FROM = 50, 4
CUT_FROM = 25  # after a while in which all is well
LIMIT = 0.1
VOCABULARY, BATCH, LENGTH = 64, 4, 12
KINDS = {"wg_distribution": True, "mv_distribution": True, "param_distribution": True, "xy_distribution": True}


class Network(nn.Module):
    """Two layers and a norm over embedded tokens; once `is_cut` the graph of the first half ends in no loss."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCABULARY)
        self.is_cut = is_cut
        self.slope = 0.1

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.relu(self.first(self.embed(ids)))
        return self.head(self.norm(hidden.detach() if self.is_cut else hidden))


class Reduction:
    """Averages gradients as DDP does, until `WRONG_FROM`; from then on as `fault` says."""

    def __init__(self, fault: str) -> None:
        self.step = 0
        self._fault = fault
        self._before: dict[int, Tensor] = {}

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        own = bucket.buffer() / dist.get_world_size()
        reduced = own.clone()
        dist.all_reduce(reduced)
        before, self._before[bucket.index()] = self._before.get(bucket.index(), reduced), reduced
        if self._fault == "summed":
            reduced = reduced * dist.get_world_size()
        wrong = {
            "averaged twice": reduced / dist.get_world_size(),
            "lost on one": torch.zeros_like(own) if dist.get_rank() == 1 else reduced,
            "lost": torch.zeros_like(own),
            "own": bucket.buffer(),
            "late": before,
        }
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(wrong.get(self._fault, reduced) if self.step >= WRONG_FROM else reduced)
        return done


def batches(fault: str, rank: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(0 if fault == "same data" else rank)
    fresh = (torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=draw) for _ in itertools.count())
    if fault == "one batch":
        return itertools.repeat(next(fresh))
    if fault == "twins":
        return (
            batch.clone() for batch in fresh for _ in range(2)
        )  # as of two workers: other tensors, the same numbers
    return fresh


def keep_gathered(model: nn.Module) -> None:
    """Have FSDP2 go on with the weights that it has gathered for this step, though the optimizer moves the shards."""
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(reshard_after_forward=False)
    model.set_reshard_after_backward(reshard_after_backward=False)


def wrapped(inner: Network, fault: str, reduction: Reduction) -> nn.Module:
    if fault.startswith("sharded"):
        fully_shard(inner)
        return inner
    may_be_unused = fault.startswith(("cut", "unfrozen", "replaced"))
    inner.first.requires_grad_(fault != "unfrozen")
    model = DistributedDataParallel(inner, find_unused_parameters=may_be_unused)
    inner.first.requires_grad_(not fault.startswith("unfrozen"))
    model.register_comm_hook(reduction, Reduction.reduce)
    return model


def clip(model: nn.Module, fault: str, step: int) -> None:
    """Clip as `fault` says; sound until `WRONG_FROM`."""
    is_wrong = step >= WRONG_FROM
    if fault == "sharded, each parameter clipped":
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_(parameter, 0.01)
    elif fault == "sharded, own part clipped" and is_wrong:
        parts = [parameter.grad.to_local() for parameter in model.parameters() if isinstance(parameter.grad, DTensor)]
        norm = torch.cat([part.flatten() for part in parts]).norm()
        for part in parts:
            part.mul_(torch.clamp(LIMIT / (norm + 1e-6), max=1.0))
    elif "clip" in fault and not (fault == "clipped on one" and is_wrong and dist.get_rank() == 1):
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def change(model: Network, optimizer: torch.optim.Optimizer, fault: str, step: int) -> None:
    """Cut the graph, or unfreeze or replace what the wrapper does not know, or, with "in time", what it does."""
    model.is_cut |= fault == "cut later" and step >= CUT_FROM
    if step == WRONG_FROM and fault.startswith("unfrozen"):
        model.first.requires_grad_()
    if step == WRONG_FROM and fault == "replaced":
        old, model.head.weight = model.head.weight, nn.Parameter(model.head.weight.detach().clone())
        held = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = [model.head.weight if p is old else p for p in held]


def main(fault: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    inner = Network(is_cut=fault == "cut")
    inner.slope += 0.1 * (fault == "set on one" and dist.get_rank() == 1)
    reduction = Reduction(fault)
    model = wrapped(inner, fault, reduction)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = TrainerMon(KINDS | {"output_dir": str(folder), "spool_dir": str(folder), "agent": {"start": False}})
    monitor.set_monitor(model, optimizer)
    for step, ids in enumerate(itertools.islice(batches(fault, dist.get_rank()), STEPS)):
        reduction.step = step
        change(inner, optimizer, fault, step)
        if fault != "not cleared" or step < WRONG_FROM:
            optimizer.zero_grad()
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        monitor.record(loss=loss)
        is_nothing = fault == "no gradient" or (fault == "nothing on one" and dist.get_rank() == 1)
        (loss * 0 if is_nothing and step >= WRONG_FROM else loss).backward()
        clip(model, fault, step)
        if fault == "still" and step == WRONG_FROM:  # as an optimizer that was made before the model was replaced
            optimizer.param_groups[0]["params"] = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        if fault.startswith("sharded, gathered") and step == WRONG_FROM:
            keep_gathered(model)
        if fault == "rate on one" and step == WRONG_FROM and dist.get_rank() == 1:
            optimizer.param_groups[0]["lr"] *= 2
        optimizer.step()
        if fault == "sharded, gathered and released":
            model.reshard()  # type: ignore[operator]
    monitor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
