"""Two ranks that send to each other in every way, under a dump; prints what it says otherwise than what was sent."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import P2POp, isend

from trainermon import PrecisionDebugger

EARLY = isend


def communicate(rank: int) -> None:
    """Send 10, 20, 30 and 40 from rank 0 to rank 1, and sum in a backward."""
    other = 1 - rank
    if rank == 0:
        dist.send(torch.full((2,), 10.0), dst=1, tag=3)
        EARLY(torch.full((2,), 20.0), 1).wait()
        works = dist.batch_isend_irecv([P2POp(EARLY, torch.full((2,), 30.0), 1), P2POp(dist.irecv, torch.zeros(3), 1)])
    else:
        dist.recv(torch.zeros(2), src=0, tag=3)
        dist.irecv(torch.zeros(2), 0).wait()
        works = dist.batch_isend_irecv([P2POp(dist.irecv, torch.zeros(2), 0), P2POp(EARLY, torch.full((3,), 40.0), 0)])
    for work in works:
        work.wait()
    x = torch.ones(2, requires_grad=True) * (rank + 1)
    x.register_hook(lambda gradient: dist.all_reduce(gradient.clone()) and None)
    (x * other).sum().backward()


def maxima(value: object) -> list[object]:
    """Return the maxima of the tensors of a value, and peers of messages, in order."""
    if isinstance(value, dict):
        if "Max" in value:
            return [value["Max"]]
        own = [f"{value['op']} {value['peer']}"] if "op" in value else []
        return own + [found for item in value.values() for found in maxima(item)]
    return [found for item in value for found in maxima(item)] if isinstance(value, list) else []


EXPECTED = {
    0: {
        "Distributed.send.0.forward": ([10.0], [10.0]),
        "Distributed.isend.0.forward": ([20.0], [20.0]),
        "Distributed.batch_isend_irecv.0.forward": (
            ["isend 1", 30.0, "irecv 1", 0.0],
            ["isend 1", 30.0, "irecv 1", 40.0],
        ),
        "Distributed.all_reduce.0.forward": ([1.0], [1.0]),
    },
    1: {
        "Distributed.recv.0.forward": ([0.0], [10.0]),
        "Distributed.irecv.0.forward": ([0.0], [20.0]),
        "Distributed.batch_isend_irecv.0.forward": (
            ["irecv 0", 0.0, "isend 0", 40.0],
            ["irecv 0", 30.0, "isend 0", 40.0],
        ),
        "Distributed.all_reduce.0.forward": ([0.0], [1.0]),
    },
}


def main() -> None:
    """Dump, and compare with what was sent."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        debugger = PrecisionDebugger(dump_path=folder, level="L1")
        debugger.start()
        communicate(rank)
        debugger.stop()
        debugger.step()
        place = Path(folder) / f"step0/rank{rank}"
        data = json.loads((place / "dump.json").read_text())["data"]
        info = json.loads((place / "dump_info.json").read_text())
    found = {
        key: (maxima(value["input_args"]), maxima(value["output"]))
        for key, value in data.items()
        if key.startswith("Distributed.")
    }
    wrong = [] if found == EXPECTED[rank] else [f"found {found}"]
    kwargs = next(iter(data.values()))["input_kwargs"]
    if (kwargs["tag"], kwargs["group"]["group_ranks"]) != ({"type": "int", "value": 3}, [0, 1]):
        wrong.append(f"the first message's {kwargs}")
    wrong += [info["first_error"]] if info["errors"] else []
    sys.stdout.write("\n".join([*wrong, f"rank {rank} {'wrong' if wrong else 'done'}\n"]))
    sys.stdout.flush()
    dist.barrier()
    os._exit(bool(wrong))


if __name__ == "__main__":
    main()
