"""Compares two dumps of many calls with trainermon and with mindstudio-probe: processor time and memory of both.

    python -m benchmarks.bench_compare [--calls N] [--runs N] [--json]

Each call has four rows. CPU time and not wall time, so that other load on the machine does not count; the two tools run
in turn.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
OTHER = ROOT / ".venv-bench" / "bin" / "msprobe"
SHAPES = ([4, 128, 64], [64, 64], [64])


def tensor(shape: list[int], numbers: random.Random, noise: random.Random) -> dict[str, object]:
    size, factor = abs(numbers.gauss(0, 1)), 1 + noise.gauss(0, 1e-7)
    statistics = {"Max": size * factor, "Min": -size * factor, "Mean": size * 0.01 * factor, "Norm": size * 30 * factor}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": shape, **statistics, "requires_grad": True}


def write_dump(folder: Path, calls: int, seed: int) -> None:
    """Write a dump of linear layers; dumps of other seeds differ by rounding."""
    folder.mkdir(parents=True)
    numbers, noise, data = random.Random(0), random.Random(seed), {}
    for index in range(calls // 2):
        inputs = [tensor(shape, numbers, noise) for shape in SHAPES]
        output = [tensor(SHAPES[0], numbers, noise)]
        data[f"Functional.linear.{index}.forward"] = {"input_args": inputs, "input_kwargs": {}, "output": output}
    for index in reversed(range(calls // 2)):
        outputs = [tensor(shape, numbers, noise) for shape in SHAPES]
        data[f"Functional.linear.{index}.backward"] = {"input": [tensor(SHAPES[0], numbers, noise)], "output": outputs}
    head = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (folder / "dump.json").write_text(json.dumps({**head, "data": data}))
    (folder / "stack.json").write_text(json.dumps({"0": [list(data), ["File train.py, line 1, in step, \n f(x)"]]}))
    (folder / "construct.json").write_text("{}")


def measure(command: Sequence[object]) -> tuple[float, float]:
    """Return processor seconds and the largest resident memory in MB of a command."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL,"
        " stderr=subprocess.DEVNULL); u = resource.getrusage(resource.RUSAGE_CHILDREN);"
        " print(u.ru_utime + u.ru_stime, u.ru_maxrss / 1024)"
    )
    words = [sys.executable, "-c", code, *map(str, command)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, done.stdout.split())
    return seconds, megabytes


def measure_all(calls: int, runs: int) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and megabytes of every run of both tools; of the other none if it is not installed."""
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        write_dump(a, calls, 1)
        write_dump(b, calls, 2)
        for run in range(runs):
            output = Path(folder) / f"run{run}"
            command = [sys.executable, "-m", "trainermon", "compare", a, b, "-o", output / "ours", "-f", "csv"]
            found["ours"].append(measure(command))
            if OTHER.exists():
                command = [OTHER, "compare", "-tp", a / "dump.json", "-gp", b / "dump.json", "-o", output / "theirs"]
                found["theirs"].append(measure(command))
    return found


def summary(runs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the median and the range of the seconds, and the largest memory."""
    seconds = [time for time, _ in runs]
    return {
        "median": median(seconds),
        "low": min(seconds),
        "high": max(seconds),
        "peak_mb": max(memory for _, memory in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one line that a program can read")
    arguments = parser.parse_args()
    measured = measure_all(arguments.calls, arguments.runs)
    results = {name: summary(runs) for name, runs in measured.items() if runs}
    if arguments.json:
        print("RESULT " + json.dumps({"calls": arguments.calls, "runs": arguments.runs, **results}))
        return
    for name, of_tool in results.items():
        tool = "trainermon" if name == "ours" else "msprobe"
        print(f"{tool:<12}{arguments.calls:,} calls: {of_tool['median']:.1f} s of processor time", end="")
        print(f" [{of_tool['low']:.1f}–{of_tool['high']:.1f}], {of_tool['peak_mb']:,.0f} MB")
    if "theirs" in results:
        print(f"{'ratio':<12}{results['theirs']['median'] / results['ours']['median']:.1f}")


if __name__ == "__main__":
    main()
