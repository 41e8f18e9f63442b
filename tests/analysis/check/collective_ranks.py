"""Two ranks that call every collective that can be judged, with a dump of it in the folder that is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from trainermon import PrecisionDebugger


def communicate(rank: int) -> None:
    torch.manual_seed(rank)
    size, pair = 6, dist.new_group([0, 1])
    for dtype in (torch.float32, torch.bfloat16):
        dist.all_reduce(torch.randn(300).to(dtype))
    dist.all_reduce(torch.randn(size), op=dist.ReduceOp.MAX)
    dist.all_reduce(torch.arange(size) + rank, group=pair)
    dist.all_reduce(torch.randn(size), async_op=True).wait()
    dist.broadcast(torch.randn(size), 1)
    dist.all_gather([torch.zeros(size) for _ in range(2)], torch.randn(size))
    dist.all_gather_into_tensor(torch.zeros(2 * size), torch.randn(size))
    dist.reduce_scatter_tensor(torch.zeros(size // 2), torch.randn(size))
    dist.all_to_all_single(torch.zeros(size), torch.randn(size))


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    task = {"task": "tensor", "level": "L1", "dump_path": str(folder / "dump"), "tensor": {"risk_level": "ALL"}}
    config = folder / f"config{rank}.json"
    config.write_text(json.dumps(task))
    debugger = PrecisionDebugger(str(config))
    debugger.start()
    communicate(rank)
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
