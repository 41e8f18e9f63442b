"""What has arrived of a run in each of its forms: for every series the steps, read by other programs' own readers."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from wandb.proto import wandb_internal_pb2

from tests.exporters.influx_servers import InfluxDB
from trainermon.exporters.store.store import open_run

Arrivals = Mapping[str, list[int]]
"""By series, the steps in the order in which they stand there."""
GRADIENTS = "grad_reduced"


def in_store(run_dir: Path) -> Arrivals:
    """Return what SQL finds: gradients by name, and the loss."""
    query = f"SELECT name, list(step ORDER BY step) FROM all_stats WHERE kind IN ('loss', '{GRADIENTS}') GROUP BY name"
    with open_run(run_dir) as connection:
        return dict(connection.execute(query).fetchall())


def in_influxdb(server: InfluxDB) -> Arrivals:
    """Return what the server has stored, by module and for the loss."""
    found: dict[str, list[int]] = {}
    for row in server.query(f"SELECT step, rms FROM trainermon_{GRADIENTS} GROUP BY module"):
        found.setdefault(row["module"], []).append(int(row["step"]))
    found["loss"] = [int(row["step"]) for row in server.query("SELECT step, loss FROM trainermon_step")]
    return found


def in_csv(run_dir: Path) -> Arrivals:
    """Return the rows of all csv files, of gradients and the loss."""
    found: dict[str, list[int]] = {}
    for path in sorted((run_dir / "csv").glob("*/*.csv")):
        if path.name.startswith((GRADIENTS, "scalars")):
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    found.setdefault(row["name"], []).append(int(row["step"]))
    return found


def in_events(run_dir: Path, folder: str) -> Arrivals:
    """Return the scalars of all TensorBoard event files below `folder` of the run, by the file's folder and tag."""
    found: dict[str, list[int]] = {}
    for path in sorted((run_dir / folder).rglob("events.out.tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(f"{path.parent.name}/{value.tag}", []).append(event.step)
    return found


def in_mlflow(run_dir: Path) -> Arrivals:
    """Return the metrics in MLflow's folder: lines of time, value and step."""
    return {
        path.name: [int(line.split()[2]) for line in path.read_text().splitlines()]
        for path in (run_dir / "mlflow").glob("*/*/metrics/*")
    }


def in_wandb(run_dir: Path) -> Arrivals:
    """Return the history of Weights & Biases' offline files, by key."""
    found: dict[str, list[int]] = {}
    for path in sorted((run_dir / "wandb").rglob("*.wandb")):
        for record in _records(path.read_bytes()):
            if record.WhichOneof("record_type") == "history":
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                for key in row.keys() - {"step"}:
                    found.setdefault(key, []).append(json.loads(row["step"]))
    return found


def missing_and_doubled(steps: Iterable[int], expected: range) -> tuple[int, int]:
    """Return how many of the expected steps are not there, and how many there are that should not be, or twice.

    >>> missing_and_doubled([0, 1, 1, 3], range(3))
    (1, 2)
    """
    found = list(steps)
    present = set(found).intersection(expected)
    return len(expected) - len(present), len(found) - len(present)


def _records(content: bytes) -> Iterator[wandb_internal_pb2.Record]:  # type: ignore[name-defined]
    """Yield the messages of an offline run: wandb's own protocol, in blocks framed as in LevelDB's log."""
    place, parts = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(parts)
            parts = b""
            yield record
