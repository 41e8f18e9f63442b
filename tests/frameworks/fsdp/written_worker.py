"""One of two ranks: gradients under FSDP that the script writes to before the optimizer's step; asserts for itself."""

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.frameworks.torch_job import Block, Net, batch
from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.catalogue import GRADIENT_AT_STEP

BAD, STEPS = 1, 2


def fsdp1(*, original, blocks):
    def wrap(net):
        policy = ModuleWrapPolicy({Block}) if blocks else None
        return FullyShardedDataParallel(
            net, auto_wrap_policy=policy, use_orig_params=original, device_id=torch.device("cpu")
        )

    return wrap


def fsdp2(net):
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


WRAPS = {
    "original": fsdp1(original=True, blocks=True),
    "one-flat-original": fsdp1(original=True, blocks=False),
    "flat": fsdp1(original=False, blocks=True),
    "one-flat": fsdp1(original=False, blocks=False),
    "fsdp2": fsdp2,
}


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held(model):
    """Return the parameters of which this rank has a part of the gradient."""
    return [p for p in model.parameters() if p.grad is not None and local(p.grad).numel()]


def spoil_one(model):
    local(held(model)[-1].grad).view(-1)[0] = math.nan


def multiply_one(model):
    held(model)[-1].grad.mul_(0.25)


def replace_all(model):
    for parameter in held(model):
        parameter.grad = parameter.grad * 100


def multiply_all(model):
    for parameter in held(model):
        parameter.grad.mul_(100)


def leave(_model):
    pass


CHANGES = [spoil_one, multiply_one, replace_all, multiply_all, leave]


def clip(model):
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(0.01)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def is_explained_by_clipping(name, change):
    """Return whether nothing but the values tells the change from a clipping.

    One write to a flat gradient, whose pieces are not written to one by one, is one to all of it.
    """
    return change is leave or (name == "one-flat" and change is multiply_one)


def check(name, change, *, clips):
    run = f"{name}-{change.__name__}-{clips}"
    torch.manual_seed(0)
    model = WRAPS[name](Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spool = Path(sys.argv[1]) / "spool" / run
    config = {"run_id": run, "output_dir": str(Path(sys.argv[1]) / "output"), "spool_dir": str(spool)}
    used = {}
    with TrainerMon(config | {"agent": {"start": False}, "hang": {"enabled": False}}) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(STEPS):
            model(*batch(step, 0, dist.get_rank())).backward()
            if step == BAD:
                change(model)
            if clips:
                clip(model)
            used[step] = [local(p.grad).detach().clone().double() for p in held(model)]
            optimizer.step()
            optimizer.zero_grad()
    rows = RankJournal(only_spool(spool), dist.get_rank()).rows
    found = {s: [row for key, row in of.items() if key.slot == GRADIENT_AT_STEP] for s, of in rows.items()}
    taken = {step for step, of in found.items() if of}
    if is_explained_by_clipping(name, change):
        assert not taken, (run, taken)
        return
    assert taken == {BAD}, (run, taken)
    if change is spoil_one and not clips:
        nans = [row.nans for row in found[BAD] if row.nans]
        assert nans == [1], (run, nans)
    elif change is not multiply_one and not clips:
        truth = sum(float(gradient.square().sum()) for gradient in used[BAD])
        assert sum(row.sum_sq for row in found[BAD]) == pytest.approx(truth, rel=1e-6), run


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name, change in itertools.product(WRAPS, CHANGES):
        check(name, change, clips=False)
        if change in (spoil_one, leave):
            check(name, change, clips=True)
    dist.destroy_process_group()
