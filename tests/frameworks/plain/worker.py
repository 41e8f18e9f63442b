"""One rank of small trainings: plain, DistributedDataParallel, ZeroRedundancyOptimizer; see `torch_job`."""

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.frameworks.torch_job import Variant, main
from trainermon.hooks.names import plain_name

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
BF16 = torch.bfloat16


def whole(model, optimizer, what):
    held = {plain_name(name): p for name, p in model.named_parameters()}
    if what == "value":
        return {name: p.detach().clone() for name, p in held.items()}
    if what == "gradient":
        return {name: p.grad.clone() for name, p in held.items()}
    return {name: optimizer.state[p][what].clone() for name, p in held.items()}


def whole_of_owners(model, optimizer, what):
    """As `whole`, with the states that each rank's own optimizer keeps brought together."""
    if what in ("value", "gradient"):
        return whole(model, optimizer, what)
    mine = {
        plain_name(name): optimizer.optim.state[p][what].clone()
        for name, p in model.named_parameters()
        if p in optimizer.optim.state
    }
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    assert sum(map(len, parts)) == len(list(model.parameters()))
    return {name: part for part in parts for name, part in part.items()}


def sync(model, is_last):
    return contextlib.nullcontext() if is_last else model.no_sync()


def plain(*, dtype=torch.float32, **options):
    def wrap(net):
        net = net.to(dtype)
        return net, ADAMW(net.parameters())

    return Variant(wrap=wrap, whole=whole, data_rank=0, data_size=1, **options)


def ddp(*, dtype=torch.float32, no_sync=True, sharded_optimizer=None, wrapper=None, **options):
    def wrap(net):
        model = DistributedDataParallel(net.to(dtype), **(wrapper or {}))
        if sharded_optimizer is None:
            return model, ADAMW(model.parameters())
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported, which a test must not

        return model, ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=sharded_optimizer == "view"
        )

    options = {"sync": sync} | options if no_sync else options
    return Variant(wrap=wrap, whole=whole_of_owners if sharded_optimizer else whole, **options)


VARIANTS = {
    "plain": plain,
    "plain-bf16": functools.partial(plain, dtype=BF16),
    "plain-reentrant": functools.partial(plain, model={"reentrant": True}),
    "ddp": ddp,
    "ddp-bf16": functools.partial(ddp, dtype=BF16, micro_steps=3),
    "ddp-every": functools.partial(ddp, no_sync=False),
    "ddp-bucket-view": functools.partial(ddp, wrapper={"gradient_as_bucket_view": True}),
    "ddp-small-buckets": functools.partial(ddp, wrapper={"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}),
    "ddp-static": functools.partial(ddp, wrapper={"static_graph": True}, no_sync=False, micro_steps=1),
    "ddp-unused": functools.partial(ddp, wrapper={"find_unused_parameters": True}),
    "ddp-checkpoint": functools.partial(ddp, model={"reentrant": False}),
    "zero": functools.partial(ddp, sharded_optimizer="copy"),
    "zero-view": functools.partial(ddp, sharded_optimizer="view"),
}

if __name__ == "__main__":
    main(VARIANTS)
