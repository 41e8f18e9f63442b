"""A training script that is written to a file, perhaps with a fault in it, and run: its dumps know their code."""

import os
import subprocess
import sys

SCRIPT = """
import sys
import torch
from torch import nn
from trainermon import PrecisionDebugger


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc1(x)
        h = torch.relu(h)
        return self.fc2(h) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


torch.manual_seed(0)
net = Net()
debugger = PrecisionDebugger(dump_path=sys.argv[1], level="mix")
debugger.start(net)
net(torch.randn(2, 4)).sum().backward()
debugger.stop()
debugger.step()
"""
RELU = "        h = torch.relu(h)"


def line_of(text, part):
    (number,) = [number for number, line in enumerate(text.splitlines(), 1) if part in line]
    return number


def trained(folder, text):
    """Run the script `text`; return the folder of its dumps."""
    folder.mkdir()
    (folder / "train.py").write_text(text)
    subprocess.run([sys.executable, folder / "train.py", folder / "dumps"], check=True, env=os.environ)
    return folder / "dumps"
