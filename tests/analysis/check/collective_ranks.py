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
    own, taken = [3, 1], [[3, 3], [1, 1]][rank]
    dist.all_to_all_single(torch.zeros(sum(taken), 2), torch.randn(4, 2), taken, own)
    dist.reduce(torch.randn(size), 1)
    dist.gather(torch.randn(size), [torch.zeros(size) for _ in range(2)] if rank == 0 else None, dst=0)
    dist.scatter(torch.zeros(size), scatter_list=list(torch.randn(2, size)) if rank == 0 else None, src=0)
    send_messages(rank)


def send_messages(rank: int) -> None:
    """Send both ways in every way there is; what was asked for first is waited for last."""
    sent, other = torch.randn(8, 5), 1 - rank
    for send, receive in ((dist.send, dist.recv), (_sent, _received)):
        for sender in (0, 1):
            if rank == sender:
                send(sent[0 if send is dist.send else 1], dst=other)
            else:
                receive(torch.zeros(5), src=other)
    if rank:
        dist.send(sent[2], 0)
        first, second = dist.irecv(torch.zeros(5), 0), dist.irecv(torch.zeros(5), 0)
        second.wait(), first.wait()
    else:
        dist.recv(torch.zeros(5))
        dist.isend(sent[3], 1).wait(), dist.isend(sent[4], 1).wait()
    messages = [dist.P2POp(dist.irecv, torch.zeros(5), other), dist.P2POp(dist.isend, sent[5], other)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def _sent(tensor: torch.Tensor, dst: int) -> None:
    dist.isend(tensor, dst).wait()


def _received(tensor: torch.Tensor, src: int) -> None:
    dist.irecv(tensor, src).wait()


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
