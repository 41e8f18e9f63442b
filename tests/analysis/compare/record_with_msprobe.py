"""Dumps two steps of a small model with mindstudio-probe: run by the interpreter that has it, never imported.

    python record_with_msprobe.py FOLDER {statistics,md5,tensor} FACTOR

FACTOR multiplies what the second layer takes: 1 is the sound run, anything else the faulty one. NaN is a factor too.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from msprobe.pytorch import PrecisionDebugger


class Block(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.norm = torch.nn.LayerNorm(8)
        self.fc1 = torch.nn.Linear(8, 16)
        self.fc2 = torch.nn.Linear(16, 8)

    def forward(self, x_BD, scale=1.0):
        hidden = torch.nn.functional.gelu(self.fc1(self.norm(x_BD)))
        if self.factor != 1:
            hidden = hidden.mul_(self.factor)
        return x_BD + scale * self.fc2(hidden)


class Model(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.emb = torch.nn.Embedding(11, 8)
        self.layers = torch.nn.ModuleList([Block(1.0), Block(factor), Block(1.0)])
        self.head = torch.nn.Linear(8, 11, bias=False)

    def forward(self, tokens_B):
        x_BD = self.emb(tokens_B)
        for layer in self.layers:
            x_BD = layer(x_BD, scale=0.5)
        return self.head(x_BD.to(torch.bfloat16).float())


def main() -> None:
    folder, mode, factor = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    task = "tensor" if mode == "tensor" else "statistics"
    block: dict[str, Any] = {"scope": [], "list": [], "data_mode": ["all"]}
    if mode == "md5":
        block["summary_mode"] = "md5"
    config = {"task": task, "dump_path": str(folder), "rank": [], "step": [], "level": "mix", task: block}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    model = Model(factor)
    debugger = PrecisionDebugger(config_path=str(folder / "config.json"))
    tokens_B = torch.arange(6)
    debugger.start(model)
    torch.nn.functional.cross_entropy(model(tokens_B), tokens_B).backward()
    debugger.stop()
    debugger.step()


if __name__ == "__main__":
    main()
