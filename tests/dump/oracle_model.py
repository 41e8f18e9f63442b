"""Dumps two steps of a small model by the package that is named, and prints the names of what was recorded.

python tests/dump/oracle_model.py msprobe.pytorch FOLDER mix
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """Operators in all their forms, functions of every kind, in-place ones, and several outputs."""

    def __init__(self):
        super().__init__()
        self.emb, self.fc, self.act = nn.Embedding(10, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.norm, self.drop, self.conv, self.pool = (
            nn.LayerNorm(4),
            nn.Dropout(0.0),
            nn.Conv1d(1, 1, 1),
            nn.MaxPool1d(2),
        )

    def forward(self, ids):
        x = self.emb(ids)
        y = self.fc(x) + x
        y += 1.0
        y = 2 * y
        y = y.view(-1, 4) @ self.fc.weight.t()
        z = torch.matmul(y, y.transpose(0, 1)).softmax(-1)
        y = functional.softmax(z, dim=-1) @ y
        y = self.drop(self.norm(self.act(y)))[0:2]
        y = y * 0.5
        y.mul_(0.5)
        y = 1 - (-y.add(1) / 2 - 1)
        mask = torch.ones(2, dtype=torch.bool)
        y = torch.where(mask[:, None], y**2, torch.zeros_like(y))
        a, b = torch.split(torch.cat([y, y]), 2)
        c = torch.einsum("ij,ij->i", a, b)
        d = self.pool(self.conv(a[:, None]))
        attended = functional.scaled_dot_product_attention(a[None], b[None], b[None])
        loss = functional.cross_entropy(a, torch.tensor([0, 1])) + c.sum() + functional.gelu(d).mean()
        return loss + torch.var_mean(b.float())[0] + attended.max() + functional.mse_loss(a, b) + (a > 0).sum()


def main() -> None:
    """Write dumps, and print keys and parents of the forward calls of the second step."""
    package, folder, level = sys.argv[1:]
    torch.manual_seed(0)
    model = nn.Sequential(Net())
    config = Path(folder) / "config.json"
    settings = {"task": "statistics", "dump_path": f"{folder}/dump", "level": level, "rank": [], "step": []}
    config.write_text(json.dumps({**settings, "statistics": {}}))
    debugger = importlib.import_module(package).PrecisionDebugger(str(config))
    for _ in range(2):
        debugger.start(model)
        model(torch.tensor([1, 2, 3])).backward()
        debugger.stop()
        debugger.step()
    (place,) = (Path(folder) / "dump/step1").iterdir()
    data = json.loads((place / "dump.json").read_text())["data"]
    construct = json.loads((place / "construct.json").read_text())
    values = {key: _numbers(value["output"]) for key, value in data.items() if "forward" in key}
    parents = {key: parent for key, parent in construct.items() if "forward" in key}
    print(json.dumps({"outputs": values, "parents": parents}))


def _numbers(value):
    if isinstance(value, dict) and "Max" in value:
        return [value["Max"], value["Min"]]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [number for item in items for number in _numbers(item)]


if __name__ == "__main__":
    main()
