"""Trains a small model under msprobe's TrainerMon or under ours, with one configuration; for test_msprobe.py.

python msprobe_training.py msprobe|trainermon FOLDER
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

NUM_STEPS = 4
MICRO_STEPS = 2
CONFIG = {
    "targets": {},
    "xy_distribution": True,
    "wg_distribution": True,
    "mv_distribution": True,
    "param_distribution": True,
    "mg_direction": True,
    "recording_l2_features": True,
    "l2_targets": {"linear_hook": ["0:fc1", "0:fc2"]},
    "ops": ["norm", "min", "max", "mean", "zeros", "nans"],
    "ndigits": 12,
    "step_count_per_record": 2,
    "eps": 1e-30,
    "alert": {
        "rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}, {"rule_name": "AnomalyNan"}],
        "dump": True,
    },
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.add = Add()
        self.fc2 = nn.Linear(8, 2)

    def forward(self, x):
        hidden = torch.relu(self.fc1(x))
        return self.fc2(self.add(self.norm(hidden), hidden))


class Add(nn.Module):
    def forward(self, left, right):
        return left + right


def main() -> None:
    which, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    inputs = torch.randn(NUM_STEPS, MICRO_STEPS, 3, 4)  # at once: msprobe's features draw from the same generator
    config = folder / "config.json"
    os.environ["MONITOR_OUTPUT_DIR"] = str(folder / "output")
    if which == "msprobe":
        sys.modules["megatron"] = None  # where it is installed, msprobe takes no unreduced gradients of anything else
        from msprobe.pytorch import TrainerMon

        config.write_text(json.dumps(CONFIG))
        monitor = TrainerMon(str(config), params_have_main_grad=False)
    else:
        from trainermon import TrainerMon

        own = {"run_id": "run", "spool_dir": str(folder / "spool"), "agent": {"linger_s": 0.0, "wait_s": 60.0}}
        config.write_text(json.dumps({**CONFIG, **own}))
        monitor = TrainerMon(str(config))
    monitor.set_monitor(model, optimizer, MICRO_STEPS)
    for step in inputs:
        optimizer.zero_grad()
        for micro_step in step:
            model(micro_step).pow(2).mean().backward()
        optimizer.step()
    if which == "trainermon":
        monitor.close()


if __name__ == "__main__":
    main()
