"""`trainermon anomalies`: the first anomalies of all ranks, in the order in which a training step comes to them.

Reads `<folder>/rank*/anomaly.json`, of this monitor or of msprobe's, and writes `anomaly_analyse.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainermon.core.errors import StoreError
from trainermon.core.private_files import replace_file

RECORDS_FILE = "anomaly.json"
ORDER_FILE = "anomaly_analyse.json"
FORWARD, BACKWARD, OPTIMIZER, UNKNOWN = range(4)
STAGES: Mapping[str, int] = {
    "actv": FORWARD,
    "actv_grad": BACKWARD,
    "acc_grad": BACKWARD,
    "pre_grad": BACKWARD,
    "post_grad": BACKWARD,
    "exp_avg": OPTIMIZER,
    "exp_avg_sq": OPTIMIZER,
    "param_origin": OPTIMIZER,
    "param_updated": OPTIMIZER,
}
"""When in a step each metric comes about."""
NUMBERS = ("step", "micro_step", "vpp_stage", "pp_stage", "call_id")

_log = logging.getLogger(__name__)

Record = dict[str, Any]


def first_anomalies(folder: Path, *, limit: int = 8, steps: Collection[int] = ()) -> dict[str, Record]:
    """Return the first `limit` records in the anomaly.json files of all ranks below `folder`, by key, in order.

    With `steps`, those of these steps only. The order is that of step, micro step, and stage: forward, backward,
    optimizer, then what is not known. Forwards go up the pipeline, everything else goes down it. The rest is decided by
    `call_id`, then by rank.

    Raises:
        StoreError: There is no such folder, no such file in it, or one that cannot be read.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder; give the one that holds rank0/{RECORDS_FILE}")
    if not any(folder.glob(f"rank*/{RECORDS_FILE}")):
        raise StoreError(
            f"{folder} holds no rank*/{RECORDS_FILE}; give the folder that does, <run>/anomaly_detected: a run without "
            "anomalies has none"
        )
    found = [(key, record) for key, record in _records(folder) if not steps or record["step"] in steps]
    found.sort(key=lambda one: place_in_training(one[1]))
    return dict(found[:limit])


def place_in_training(record: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the key by which a record of anomaly.json sorts: step, micro step, stage, place in the pipeline, call."""
    stage = STAGES.get(str(record["tag_name"]).rpartition("/")[2], UNKNOWN)
    sign = 1 if stage == FORWARD else -1
    pipeline = (sign * record["vpp_stage"], sign * record["pp_stage"])
    return (record["step"], record["micro_step"], stage, *pipeline, record["call_id"])


def _records(folder: Path) -> Iterator[tuple[str, Record]]:
    for path in sorted(folder.glob(f"rank*/{RECORDS_FILE}"), key=_rank_of):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            items: Iterable[tuple[str, Any]] = content.items()
        except (OSError, ValueError, AttributeError) as error:
            raise StoreError(f"{path} cannot be read as records of anomalies: {error}") from error
        for key, record in items:
            if isinstance(record, dict) and "tag_name" in record and all(type(record.get(n)) is int for n in NUMBERS):
                yield key, record
            else:
                _log.warning("%s: %s is no record of an anomaly and is left out", path, key)


def _rank_of(path: Path) -> tuple[int, str]:
    number = path.parent.name.removeprefix("rank")
    return (int(number), "") if number.isdecimal() else (sys.maxsize, number)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon anomalies`."""
    parser.add_argument("folder", type=Path, help="folder of the ranks' folders: <run>/anomaly_detected")
    parser.add_argument("-o", "--output", type=Path, help=f"folder for {ORDER_FILE}; by default the same")
    parser.add_argument("-k", "--top", type=_positive, default=8, metavar="K", help="how many (default 8)")
    parser.add_argument("-s", "--steps", type=_steps, default=(), metavar="LIST", help="of these steps only: '[3, 4]'")
    parser.add_argument("--json", action="store_true", help="print the records as JSON, for another program")


def main(arguments: argparse.Namespace) -> int:
    """Run `trainermon anomalies`: write and list the first anomalies of all ranks, return 0.

    It reads each rank's anomaly.json and writes anomaly_analyse.json.

    Raises:
        StoreError: The records cannot be read, or the result not be written.
    """
    found = first_anomalies(arguments.folder, limit=arguments.top, steps=arguments.steps)
    output: Path = arguments.output or arguments.folder
    try:
        output.mkdir(parents=True, exist_ok=True)
        replace_file(output / ORDER_FILE, json.dumps(found, indent=1).encode())
    except OSError as error:
        raise StoreError(f"{output / ORDER_FILE} cannot be written: {error}") from error
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return 0
    for number, record in enumerate(found.values()):
        sys.stdout.write(f"{number}: {record.get('message', '')}\n")
    sys.stdout.write(f"{output / ORDER_FILE}\n")
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {number}, expected 1 or more")
    return number


def _steps(text: str) -> tuple[int, ...]:
    try:
        steps = json.loads(text)
    except ValueError:
        steps = None
    if not isinstance(steps, list) or not all(type(step) is int for step in steps):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a list of steps such as '[3, 4]'")
    return tuple(steps)
