"""Small steps of training with a debugger around them, and devices whose kernels have faults."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainermon import PrecisionDebugger

Rows = list[dict[str, str]]


class FaultyKernels(TorchDispatchMode):
    """Alters in place what the operators named give, where that is float32 or narrower: float64 stays right."""

    def __init__(self, alter: Callable[[torch.Tensor], object], *names: str) -> None:
        super().__init__()
        self._alter, self._names = alter, names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_meant = str(func).split(".")[1] in self._names
        if is_meant and isinstance(result, torch.Tensor) and result.dtype is not torch.float64:
            self._alter(result)
        return result


def tried(folder: Path, step: Callable[[], object], *, steps: int = 1, top: Any = None, **block: Any) -> Rows:
    """Run a step under `task: free_benchmark`, and return the rows of the last step's csv."""
    config = folder / "free.json"
    task = {"task": "free_benchmark", "dump_path": str(folder / "dump"), "free_benchmark": block, **(top or {})}
    config.write_text(json.dumps(task))
    debugger = PrecisionDebugger(config)
    try:
        for _ in range(steps):
            debugger.start()
            step()
            debugger.stop()
            debugger.step()
    finally:
        PrecisionDebugger.close()
    return rows_of(folder, steps - 1)


def rows_of(folder: Path, step: int = 0, rank: int = 0) -> Rows:
    with (folder / "dump" / f"step{step}" / f"rank{rank}" / "free_benchmark.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def summary_of(folder: Path, step: int = 0) -> Any:
    return json.loads((folder / "dump" / f"step{step}" / "rank0" / "free_benchmark.json").read_text())
