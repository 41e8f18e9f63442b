"""Two ranks under DistributedDataParallel, with and without a dump of every step: bits, and collectives seen."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.dump.workbench import VOCABULARY, Network
from trainermon import PrecisionDebugger


def train(folder: Path | None, checkpointing: str):
    """Train with a collective in each step; return all bits."""
    torch.manual_seed(3)
    model = DistributedDataParallel(Network(checkpointing=checkpointing))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(50 + dist.get_rank())
    if folder is not None:
        PrecisionDebugger(dump_path=folder, level="mix")
    bits = []
    for _ in range(2):
        text = torch.randint(VOCABULARY, (4, 7))
        PrecisionDebugger.start(model)
        loss = model(text[:, :-1], targets=text[:, 1:])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        work = dist.all_reduce(mean, async_op=True)
        work.wait()
        PrecisionDebugger.stop()
        PrecisionDebugger.step()
        bits += [loss.detach(), mean, *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    PrecisionDebugger.close()
    return [*bits, *model.state_dict().values(), torch.get_rng_state()]


def wrong_in(folder: Path, plain: list, dumped: list) -> list[str]:
    """Return what is wrong with the run of this rank and its dump."""
    wrong = [] if all(map(torch.equal, plain, dumped)) else ["the bits differ"]
    place = folder / f"step1/rank{dist.get_rank()}"
    info = json.loads((place / "dump_info.json").read_text())
    data = json.loads((place / "dump.json").read_text())["data"]
    wrong += [info["first_error"]] if info["errors"] else []
    for number in range(2):
        entry = data.get(f"Distributed.all_reduce.{number}.forward")
        if entry is None:
            wrong.append(f"all_reduce {number} is missing")
        elif number and entry["output"][0]["Max"] != 2 * entry["input_args"][0]["Max"]:
            wrong.append(f"the second all_reduce doubles what all ranks share: {entry}")
    return wrong


def main() -> None:
    """Compare the runs and print what is wrong."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, wrong = dist.get_rank(), []
    with tempfile.TemporaryDirectory() as own:  # each rank its own: they need not meet in one folder
        for checkpointing in ("none", "reentrant", "nonreentrant"):
            folder = Path(own) / checkpointing
            plain = train(None, checkpointing)
            wrong += wrong_in(folder, plain, train(folder, checkpointing))
    sys.stdout.write("\n".join([*wrong, f"rank {rank} {'wrong' if wrong else 'done'}\n"]))
    sys.stdout.flush()
    dist.barrier()
    os._exit(bool(wrong))


if __name__ == "__main__":
    main()
