"""Two ranks dump steps of trainings with FSDP1, FSDP2 and DTensors (tensor parallel); see `grid`."""

import functools
import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tests.frameworks.dump.grid import Case, main
from tests.frameworks.replay.fsdp_worker import BF16, TOKENS, Net, build, fsdp1, fsdp2, local
from tests.frameworks.replay.job import Job

CHECKPOINTING = {"none": None, "reentrant": True, "nonreentrant": False}
WRAPS = {
    "fsdp2": fsdp2,
    "fsdp2bf16": BF16,
    "fsdp1": functools.partial(fsdp1, use_orig_params=True),
    "fsdp1flat": functools.partial(fsdp1, use_orig_params=False),
    "dtensor": None,
}


def build_parallel(checkpointing):
    """Return a job whose linear layers are split over the ranks."""
    net = Net(checkpointing)
    plan: dict[str, ParallelStyle] = {f"blocks.{number}.up": ColwiseParallel() for number in range(2)}
    plan |= {f"blocks.{number}.down": RowwiseParallel() for number in range(2)}
    parallelize_module(net, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)

    def step(number):
        loss = net(torch.randint(TOKENS, (3, 5), generator=torch.Generator().manual_seed(number)))["loss"]
        loss.backward()
        gradients = [local(p.grad).clone() for p in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return [loss, *gradients]

    return Job(
        model=net, optimizer=optimizer, modules={}, spoil=print, step=step, bits=lambda: [*map(local, net.parameters())]
    )


def cases():
    """Yield every way to shard and of recomputation, with every level."""
    for kind, recomputed in itertools.product(WRAPS, CHECKPOINTING):
        recomputing = CHECKPOINTING[recomputed]
        made = functools.partial(build, WRAPS[kind], checkpointing=recomputing)
        if kind == "dtensor":
            made = functools.partial(build_parallel, recomputing)
        for level in ("L0", "L1", "mix"):
            yield Case(name=f"{kind}-{recomputed}-{level}", build=made, level=level)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(list(cases()))
