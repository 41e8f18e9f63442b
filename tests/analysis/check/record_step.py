"""Write what mindstudio-probe dumps of one step to recorded/msprobe_<version>, tensors as lists of numbers.

python tests/analysis/check/record_step.py tensor      # with mindstudio-probe 26.2.0 and torch for the CPU: step.json
python tests/analysis/check/record_step.py statistics  # with 26.2.0, and with 8.3.3: statistics.json
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

import torch
from msprobe.pytorch import PrecisionDebugger
from torch.nn import functional

VERSION = importlib.metadata.version("mindstudio-probe").partition(".")[0]
RECORDED = Path(__file__).parent / "recorded" / f"msprobe_{VERSION}"


def step() -> None:
    """Train on two sequences of three tokens: calls whose last operation is not all that they do, and some that are."""
    torch.manual_seed(0)
    table, weight, head = (torch.randn(shape, requires_grad=True) for shape in ((5, 4), (4, 4), (5, 4)))
    scale, shift = (torch.randn(4, requires_grad=True) for _ in range(2))
    x = functional.embedding(torch.tensor([[0, 1, 2], [3, 4, 0]]), table)
    x = functional.layer_norm(x, (4,), scale, shift)
    x = functional.linear(x, weight, shift)
    best, _ = torch.topk(x, 2)
    logits = functional.linear(x.flatten(0, 1), head)
    loss = functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3, 4, 0]))
    (loss + best.sum()).backward()


def main(kind: str) -> None:
    """Dump the step with the task `kind`, and write the dump as one file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = {"task": kind, "dump_path": f"{folder}/dump", "rank": [], "step": [], "level": "L1"}
        choice = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
        (folder / "config.json").write_text(json.dumps(task | {kind: choice}))
        debugger = PrecisionDebugger(config_path=str(folder / "config.json"))
        debugger.start()
        step()
        debugger.stop()
        debugger.step()
        [path] = folder.rglob("dump.json")
        dump = json.loads(path.read_text())
        if kind == "tensor":
            dump["dump_data_dir"] = "dump_tensor_data"
        files = sorted((path.parent / "dump_tensor_data").glob("*.pt"))
        tensors = {file.name: torch.load(file).tolist() for file in files}
    calls = dump.pop("data")
    parts = {"head": dump, "calls": calls} | ({"tensors": tensors} if kind == "tensor" else {})
    text = "{" + ",\n".join(f'"{name}": {_lines(part)}' for name, part in parts.items()) + "}\n"
    (RECORDED / ("step.json" if kind == "tensor" else "statistics.json")).write_text(text)


def _lines(part: dict[str, object]) -> str:
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in part.items()) + "\n}"


if __name__ == "__main__":
    main(sys.argv[1])
