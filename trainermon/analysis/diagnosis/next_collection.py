"""What to collect next where the files of a run do not tell enough: a reason, and configurations that are ready to use.

`debugger` is what `PrecisionDebugger` reads, `monitor` what `TrainerMon` reads.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.analysis.diagnosis.findings import NextCollection
from trainermon.analysis.diagnosis.wording import rank_list
from trainermon.core.errors import DumpError
from trainermon.core.terminal.results import write_text
from trainermon.core.values import Kind

DUMP_PATH = "dumps"
MONITOR_FILE = "monitor_config.json"
_MAX_STEPS_BEFORE = 2
_SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "wg_distribution": {Kind.GRAD_UNREDUCED: True, Kind.GRAD_REDUCED: True},
    "param_distribution": {Kind.PARAM_ORIGIN: True, Kind.PARAM_UPDATED: True},
    "mv_distribution": {Kind.EXP_AVG: True},
    "xy_distribution": {Kind.ACTV: True, Kind.ACTV_GRAD: True},
}


def dump_of_step(
    step: int, ranks: Sequence[int], reason: str, *, calls: Sequence[str] = (), task: str = "statistics"
) -> NextCollection:
    """Return the advice to record a dump of modules and functions on `step`, as configuration for `PrecisionDebugger`.

    Args:
        step: The step.
        ranks: Only these; empty: all.
        reason: Why.
        calls: Only what runs within the module calls with these keys; empty: everything.
        task: `statistics` or `tensor`.
    """
    block: dict[str, Any] = {"list": list(calls)} if calls else {}
    debugger: dict[str, Any] = {"task": task, "dump_path": DUMP_PATH, "level": "mix", "step": [step]}
    if ranks:
        debugger["rank"] = list(ranks)
    if block:
        debugger[task] = block
    where = f" on {rank_list(list(ranks))}" if ranks else ""
    return NextCollection(reason=f"{reason}: dump step {step}{where} with modules and functions", debugger=debugger)


def more_statistics(kinds: Collection[str], reason: str, *, start_step: int = 0) -> NextCollection | None:
    """Return the advice to store the statistics that are not among `kinds`, as configuration for `TrainerMon`.

    `start_step` is the step from which to collect. None if all kinds are stored already.
    """
    missing = [switch for switch, needed in _SWITCHES.items() if not any(kind in kinds for kind in needed)]
    if not missing:
        return None
    monitor: dict[str, Any] = dict.fromkeys(_SWITCHES, True)
    monitor |= {"step_interval": 1, "start_step": max(0, start_step - _MAX_STEPS_BEFORE)}
    return NextCollection(reason=f"{reason}: store {', '.join(missing)}", monitor=monitor)


def together(*parts: NextCollection | None) -> NextCollection | None:
    """Merge several pieces of advice on what to record into one; of two configurations for one tool the first counts.

    None if all parts are.
    """
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return NextCollection(
        reason="; ".join(part.reason for part in found),
        debugger=next((part.debugger for part in found if part.debugger), None),
        monitor=next((part.monitor for part in found if part.monitor), None),
    )


def write_configurations(order: NextCollection | None, folder: Path) -> tuple[Path, ...]:
    """Write the configuration files that `order` advises (config.json, monitor_config.json) into `folder`.

    Return their paths. None are written for None.

    Raises:
        DumpError: a file cannot be written.
    """
    configurations = {"config.json": order.debugger, MONITOR_FILE: order.monitor} if order is not None else {}
    written = []
    try:
        for name, configuration in configurations.items():
            if configuration is not None:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / name
                write_text(path, json.dumps(configuration, indent=2) + "\n")
                written.append(path)
    except OSError as error:
        raise DumpError(f"{folder} cannot be written ({error}): name another folder") from error
    return tuple(written)
