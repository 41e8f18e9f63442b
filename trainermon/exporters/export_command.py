"""`trainermon export`: write what a run has stored in a further form, or what its exporters left out, after it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainermon.core.config import OutputConfig, load_config
from trainermon.core.errors import ConfigError, StoreError
from trainermon.core.strict import build
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.topology import OUTPUT_ROOT
from trainermon.exporters.export import BUILT_IN, IN_PROCESS, ExportSettings
from trainermon.exporters.store.feed import store_exporter
from trainermon.exporters.store.query import find_run
from trainermon.exporters.store.segment_follower import forget

WAIT_S = 60.0
_WAITING = "trainermon_export_waiting_bytes"
_NOTHING_NEW = "nothing is stored that was not written before; --again begins with the first step"
_DONE = {
    "trainermon_exported_points_total": "points sent",
    "trainermon_exported_steps_total": "steps of ranks written",
    "trainermon_export_dropped_steps_total": "left out, see above",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon export`."""
    parser.add_argument(
        "run",
        nargs="?",
        help=f"run directory, or run id under $TRAINERMON_OUTPUT or ./{OUTPUT_ROOT} (default: the newest)",
    )
    parser.add_argument(
        "--format",
        action="append",
        metavar="NAME",
        help=f"{', '.join(sorted(BUILT_IN.keys() - {'null'}))}, or what another package registers; may be given "
        "several times (default: what the run was configured with)",
    )
    parser.add_argument("--config", type=Path, help="configuration to go by, instead of the run's own")
    parser.add_argument(
        "--again", action="store_true", help="begin with the first step, instead of where the exporter stopped"
    )
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, metavar="SECONDS", help="give up after so long (default: %(default)g)"
    )


def main(args: argparse.Namespace) -> int:
    """Export what is stored and was not exported yet, on every node of a run (`trainermon export`).

    Returns 0 if everything is written, else 1.

    Raises:
        ConfigError: It is not known in which form, or where to.
        QueryError: There is no such run.
        StoreError: A segment cannot be read, or an agent is at it.
    """
    run_dir = find_run(args.run)
    outputs = _outputs_of(run_dir, args.config)
    names = _names(outputs, args)
    source = args.config or run_dir / "run.json"
    if not names:
        raise ConfigError(f"{source} names no form to write; say which, as in --format csv or --format tensorboard")
    if "influxdb" in names and not outputs.influxdb.url:
        raise ConfigError(f"{source}: influxdb.url is not set; give a configuration that sets it with --config")
    stop = threading.Event()
    timer = threading.Timer(args.wait, stop.set)
    timer.start()
    waiting_bytes, is_done = 0.0, True
    try:
        for node in sorted((run_dir / "nodes").iterdir()):
            settings = ExportSettings(**outputs.output_fields(), run_dir=run_dir, node_dir=node, run_id=run_dir.name)
            for name in names:
                with ProgressBar(f"{node.name}: {name}"):
                    told, waiting, is_sent = _export(name, settings, again=args.again, stop=stop)
                sys.stdout.write(told)
                waiting_bytes += waiting
                is_done &= is_sent
    finally:
        timer.cancel()
    if waiting_bytes:
        sys.stderr.write(f"{waiting_bytes / 1e6:.1f} MB of the run are not sent; see above, and try again\n")
    return 0 if is_done and not waiting_bytes else 1


def _names(outputs: OutputConfig, args: argparse.Namespace) -> list[str]:
    """Return which forms to write; a run that is not told any, but knows an InfluxDB, is sent there."""
    names = [name for name in args.format or outputs.format if name not in IN_PROCESS]
    return names or (["influxdb"] if outputs.influxdb.url else [])


def _export(name: str, settings: ExportSettings, *, again: bool, stop: threading.Event) -> tuple[str, float, bool]:
    """Export what waits on one node; return what to say of it, how many bytes still wait, and if all could be sent."""
    if again:
        forget(settings.node_dir, name)
    with contextlib.closing(store_exporter(name, settings)) as exporter:
        try:
            exporter.send(stop)
        except OSError as error:
            raise StoreError(f"{name} cannot be written: {error}") from error
        counts = exporter.metrics()
        why = exporter.why_nothing()
    said = [f"{counts[metric]:.0f} {words}" for metric, words in _DONE.items() if _is_told(metric, counts)]
    folder = settings.run_dir / name
    place = f" in {folder}" if folder.is_dir() else ""
    is_old = not why and not counts[_WAITING] and not any(counts.get(metric) for metric in _DONE)
    reason = f": {why or _NOTHING_NEW}" if why or is_old else ""
    return f"{settings.node_dir.name}: {name}: {', '.join(said)}{place}{reason}\n", counts[_WAITING], not why


def _is_told(metric: str, counts: Mapping[str, float]) -> bool:
    return metric in counts and (counts[metric] > 0 or "dropped" not in metric)


def _outputs_of(run_dir: Path, config: Path | None) -> OutputConfig:
    """Return what the configuration says of forms: that of `config`, or else the run's own."""
    if config is not None:
        return load_config(config)[0]
    path = run_dir / "run.json"
    try:
        plain: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["config"]
        chosen = {field.name: plain[field.name] for field in dataclasses.fields(OutputConfig) if field.name in plain}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StoreError(f"{path} does not say how the run was configured ({error!r}); give --config") from error
    return build(OutputConfig, chosen)
