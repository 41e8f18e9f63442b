"""Draws the graph of dumps with trainermon and with mindstudio-probe: processor time, memory and size of the files.

    python -m benchmarks.bench_graph [--calls N ...] [--runs N] [--ranks N] [--msprobe PYTHON] [--only NAME ...]

The dumps are one recorded step of a small transformer whose micro step is repeated; the golden ones differ by
rounding. CPU time of the command and all its processes, interpreter included, and not wall time, so that other load on
the machine does not count; the tools run in turn. Memory is that of the largest process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.bench_compare import measure
from benchmarks.graph_dumps import record_step, repeat_step

OURS = (sys.executable, "-m", "trainermon")
GRAPH = (*OURS, "graph", "--no-cache")
THEIRS = ("-m", "msprobe.msprobe", "graph_visualize")
_MAX_DUMPS = 4
Measured = tuple[float, float, float]


def commands(folder: Path, msprobe: str | None) -> dict[str, list[object]]:
    """Return what is measured by name; each writes into the folder `out`, if it writes."""
    a, b, out = folder / "a", folder / "b", folder / "out"
    found: dict[str, list[object]] = {
        "graph": [*GRAPH, a],
        "graph --json": [*GRAPH, a, "--json"],
        "graph -o page": [*GRAPH, a, "-o", out / "graph.html"],
        "graph -o .vis.db": [*GRAPH, a, "-o", out / "graph.vis.db"],
        "compare": [*OURS, "compare", a, b, "-o", out, "-f", "csv"],
        "graph of two": [*GRAPH, a, b],
        "graph of two -o page": [*GRAPH, a, b, "-o", out / "graph.html"],
        "graph of two -o .vis.db": [*GRAPH, a, b, "-o", out / "graph.vis.db"],
    }
    if msprobe:
        target, golden = (next(side.rglob("dump.json")).parent for side in (a, b))
        found["msprobe build"] = [msprobe, *THEIRS, "-tp", target, "-o", out]
        found["msprobe compare"] = [msprobe, *THEIRS, "-tp", target, "-gp", golden, "-o", out]
    return found


def measure_size(
    step: Path, calls: int, runs: int, msprobe: str | None, only: Sequence[str] | None = None
) -> dict[str, list[Measured]]:
    """Return seconds, megabytes of memory and megabytes written of every run, by name; `only` of these if given."""
    found: defaultdict[str, list[Measured]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, side in enumerate(("a", "b")):
            repeat_step(step, folder / side / "step0" / "rank0", calls, seed=seed)
        for _ in range(runs):
            for label, command in commands(folder, msprobe).items():
                if only and label not in only:
                    continue
                (folder / "out").mkdir()
                found[label].append((*measure(command), _written(folder / "out")))
                shutil.rmtree(folder / "out")
    return found


def measure_ranks(step: Path, calls: int, ranks: int) -> dict[str, list[Measured]]:
    """Return seconds and megabytes of the page of a job of several ranks: read, and opened from the index.

    As in a data parallel job the model is the same. `_MAX_DUMPS` dumps differ by rounding; the others are copies.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(ranks):
            place = folder / "a" / "step0" / f"rank{rank}"
            if rank < _MAX_DUMPS:
                repeat_step(step, place, calls, seed=rank)
            else:
                shutil.copytree(place.with_name(f"rank{rank % _MAX_DUMPS}"), place, copy_function=os.link)
        page = folder / "graph.html"
        command = [*OURS, "graph", folder / "a", "-o", page, "--cache", folder / "index"]
        return {
            label: [(*measure(command), page.stat().st_size / 1e6)]
            for label in ("graph -o page", "graph -o page, again")
        }


def _written(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def summary(measured: Mapping[str, Sequence[Measured]]) -> dict[str, dict[str, float]]:
    """Return the median of the seconds, and the largest memory and files."""
    return {
        name: {
            "seconds": median(seconds for seconds, _, _ in runs),
            "peak_mb": max(memory for _, memory, _ in runs),
            "written_mb": max(written for _, _, written in runs),
        }
        for name, runs in measured.items()
    }


def ratios(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return how many times as expensive msprobe is, for what both do."""
    pairs = {
        "build": ("graph", "msprobe build"),
        "build, as a file of the same kind": ("graph -o .vis.db", "msprobe build"),
        "compare": ("graph of two", "msprobe compare"),
        "compare, as a file of the same kind": ("graph of two -o .vis.db", "msprobe compare"),
    }
    return {
        name: found[theirs]["seconds"] / found[ours]["seconds"]
        for name, (ours, theirs) in pairs.items()
        if ours in found and theirs in found
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument(
        "--ranks", type=int, default=0, help="also measure a job of this many ranks, of the last --calls"
    )
    parser.add_argument("--msprobe", metavar="PYTHON", help="interpreter of an environment with mindstudio-probe")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure only these, as they are named in the answer")
    parser.add_argument("--json", action="store_true", help="print one line that a program can read")
    arguments = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        step = record_step(Path(name))
        for calls in arguments.calls:
            found = summary(measure_size(step, calls, arguments.runs, arguments.msprobe, arguments.only))
            results[f"{calls:,} calls"] = {**found, "ratios": ratios(found)}
        if arguments.ranks:
            found = summary(measure_ranks(step, arguments.calls[-1], arguments.ranks))
            results[f"{arguments.ranks} ranks of {arguments.calls[-1]:,} calls"] = {**found, "ratios": {}}
    if arguments.json:
        print("RESULT " + json.dumps(results))
        return
    for of_size, rows in results.items():
        print(of_size)
        for label, row in rows.items():
            if label != "ratios":
                size = f"{row['peak_mb']:8,.0f} MB {row['written_mb']:8.1f} MB written"
                print(f"  {label:<24}{row['seconds']:8.2f} s {size}")
        for label, ratio in rows["ratios"].items():
            print(f"  {label}: msprobe costs {ratio:.1f} times as much")


if __name__ == "__main__":
    main()
