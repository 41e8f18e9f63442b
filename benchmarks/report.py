"""Runs every benchmark that the README quotes, ours and the other monitor's in turn, and writes the README's table.

make bench
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
LEVELS = {
    "gradients": "weight gradients",
    "state": "+ moments, parameters before and after",
    "activations": "+ inputs and outputs of every module, and their gradients",
}
FRAMEWORK_LEVELS = {
    "gradients": "gradients",
    "state": "+ moments, parameters",
    "activations": "+ activations",
    "collectives": "+ collectives",
}
WORKLOADS = {
    "megatron-dp": "Megatron-Core, DP 2",
    "megatron-dp-distributed-bf16": "Megatron-Core, DP 2, distributed optimizer, bf16",
    "megatron-tp": "Megatron-Core, TP 2",
    "deepspeed-1": "DeepSpeed ZeRO 1, bf16",
    "deepspeed-2": "DeepSpeed ZeRO 2, bf16",
    "deepspeed-3": "DeepSpeed ZeRO 3, bf16",
}
DUMP_TASKS = {"statistics": "statistics", "tensor": "statistics and tensors"}
DIES = "ends the training"
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class BenchmarkError(Exception):
    """A benchmark script did not come to a result."""


def run(python: str, script: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark script with `--json` and return the object on its RESULT line.

    Raises:
        BenchmarkError: It ended without one.
    """
    command = [python, str(ROOT / "benchmarks" / script), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        text = f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}"
        raise BenchmarkError(text)
    return json.loads(lines[-1].removeprefix("RESULT "))


def cell(result: dict[str, Any]) -> str:
    return (
        f"**{result['median']:.3f} ×** [{result['low']:.3f}–{result['high']:.3f}], "
        f"{result['extra_ms']:+.0f} ms, {result['peak_mb']:+.0f} MB"
    )


def step_table(python: str, other: str, pairs: int) -> list[str]:
    """Return the rows that compare the cost on the training step."""
    rows = ["| collected every step | mindstudio-probe | trainermon |", "|---|---|---|"]
    for level, text in LEVELS.items():
        arguments = ["--level", level, "--pairs", str(pairs)]
        theirs = run(other, "bench_step.py", "--monitor", "mindstudio", *arguments)
        ours = run(python, "bench_step.py", *arguments)
        rows.append(f"| {text} | {cell(theirs)} | {cell(ours)} |")
        print(rows[-1], flush=True)
    idle = run(python, "bench_step.py", "--level", "activations", "--interval", "1000000", "--pairs", str(pairs))
    rows.append(f"| nothing due on this step | – | {cell(idle)} |")
    return rows


def framework_table(python: str, other: str, pairs: int) -> list[str]:
    """Return the rows about real frameworks on two ranks: the other monitor's ratio, then ours."""
    rows = [f"| two ranks | {' | '.join(FRAMEWORK_LEVELS.values())} |", f"|---{'|---' * len(FRAMEWORK_LEVELS)}|"]
    for workload, text in WORKLOADS.items():
        cells = []
        for level in FRAMEWORK_LEVELS:
            arguments = ["--workload", workload, "--level", level, "--pairs", str(pairs)]
            ours = run(python, "bench_frameworks.py", *arguments)
            try:
                theirs = f"{run(other, 'bench_frameworks.py', '--monitor', 'mindstudio', *arguments)['median']:.2f} ×"
            except BenchmarkError as error:
                theirs = DIES
                print(str(error).splitlines()[-1], file=sys.stderr)
            cells.append(f"{theirs} → **{ours['median']:.3f} ×**, {ours['peak_mb']:+.0f} MB")
        rows.append(f"| {text} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def kernel_rows(python: str) -> list[str]:
    """Return the lines about the statistics kernels against the best reader of the same bytes, for those there are."""
    result = run(python, "bench_statistics.py")
    return [
        "| statistics of 148 tensors, 29.8 M elements, one thread | fp32 | bf16 |",
        "|---|---|---|",
        *(
            f"| {name} | {result['fp32'][key]:.2f} × | {result['bf16'][key]:.2f} × |"
            for name, key in (("C kernel, against the best plain reader", "c"), ("torch calls, likewise", "torch"))
            if key in result["fp32"]  # without a compiler, the package is installed without the C kernel
        ),
    ]


def compare_table(python: str, runs: int) -> list[str]:
    """Return the rows about two dumps that are held against each other; the script runs both tools in turn."""
    result = run(python, "bench_compare.py", "--runs", str(runs))
    cells = (
        f"**{one['median']:.1f} s** [{one['low']:.1f}–{one['high']:.1f}], {one['peak_mb']:,.0f} MB"
        for one in (result["theirs"], result["ours"])
    )
    return [
        "| CPU time and peak memory | mindstudio-probe | trainermon |",
        "|---|---|---|",
        f"| compare two dumps of {result['calls']:,} calls, to csv | {' | '.join(cells)} |",
    ]


def dump_table(python: str, other: str, rounds: int) -> list[str]:
    """Return the rows about the CPU time that a dump adds to a step; the script runs both tools in turn."""
    rows: list[str] = []
    for task, text in DUMP_TASKS.items():
        for level in ("L0", "L1", "mix"):
            arguments = ["--level", level, "--task", task, "--rounds", str(rounds), "--other-python", other]
            result = run(python, "bench_dump.py", *arguments)
            if not rows:
                rows = [
                    f"| dump of a step of {result['bare_ms']:.0f} ms | mindstudio-probe | trainermon | |",
                    f"|{'---|' * 4}",
                ]
            theirs, ours = result["mindstudio_extra_ms"], result["trainermon_extra_ms"]
            low, high = result["range"]
            cheaper = f"{result['times_cheaper']:.1f} × cheaper [{low:.1f}–{high:.1f}]"
            rows.append(f"| {level}, {text} | **+{theirs:.0f} ms** | **+{ours:.0f} ms** | {cheaper} |")
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--other-python", required=True, help="interpreter of an environment with mindstudio-probe")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--framework-pairs", type=int, default=6)
    parser.add_argument("--compare-runs", type=int, default=3)
    parser.add_argument("--dump-rounds", type=int, default=3)
    arguments = parser.parse_args()
    lines = step_table(arguments.python, arguments.other_python, arguments.pairs)
    lines += ["", *framework_table(arguments.python, arguments.other_python, arguments.framework_pairs)]
    lines += ["", *kernel_rows(arguments.python)]
    lines += ["", *compare_table(arguments.python, arguments.compare_runs)]
    lines += ["", *dump_table(arguments.python, arguments.other_python, arguments.dump_rounds)]
    lines += [
        "",
        f"CPU-time ratios, median of {arguments.pairs} back-to-back pairs [smallest–largest] "
        f"({arguments.framework_pairs} for frameworks: mindstudio-probe → trainermon, two jobs in turn), one thread, "
        f"{platform.machine()}, Python {platform.python_version()}; `make bench` measures them again.",
    ]
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text("\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"]), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
