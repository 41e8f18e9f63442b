"""One of two ranks that train until one edit of their configuration file was refused, and another is in force."""

import json
import os
import re
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainermon import TrainerMon

AGENT = {"wait_s": 20, "linger_s": 0}
WANTED = {"dynamic_on": True, "mv_distribution": True, "collect_times": 4, "agent": AGENT}
LIMIT_S = 60
MORE_STEPS = 10


def main():
    path = Path(sys.argv[1])
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with TrainerMon(path) as monitor:
        monitor.set_monitor(model, optimizer)
        editor = Editor(path, monitor.run_directory) if dist.get_rank() == 0 else None
        train(model, optimizer, editor)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def train(model, optimizer, editor):
    is_over = torch.zeros(1)
    for step in range(10**9):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        is_over[0] = editor is not None and editor.is_over(step)
        dist.all_reduce(is_over)
        if is_over:
            return


class Editor:
    """Edits the file twice, the second time when the agent has said what it thinks of the first edit."""

    def __init__(self, path, run_directory):
        self.path = path
        self.run_directory = run_directory
        self.deadline = time.monotonic() + LIMIT_S
        self.log = ""
        self.edits = 0

    def is_over(self, step):
        if step == 3:
            self.edit({"wg_distribtion": True})
        if step % 20 == 0:
            self.log = "".join(path.read_text() for path in self.run_directory.glob("nodes/*/agent.log"))
        if self.edits == 1 and "is refused, the old one stays" in self.log:
            self.edit(WANTED)
        applies = re.search(r"applies from step (\d+) on", self.log)
        return time.monotonic() > self.deadline or (applies is not None and step > int(applies[1]) + MORE_STEPS)

    def edit(self, content):
        self.edits += 1
        temporary = self.path.with_suffix(".tmp.json")
        temporary.write_text(json.dumps(content))
        temporary.replace(self.path)


if __name__ == "__main__":
    main()
