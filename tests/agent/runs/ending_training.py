"""A training that ends as it is told, once somebody watches it: `python ending_training.py FOLDER ENDING`."""

import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from trainermon import TrainerMon

FOLDER, ENDING = Path(sys.argv[1]), sys.argv[2]
SETTINGS = {
    "run_id": "run",
    "output_dir": str(FOLDER / "output"),
    "agent": {"wait_s": 1},
}


def await_file(name):
    while not (FOLDER / name).exists():
        time.sleep(0.01)


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = TrainerMon(SETTINGS)
    monitor.set_monitor(model, optimizer)
    for _ in range(4):
        loss = model(torch.ones(2, 4)).square().mean()
        monitor.record(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    (FOLDER / "reached").touch()
    await_file("go")
    if ENDING == "exit":
        sys.exit(3)
    if ENDING == "exception":
        raise ValueError("bad data")
    if ENDING.startswith("SIG"):
        await_file("never")
    if ENDING == "closed":
        monitor.close()


if __name__ == "__main__":
    main()
