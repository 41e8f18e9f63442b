"""What task grad_probe adds to a step, here and in msprobe 8.3.3, and what a comparison of two runs costs.

    python -m benchmarks.bench_gradients [--other-python PYTHON]

PYTHON is one of an environment with mindstudio-probe 8.3.3, the last with a gradient probe, and torch. The work is 148
tensors with 29.6 M float32 elements and random gradients; a step does nothing else. CPU time, one thread, median of
back-to-back rounds of both tools. The read limit is a loop in C that reads the same bytes and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_TENSORS, NUM_ELEMENTS, STEPS, ROUNDS = 148, 200_000, 9, 5
LEVELS = ("L0", "L1", "L2")


def measure(tool: str, level: str, folder: Path) -> tuple[float, int]:
    """Return the CPU seconds of a step, and the bytes that one wrote."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = folder / "config.json"
    block = {"grad_level": level, "param_list": [], "bounds": [-1, 0, 1]}
    config.write_text(
        json.dumps(
            {"task": "grad_probe", "dump_path": str(folder / "out"), "rank": [], "step": [], "grad_probe": block}
        )
    )
    if tool == "msprobe":
        from msprobe.pytorch import PrecisionDebugger
    else:
        from trainermon import PrecisionDebugger
    model = torch.nn.Module()
    for number in range(NUM_TENSORS):
        model.register_parameter(f"w{number}", torch.nn.Parameter(torch.zeros(NUM_ELEMENTS)))
    for parameter in model.parameters():
        parameter.grad = torch.randn(NUM_ELEMENTS)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    optimizer.add_param_group({"params": list(model.parameters())})
    optimizer.step = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__get__(optimizer)  # the hooks alone
    PrecisionDebugger(str(config)).monitor(model)
    spent, written = [], 0
    for _ in range(STEPS):
        start = time.process_time()
        optimizer.step()
        spent.append(time.process_time() - start)
        # Their pages are used again: the first touch of a virtual machine's memory costs more than all else.
        files = [file for file in (folder / "out").rglob("*") if file.is_file()]
        written = sum(file.stat().st_size for file in files)
        for file in files:
            file.unlink()
    return statistics.median(spent), written


def read_limit() -> float:
    """Return the CPU seconds that a loop in C takes to read as many bytes as a step's gradients have."""
    import torch

    from benchmarks.bench_statistics import c_reader

    read = c_reader()
    if read is None:
        return float("nan")
    gradients = [torch.randn(NUM_ELEMENTS) for _ in range(NUM_TENSORS)]
    spent = []
    for _ in range(STEPS):
        start = time.process_time()
        read(gradients)
        spent.append(time.process_time() - start)
    return statistics.median(spent)


def in_process(python: str, tool: str, level: str) -> tuple[float, int]:
    """Measure in a process of its own."""
    command = [python, "-W", "ignore", "-m", "benchmarks.bench_gradients", "--measure", tool, "--level", level]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    spent, written = json.loads(done.stdout.splitlines()[-1])
    return spent, written


def compare_cost(folder: Path) -> tuple[float, float]:
    """Return the CPU seconds of comparing two runs of 10 steps, and of reading the same bitmaps."""
    import numpy as np

    from trainermon.analysis.gradients.command import compare_gradients
    from trainermon.core.gradient_signs import (
        GradientPart,
        IndexBox,
        SignBitmaps,
        SignCounts,
        SignsHeader,
        signs_path,
        write_signs,
    )

    random = np.random.default_rng(0)
    words = random.integers(0, 2**63, -(-NUM_ELEMENTS // 64), np.uint64)
    box = (IndexBox((0,), (NUM_ELEMENTS,)),)
    for run in ("one", "two"):
        for step in range(10):
            held = [
                (
                    GradientPart(name=f"w{n}", shape=(NUM_ELEMENTS,), boxes=box, length=NUM_ELEMENTS),
                    SignCounts(num_zeros=step * n),
                    SignBitmaps(words, ~words),
                )
                for n in range(NUM_TENSORS)
            ]
            write_signs(signs_path(folder / run, step, 0), SignsHeader(step=step, rank=0), held)
    spent, read = [], []
    for _ in range(STEPS):
        start = time.process_time()
        compare_gradients(folder / "one", folder / "two")
        middle = time.process_time()
        for file in folder.rglob("*.bits"):
            np.fromfile(file, np.uint8)
        spent.append(middle - start)
        read.append(time.process_time() - middle)
    return statistics.median(spent), statistics.median(read)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other-python")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--level", default="L1", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_gradients.") as folder:
        if arguments.measure:
            sys.stdout.write(json.dumps(measure(arguments.measure, arguments.level, Path(folder))) + "\n")
            return
        tools = {"trainermon": sys.executable}
        if arguments.other_python:
            tools["msprobe"] = arguments.other_python
        print(f"reading the gradients: {1e3 * read_limit():.1f} ms")
        for level in LEVELS:
            found = [{tool: in_process(python, tool, level) for tool, python in tools.items()} for _ in range(ROUNDS)]
            added = {tool: 1e3 * statistics.median(one[tool][0] for one in found) for tool in tools}
            cells = [f"{tool} +{added[tool]:.1f} ms, {found[0][tool][1] / 1e6:.1f} MB a step" for tool in tools]
            if "msprobe" in tools:
                ratios = [one["msprobe"][0] / one["trainermon"][0] for one in found]
                cells.append(f"{statistics.median(ratios):.1f} x cheaper [{min(ratios):.1f}-{max(ratios):.1f}]")
            print(f"{level}: {'; '.join(cells)}")
        spent, read = compare_cost(Path(folder))
        print(f"compare of 10 steps: {1e3 * spent:.0f} ms, {spent / read:.1f} x reading the files")


if __name__ == "__main__":
    main()
