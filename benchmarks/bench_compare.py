"""Compares two dumps of many calls with trainermon and with mindstudio-probe: processor time and memory of both.

    python -m benchmarks.bench_compare [CALLS]

Each call has four rows or so. CPU time and not wall time, so that other load on the machine does not count.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

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


def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        write_dump(a, calls, 1)
        write_dump(b, calls, 2)
        ours = measure([sys.executable, "-m", "trainermon", "compare", a, b, "-o", Path(folder) / "ours", "-f", "csv"])
        print(f"trainermon  {calls:,} calls: {ours[0]:.1f} s of processor time, {ours[1]:,.0f} MB")
        if OTHER.exists():
            command = [OTHER, "compare", "-tp", a / "dump.json", "-gp", b / "dump.json", "-o", Path(folder) / "theirs"]
            theirs = measure(command)
            print(f"msprobe     {calls:,} calls: {theirs[0]:.1f} s of processor time, {theirs[1]:,.0f} MB")
            print(f"ratio       {theirs[0] / ours[0]:.1f}")


if __name__ == "__main__":
    main()
