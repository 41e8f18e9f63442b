"""The rank of a soak: trains a tiny model, and says after every twentieth of its steps what the process costs.

    python -m benchmarks.soak.training CONFIG STEPS RATE        # at most RATE steps a second

Each line is JSON: `step`, `cpu_s` (of this process so far), and the `usage` of the process.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch import nn

from benchmarks.soak.usage import usage_of
from trainermon import TrainerMon

SAMPLES = 20


def main() -> None:
    config, steps, rate = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(16, 8), torch.randn(16, 1)
    with TrainerMon(config) as monitor:
        monitor.set_monitor(model, optimizer)
        began_s = time.monotonic()
        for step in range(steps):
            time.sleep(max(0.0, began_s + step / rate - time.monotonic()))
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.record(loss=loss.detach())
            if (step + 1) % (steps // SAMPLES) == 0:
                said = {"step": step + 1, "cpu_s": time.process_time(), **usage_of(os.getpid())}
                print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
