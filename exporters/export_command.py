"""`trainermon export`: send what a run has stored to an InfluxDB, for a run that ended before everything was sent."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
from pathlib import Path

from trainermon.exporters.export import ExportSettings, StoreExporter, make_exporter
from trainermon.exporters.query import find_run
from trainermon.monitor.config import InfluxDBConfig, load_config
from trainermon.monitor.errors import ConfigError, StoreError
from trainermon.monitor.strict import build
from trainermon.monitor.topology import OUTPUT_ROOT

WAIT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument(
        "run",
        nargs="?",
        help=f"run directory, or run id under $TRAINERMON_OUTPUT or ./{OUTPUT_ROOT} (default: the newest)",
    )
    parser.add_argument("--config", type=Path, help="configuration with `influxdb`, instead of the run's own")
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, metavar="SECONDS", help="give up after so long (default: %(default)g)"
    )


def main(args: argparse.Namespace) -> int:
    """Send what waits on every node of the run; returns 0 if the server has everything, else 1.

    Raises:
        ConfigError: It is not known where to send it.
        QueryError: There is no such run.
        StoreError: A segment cannot be read, or an agent is at it.
    """
    run_dir = find_run(args.run)
    config = load_config(args.config)[0].influxdb if args.config else _config_of(run_dir)
    if not config.url:
        raise ConfigError(f"{args.config or run_dir / 'run.json'}: influxdb.url is not set; give a file with --config")
    stop = threading.Event()
    timer = threading.Timer(args.wait, stop.set)
    timer.start()
    try:
        waiting_bytes = sum(
            _send(run_dir, node, config=config, stop=stop) for node in sorted((run_dir / "nodes").iterdir())
        )
    finally:
        timer.cancel()
    if waiting_bytes:
        sys.stderr.write(f"{waiting_bytes / 1e6:.1f} MB of the run are not sent; see above, and try again\n")
    return 1 if waiting_bytes else 0


def _send(run_dir: Path, node_dir: Path, *, config: InfluxDBConfig, stop: threading.Event) -> float:
    """Send what waits on one node; return how many bytes still wait."""
    settings = ExportSettings(run_dir=run_dir, node_dir=node_dir, run_id=run_dir.name, influxdb=config)
    exporter = make_exporter("influxdb", settings)
    assert isinstance(exporter, StoreExporter)
    with contextlib.closing(exporter):
        exporter.send(stop)
        counts = exporter.metrics()
    sys.stdout.write(f"{node_dir.name}: {counts['trainermon_exported_points_total']:.0f} points sent\n")
    return counts["trainermon_export_waiting_bytes"]


def _config_of(run_dir: Path) -> InfluxDBConfig:
    path = run_dir / "run.json"
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))["config"].get("influxdb", {})
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise StoreError(f"{path} does not say how the run was configured ({error!r}); give --config") from error
    return build(InfluxDBConfig, plain, "influxdb.")
