"""Measures what many pieces cost: python -m benchmarks.bench_checkpoint_pieces [--pieces N] [--runs N].

Two of torch's distributed checkpoints, in 100,000 chunks of 64 bytes, so that their elements do not count: opened and
compared in a process of its own. CPU time of each, beside a loop that only reads the same chunks of both one by one,
and the anonymous memory at its highest, the interpreter's own 17 MB among it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.anonymous_memory import WATCH
from benchmarks.bench_checkpoint_formats import write_distributed

LAYOUTS = {
    "cut alike": (16, 1, 16, 1),
    "cut otherwise": (16, 1, 8, 2),
    "one tensor": (0, 1, 0, 1),
    "one tensor, cut otherwise": (0, 1, 0, 2),
}
"""Chunks of a tensor and rows of a chunk, of the first and of the second; 0: all chunks are one tensor's."""
MEASURE = (
    WATCH
    + """
import os, sys, time
from trainermon.analysis.checkpoint.comparison import CheckpointOptions, compare_checkpoints
from trainermon.analysis.checkpoint.opening import open_checkpoint
def chunks(checkpoint):
    return [(piece.stored.path, piece.stored.offset, piece.stored.num_elements * 4)
            for tensor in checkpoint.tensors.values() for piece in tensor.pieces]
def read_all(places):
    descriptor, last = -1, None
    for path, offset, size in places:
        if path != last:
            descriptor, last = os.open(path, os.O_RDONLY), path
        os.pread(descriptor, size, offset)
times = [time.process_time()]
sides = []
for path in sys.argv[1:3]:
    sides.append(open_checkpoint(path))
    times.append(time.process_time())
found = compare_checkpoints(*sides, options=CheckpointOptions(jobs=1))
times.append(time.process_time())
over.set()
assert found.headline == "the same model", found.headline
places = [chunks(side) for side in sides]
begin = time.process_time()
for of_side in places:
    read_all(of_side)
print(*(end - start for start, end in zip(times, times[1:])), time.process_time() - begin, peak / 1024)
"""
)


def measure(folders: Sequence[Path]) -> list[float]:
    """Return seconds of opening both, of comparing them, of only reading their chunks; and megabytes."""
    words = [sys.executable, "-c", MEASURE, *map(str, folders)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pieces", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    for said, (ours, our_rows, theirs, their_rows) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as name:
            folders = [Path(name, side) for side in "ab"]
            for folder, of_tensor, rows in zip(folders, (ours, theirs), (our_rows, their_rows), strict=True):
                chunks = arguments.pieces // rows
                write_distributed(folder, chunks, of_tensor or chunks, rows)
            runs = [measure(folders) for _ in range(arguments.runs)]
        first, second, compared, read, _ = (median(column) for column in zip(*runs, strict=True))
        whole = sorted(sum(run[:3]) for run in runs)
        print(
            f"{said}: {median(whole):.2f} s [{whole[0]:.2f}–{whole[-1]:.2f}], opening {first:.2f} and {second:.2f} s,"
            f" comparing {compared:.2f} s, {compared / arguments.pieces * 1e6:.1f} µs a piece;"
            f" {median(whole) / read:.1f} x the loop that reads, {max(run[-1] for run in runs):.0f} MB"
        )


if __name__ == "__main__":
    main()
