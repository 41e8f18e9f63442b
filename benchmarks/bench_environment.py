"""Measures what `trainermon env collect` and `EnvironmentRecorder` cost: python -m benchmarks.bench_environment.

CPU time of the command without torch, size of its pack, and of a step with and without the recorder: the first step,
whose weights and inputs are hashed, and the ones after it, in processes that record nothing else.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import nn

from trainermon import EnvironmentRecorder

TOKENS, WIDTH, LAYERS = 512, 1024, 28
PAIRS = 5


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        if "--recorded-step" in sys.argv:
            print(json.dumps(record_a_step(Path(folder))))
            return
        measure_command(Path(folder))
        measure_recorder()


def measure_command(folder: Path) -> None:
    script = folder / "train.sh"
    script.write_text(
        "export NCCL_ALGO=Ring\nARGS=(--lr 1e-4 --bf16)\ntorchrun --nproc_per_node 8 train.py ${ARGS[@]}\n"
    )
    pack = folder / "pack.zip"
    times = []
    for _ in range(PAIRS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "trainermon", "env", "collect", str(script), "-o", str(pack)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    median, least, most = statistics.median(times), min(times), max(times)
    print(f"env collect: {median:.2f} s CPU [{least:.2f}-{most:.2f}], {pack.stat().st_size:,} bytes")


def measure_recorder() -> None:
    """Print the ratios of recorded to plain steps, each pair in a process of its own: a training is recorded once."""
    command = [sys.executable, "-m", "benchmarks.bench_environment", "--recorded-step"]
    outputs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(PAIRS)]
    rows = [json.loads(output) for output in outputs]
    count, plain = rows[0]["parameters"], statistics.median(row["plain"] for row in rows)
    print(f"{count / 1e6:.1f} M parameters, a step of {plain * 1e3:.0f} ms")
    for name in ("first", "later"):
        ratios = [row[name] / row["plain"] for row in rows]
        print(f"{name} step: {statistics.median(ratios):.3f} x [{min(ratios):.3f}-{max(ratios):.3f}]")


def record_a_step(folder: Path) -> dict[str, float]:
    """Return the CPU seconds of plain steps (their median), of the first recorded one, and of the ones after it."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(TOKENS, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = [cpu_time(step) for _ in range(3)]
    with EnvironmentRecorder(model, optimizer, output=folder / "pack.zip"):
        first = cpu_time(step)
        later = [cpu_time(step) for _ in range(3)]
    plain = statistics.median([*before, *(cpu_time(step) for _ in range(3))])
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": count, "plain": plain, "first": first, "later": statistics.median(later)}


class Block(nn.Module):
    """A layer that is no class of torch's, so that its source is hashed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows` times the weight."""
        return cast(torch.Tensor, self.linear(rows))


def cpu_time(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
