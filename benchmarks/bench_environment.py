"""Measures what `trainermon env collect` and `EnvironmentRecorder` cost: python -m benchmarks.bench_environment.

CPU time of the command without torch, size of its pack, and of a step with and without the recorder, in back-to-back
pairs: the first step, whose weights and inputs are hashed, and the ones after it.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from trainermon import EnvironmentRecorder

TOKENS, WIDTH, LAYERS = 512, 1024, 28
PAIRS = 5


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure_command(Path(folder))
        measure_recorder(Path(folder))


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


def measure_recorder(folder: Path) -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(TOKENS, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    firsts, laters, plains = [], [], []
    for number in range(PAIRS):
        plains.append(cpu_time(step))
        with EnvironmentRecorder(model, optimizer, output=folder / f"{number}.zip"):
            firsts.append(cpu_time(step))
            laters.append(cpu_time(step))
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.1f} M parameters, a step of {statistics.median(plains) * 1e3:.0f} ms")
    for name, times in (("first step", firsts), ("later steps", laters)):
        ratios = [time / plain for time, plain in zip(times, plains, strict=True)]
        print(f"{name}: {statistics.median(ratios):.3f} x [{min(ratios):.3f}-{max(ratios):.3f}]")


def cpu_time(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
