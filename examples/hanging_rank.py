"""Train on two ranks, one of which stands still for a while or dies at step 20, and see what the agent makes of it.

    trainermon run -- torchrun --nproc-per-node 2 examples/hanging_rank.py --fault loop
    trainermon run -- torchrun --nproc-per-node 2 examples/hanging_rank.py --fault kill

The limit for a step is five seconds here, the default is two minutes.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainermon import TrainerMon

STEPS, FAULT_STEP, PAUSE_S = 40, 20, 15


def endless_loop() -> None:
    """Not quite: so that the example comes to an end."""
    end_s = time.monotonic() + PAUSE_S
    while time.monotonic() < end_s:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=("loop", "kill", "exception"), default="loop")
    fault = parser.parse_args().fault

    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = TrainerMon({"hang": {"step_s": 5}})
    monitor.set_monitor(model, optimizer)
    for step in range(STEPS):
        loss = model(torch.randn(16, 64)).square().mean()
        if step == FAULT_STEP and dist.get_rank() == 1:
            if fault == "loop":
                endless_loop()
            elif fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise ValueError("the batch of this step is empty")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.record(loss=loss)
    monitor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
