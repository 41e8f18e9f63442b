"""Compares two runs of many dumps by processes of this machine and on a Ray cluster: time by the clock.

    python -m benchmarks.bench_compare_ray          # 64 dumps a side, of 2,000 calls
    python -m benchmarks.bench_compare_ray --dumps 256 --pairs 1

The cluster is on this machine and has as many processors as the processes, so that the difference is what Ray itself
costs. The two run in turn; on a busy machine only their ratio says something.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.bench_compare import write_dump
from trainermon.analysis.compare.comparison import num_cores

HEAD = Path(__file__).parents[1] / "tests/analysis/compare/ray_head.py"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dumps", type=int, default=64, help="of each side")
    parser.add_argument("--calls", type=int, default=2000, help="of each dump")
    parser.add_argument("--pairs", type=int, default=3, help="how often both are measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for side, seed in (("a", 1), ("b", 2)):
            _write_run(folder / side, options.dumps, options.calls, seed)
        print(f"{options.dumps} dumps a side of {options.calls} calls, {num_cores()} processors")
        with _cluster(folder) as address:
            found = [(_clock_s(folder), _clock_s(folder, "--ray", address)) for _ in range(options.pairs)]
    for place, what in enumerate(("processes of this machine", "Ray cluster")):
        times_s = [pair[place] for pair in found]
        print(f"{what:26} {median(times_s):7.1f} s [{min(times_s):.1f}-{max(times_s):.1f}]")
    print(f"{'ratio':26} {median(ray / local for local, ray in found):7.2f}")
    return 0


def _write_run(run: Path, num_dumps: int, calls: int, seed: int) -> None:
    first = run / "step0" / "rank0"
    write_dump(first, calls, seed)
    for rank in range(1, num_dumps):
        shutil.copytree(first, run / "step0" / f"rank{rank}")


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[str]:
    """Run a cluster with as many processors as this process may use; give its address."""
    environment = {**os.environ, **QUIET, "RAY_TMPDIR": str(folder)}
    command = [sys.executable, str(HEAD), str(num_cores())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        yield head.stdout.readline().strip()
        head.stdin.close()


def _clock_s(folder: Path, *options: str) -> float:
    """Return the seconds that the command takes, its start and the connection to the cluster included."""
    sides = [str(folder / "a"), str(folder / "b")]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as output:
        command = [sys.executable, "-m", "trainermon", "compare", *sides, "-o", output, "-f", "csv", *options]
        environment = {**os.environ, **QUIET, "RAY_TMPDIR": str(folder)}
        subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.monotonic() - began_s


if __name__ == "__main__":
    sys.exit(main())
