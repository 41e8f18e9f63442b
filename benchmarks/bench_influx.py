"""Points per CPU-second that reach an InfluxDB: our lines against those of influxdb-client, in back-to-back pairs.

    python benchmarks/bench_influx.py [--pairs N]

Points of modules, with 8 fields each, from 8 ranks of 300 series. Counted is the CPU time of this process only, from
the moments of a step to the server's answer: merging modules, text, gzip, request. The server, a process of its own,
takes whatever comes. The other way is influxdb-client's `Point` with its synchronous writer and gzip, batches of the
same size. Last, the whole exporter from committed segments on disk, which also reads them.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from trainermon.core.config import InfluxDBConfig
from trainermon.core.journal import Header
from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey, StatBlock
from trainermon.exporters.export import ExportSettings
from trainermon.exporters.influxdb.exporter import InfluxDBExporter, compress
from trainermon.exporters.influxdb.points import RankPoints
from trainermon.exporters.influxdb.server import InfluxDBServer
from trainermon.exporters.store.segment_follower import StoredSeries
from trainermon.exporters.store.store import SegmentWriter

NUM_RANKS = 8
NUM_STEPS = 20
BATCH = 5_000
library: Any = importlib.import_module("influxdb_client")  # most of it has no types
KINDS = (Kind.GRAD_REDUCED, Kind.PARAM_ORIGIN, Kind.EXP_AVG)
KEYS = tuple(SeriesKey(kind, f"layers.{layer}.mlp.weight") for kind in KINDS for layer in range(96))
SINK = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def blocks() -> list[tuple[Header, StatBlock]]:
    """Return the steps of all ranks, with moments whose digits do not end early."""
    random = np.random.default_rng(0)
    made = []
    for step in range(NUM_STEPS):
        for rank in range(NUM_RANKS):
            values = random.random((8, len(KEYS)))
            values[0], values[5:] = 1e6, 0.0
            place = Coordinates(rank=rank, world_size=NUM_RANKS, local_world_size=NUM_RANKS)
            header = Header(run_id="run", attempt=1, coordinates=place, host="node", pid=1, started_s=0.0, series=KEYS)
            series = np.arange(len(KEYS), dtype=np.uint32)
            made.append((header, StatBlock(step=step, time_s=1.7e9 + step, series=series, values=values)))
    return made


def ours(server: InfluxDBServer, steps: list[tuple[Header, StatBlock]]) -> int:
    """Send everything by our own lines; return the number of points."""
    table = [StoredSeries(key, 1_000_000, Placement(dtype="float32", shape=(1_000_000,))) for key in KEYS]
    ranks = [RankPoints("run", rank, table, budget=300) for rank in range(NUM_RANKS)]
    lines: list[str] = []
    num_points = 0
    for header, block in steps:
        lines += ranks[header.coordinates.rank].lines(block, attempt=1).text
        if len(lines) >= BATCH or block is steps[-1][1]:
            answer = server.write(compress(lines))
            assert answer.status == 204, answer
            num_points += len(lines)
            lines = []
    return num_points


def theirs(client: Any, steps: list[tuple[Header, StatBlock]]) -> int:
    """Send the points of modules by influxdb-client; return their number."""
    points: list[Any] = []
    num_points = 0
    with client.write_api(write_options=library.client.write_api.SYNCHRONOUS) as write_api:
        for header, block in steps:
            time_us = round(block.time_s * 1e6)
            for key, moments in zip(KEYS, block.values.T.tolist(), strict=True):
                count, low, high, total, squares, zeros, nans, infs = moments
                point = library.Point(f"trainermon_{key.kind.value}").time(time_us, library.WritePrecision.US)
                point.tag("module", key.name).tag("rank", str(header.coordinates.rank)).tag("run", "run")
                point.field("count", int(count)).field("nonfinite", int(nans + infs)).field("zeros", int(zeros))
                point.field("max", high).field("mean", total / count).field("min", low)
                points.append(point.field("rms", (squares / count) ** 0.5).field("step", block.step))
            if len(points) >= BATCH or block is steps[-1][1]:
                write_api.write(bucket="trainermon", record=points, write_precision=library.WritePrecision.US)
                num_points += len(points)
                points = []
    return num_points


def from_segments(config: InfluxDBConfig, folder: Path) -> int:
    """Send everything that is stored in `folder`; return the number of points."""
    settings = ExportSettings(run_dir=folder, node_dir=folder, run_id="run", influxdb=config)
    exporter = InfluxDBExporter(settings)
    exporter.send(threading.Event())
    exporter.close()
    (folder / "influxdb.state.json").unlink()
    return int(exporter.metrics()["trainermon_exported_points_total"])


def rate(function: Callable[[], int]) -> float:
    """Return points per second of CPU time."""
    began_s = time.process_time()
    num_points = function()
    return num_points / (time.process_time() - began_s)


def shown(values: list[float], digits: int = 0) -> str:
    """Return median, smallest and largest."""
    return f"{statistics.median(values):,.{digits}f} [{min(values):,.{digits}f}–{max(values):,.{digits}f}]"


def measure(url: str, num_pairs: int, folder: Path) -> None:
    """Print the figures."""
    config = InfluxDBConfig(url=url, api="v2", org="org")
    steps = blocks()
    writer = SegmentWriter(folder / "segments")
    for header, block in steps:
        writer.add(header, KEYS, block)
    writer.commit({})
    server = InfluxDBServer(config, {"INFLUXDB_TOKEN": "token"})
    client = library.InfluxDBClient(url=url, token="token", org="org", enable_gzip=True)
    num_points = ours(server, steps[:NUM_RANKS])  # connections and caches
    theirs(client, steps[:NUM_RANKS])
    own, other, stored = [], [], []
    for _ in range(num_pairs):
        own.append(rate(lambda: ours(server, steps)))
        other.append(rate(lambda: theirs(client, steps)))
        stored.append(rate(lambda: from_segments(config, folder)))
    ratios = [mine / its for mine, its in zip(own, other, strict=True)]
    server.close()
    client.close()
    print(f"{num_points // NUM_RANKS} points a step and rank, batches of {BATCH}, {num_pairs} pairs")
    print(f"  our lines, gzip 1        {shown(own)} points per CPU-second")
    print(f"  influxdb-client, Point   {shown(other)} points per CPU-second; ratio {shown(ratios, 1)}")
    print(f"  exporter, from segments  {shown(stored)} points per CPU-second")


def main() -> int:
    """Run against a server that takes everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, influxdb-client", end=" ")
    print(metadata.version("influxdb-client"))
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True) as sink,
    ):
        assert sink.stdout is not None
        try:
            measure(f"http://127.0.0.1:{int(sink.stdout.readline())}", arguments.pairs, Path(folder))
        finally:
            sink.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
