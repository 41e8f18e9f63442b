"""What a query of a run in object storage costs beside the same on disk: CPU time, requests and bytes that are fetched.

    python -m benchmarks.bench_buckets          # 8 nodes x 2 segments x 8 ranks x 50 steps x 302 series

The storage is SeaweedFS on this machine, whose own CPU time is not counted. Each query opens the run anew, as
`trainermon query` does.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import bench_scale_store
from benchmarks.measure import cpu_ms
from tests.exporters.object_storage import serving_objects
from tests.package_programs import find_wheels
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.store.query import find_stored_run, run_query

KEYS = (*bench_scale_store.KEYS[:2], *(SeriesKey(Kind.GRAD_REDUCED, f"h.{layer}.w") for layer in range(300)))
QUERIES = {
    "loss of every rank at a step": "SELECT rank, loss FROM step_values WHERE step = 77",
    "loss and norm of the last steps": "SELECT step, loss, grad_norm FROM steps ORDER BY step DESC LIMIT 10",
    "one gradient on one rank": "SELECT step, rms FROM stats WHERE rank = 11 AND name = 'h.3.w'",
    "largest gradients of all ranks": bench_scale_store.QUERIES["largest gradients of all ranks"],
    "every moment of every row": "SELECT bit_xor(hash(stats)) FROM stats",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--segments", type=int, default=2, help="of each node")
    parser.add_argument("--steps", type=int, default=50, help="of each segment")
    options = parser.parse_args()
    sys.path.insert(0, str(find_wheels("s3fs")))
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        run = Path(name) / "run"
        size = bench_scale_store.write_run(run, options.nodes, options.segments, options.steps, keys=KEYS)
        with serving_objects(Path(name) / "storage") as storage:
            os.environ.update(storage.environment)
            address = storage.sync(run)
            print(f"{options.nodes * options.segments} segments, {size / 1e6:.1f} MB")
            for what, query in QUERIES.items():
                _compare(what, query, run, address, size)
    return 0


def _compare(what: str, query: str, run: Path, address: str, size: int) -> None:
    on_disk = _cost(lambda: run_query(run, query))
    found = find_stored_run(address)
    assert not isinstance(found, Path)
    in_bucket = _cost(lambda: run_query(found, query))
    listing = _cost(lambda: find_stored_run(address))
    objects = found.objects
    print(
        f"{what:34} disk {on_disk[0]:6.0f} ms CPU, {on_disk[1]:6.0f} ms;"
        f" bucket {in_bucket[0] + listing[0]:6.0f} ms CPU, {in_bucket[1] + listing[1]:6.0f} ms,"
        f" {objects.num_requests:4d} ranges, {objects.num_bytes / 1e6:6.2f} MB, {objects.num_bytes / size:6.1%}"
    )


def _cost(work: Callable[[], object]) -> tuple[float, float]:
    began_s = time.monotonic()
    cpu = cpu_ms(work)
    return cpu, 1e3 * (time.monotonic() - began_s)


if __name__ == "__main__":
    sys.exit(main())
