"""Two ranks train a small GPT as it should be, and once more for each fault: one thing is different from one step on.

Every run is watched by the monitor and dumps the step of the fault. A fault changes values, none of them to NaN.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.analysis.fault_grid import BATCH, GPT, LENGTH, VOCABULARY, WIDTH
from trainermon import PrecisionDebugger, TrainerMon

FAULT_STEP = 3
NUM_STEPS = 5
SOUND = "sound"
CONFIG = {
    "param_distribution": True,
    "mv_distribution": True,
    "xy_distribution": True,
    "agent": {"start": False},
    "replay": {"enabled": False},
    "escalation": {"enabled": False},
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is different in `module` of `rank`; `phase` is the right answer."""

    kind: str
    module: str
    rank: int
    phase: str

    @property
    def name(self):
        return f"{self.kind}-{self.module.strip('()')}-rank{self.rank}"


FAULTS = [
    Fault("weight", "h.2.up", 1, "parameter"),
    Fault("output", "h.1.attention.qkv", 1, "forward"),
    Fault("operation", "h.1", 0, "forward"),
    Fault("gradient", "h.0.up", 1, "backward"),
    Fault("batch", "(input)", 1, "forward"),
    Fault("optimizer", "h.0.down", 0, "optimizer"),
]


def inject(model, optimizer, fault):
    """Put the fault in place; return what takes it away again."""
    if fault.kind == "operation":
        block = model.get_submodule(fault.module)
        block.disturb = lambda x: x + 0.25
        return lambda: setattr(block, "disturb", lambda x: x)
    if fault.kind == "batch":
        return lambda: None
    module = model.get_submodule(fault.module)
    if fault.kind == "optimizer":
        optimizer.state[module.weight]["exp_avg"] *= -4
        return lambda: None
    if fault.kind == "weight":
        with torch.no_grad():
            module.weight[3] *= -2
        return lambda: None
    if fault.kind == "output":
        return module.register_forward_hook(lambda module, args, output: output * 1.5).remove
    return module.register_forward_hook(
        lambda module, args, output: output.register_hook(lambda gradient: gradient * 3) and None
    ).remove


def train(folder: Path, fault: Fault | None) -> None:
    """Train `NUM_STEPS` steps into `folder`; every rank sees the same batches in every run."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = GPT()
    root = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(50 + rank)
    batches = [torch.randint(VOCABULARY, (BATCH, LENGTH + 1)) for _ in range(NUM_STEPS)]
    extra = torch.zeros(BATCH, LENGTH, WIDTH)
    config = {**CONFIG, "run_id": folder.name, "output_dir": str(folder.parent), "spool_dir": str(folder / "spool")}
    PrecisionDebugger(dump_path=folder / "dumps/ordered/attempt1", level="mix", step=[FAULT_STEP])
    with TrainerMon(config) as monitor:
        monitor.set_monitor(root, optimizer)
        for step, text in enumerate(batches):
            here = fault if step == FAULT_STEP and fault is not None and rank == fault.rank else None
            remove = inject(model, optimizer, here) if here else (lambda: None)
            given = extra + 0.5 if here and here.kind == "batch" else extra
            PrecisionDebugger.start(model)
            logits = root(text[:, :-1], given)
            loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
            PrecisionDebugger.stop()
            optimizer.step()
            optimizer.zero_grad()
            PrecisionDebugger.step()
            remove()
    PrecisionDebugger.close()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    for fault in (None, *FAULTS):
        train(folder / (fault.name if fault else SOUND), fault)
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
