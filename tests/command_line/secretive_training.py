"""A training that is full of secrets, as real ones are; `{name}` stands for one. It is written out before it runs."""
# ruff: noqa
# mypy: ignore-errors

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

from trainermon import PrecisionDebugger, TrainerMon

API_TOKEN = "{module_level}"


def login(user="anne", password="{default}"):
    return user, password


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.api_key = "{attribute}"

    def forward(self, x, token=None, options=None):
        url = "https://anne:{url}@example.org/x"
        settings = {"password": "{literal}", "tokenizer": "shown_in_code"}
        header = f"Authorization: Bearer {header}"
        note = ["{service}", f"{deployed} {x.shape}"]  # {comment}
        return self.layer(x)


parser = argparse.ArgumentParser()
for option in ("--pw", "--api-key", "--header", "--db-url", "--auth-type", "--pass-through", "--note", "--out"):
    parser.add_argument(option)
arguments = parser.parse_args()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
monitor = TrainerMon(
    {
        "output_dir": arguments.out,
        "run_id": "run",
        "agent": {"linger_s": 1},
        "xy_distribution": True,
        "environment": True,
        "format": ["csv", "tensorboard"],
        "tags": ["shown_tag"],
    }
)
monitor.set_monitor(model, optimizer)
debugger = PrecisionDebugger(dump_path=f"{arguments.out}/dump", level="mix", task="statistics")
for step in range(3):
    debugger.start(model)
    x = torch.randn(2, 8) * (float("nan") if step == 2 else 1.0)
    y = model(x, token="{keyword}", options={"password": ["{nested}"], "tokenizer": "shown_in_call", "{passed}": 1})
    loss = y.pow(2).mean()
    monitor.record(loss=loss)
    loss.backward()
    debugger.stop()
    optimizer.step()
    optimizer.zero_grad()
    debugger.step()
debugger.close()
sys.excepthook = lambda *_: None  # what Python prints is the script's own
session_key, db_password = arguments.note, "{variable}"
raise ConnectionError(f"shown_in_message: {db_password} and {raised} are refused, as is {session_key}")
