"""Three ranks compute and communicate, with a fault of one rank at a known call; every call is dumped."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from trainermon import PrecisionDebugger

SOUND = "sound"


@dataclasses.dataclass(frozen=True)
class Fault:
    """The multiplication number `stage` of `rank` is with `factor`, which is 1 elsewhere."""

    name: str
    rank: int
    stage: int
    factor: float

    @property
    def api(self):
        return f"Tensor.__mul__.{self.stage}.forward"


FAULTS = [
    Fault("before-all-reduce", 2, 0, float("inf")),
    Fault("before-send", 1, 1, float("nan")),
    Fault("after-receive", 2, 2, float("inf")),
    Fault("before-broadcast", 1, 3, float("inf")),
    Fault("value-before-all-reduce", 2, 0, 1.5),
    Fault("value-before-send", 1, 1, 3.0),
    Fault("value-before-broadcast", 1, 3, 1.25),
]


def compute(rank: int, factors: list[torch.Tensor], pair: dist.ProcessGroup) -> None:
    x = torch.linspace(1.0, 2.0, 6) * factors[0]
    dist.all_reduce(x)
    x = torch.sqrt(x) * factors[1]
    if rank == 1:
        dist.send(x, 2)
    elif rank == 2:
        other = torch.empty_like(x)
        dist.recv(other, 1)
        x = torch.add(x, other)
    x = x * factors[2]
    if rank in (1, 2):
        dist.all_reduce(x, group=pair)
    x = torch.exp(-torch.abs(x)) * factors[3]
    dist.broadcast(x, 1)
    dist.all_reduce(torch.log1p(x))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    pair = dist.new_group([1, 2])
    for fault in (None, *FAULTS):
        factors = [torch.ones(()) for _ in range(4)]
        if fault is not None and fault.rank == rank:
            factors[fault.stage].fill_(fault.factor)
        PrecisionDebugger(dump_path=folder / (fault.name if fault else SOUND), level="L1")
        PrecisionDebugger.start()
        compute(rank, factors, pair)
        PrecisionDebugger.stop()
        PrecisionDebugger.step()
        PrecisionDebugger.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
