"""The last words of `trainermon run`: where everything is, what went wrong, and why."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainermon.alerts.log import AlertLog
from trainermon.core.values import Alert, AlertState

DIAGNOSE_LIMIT_S = 180.0
MAX_ALERTS = 10


def summarise(run_dir: Path, *, diagnose: tuple[str, ...] = (sys.executable, "-m", "trainermon", "diagnose")) -> str:
    """Return the text that `trainermon run` prints at the end: the run's alerts, and the diagnosis of its dump.

    `diagnose` is the command that diagnoses.
    """
    alerts = read_alerts(run_dir)
    dumps = sorted(path.relative_to(run_dir).as_posix() for path in run_dir.glob("dumps/*/attempt*/step*"))
    reports = sorted(path.relative_to(run_dir).as_posix() for path in run_dir.glob("reports/post-mortem-*.md"))
    lines = [
        f"run        {run_dir}",
        *_described("alerts", merge_ranks(alerts)),
        *(_described("reports", reports) if reports else ()),
        *_described("dumps", dumps),
        f"page       trainermon serve {run_dir}",
        f'query      trainermon query {run_dir} "SELECT * FROM steps"',  # noqa: S608 - shown, not run
    ]
    text = "\n".join(lines) + "\n"
    return f"{text}\n{_diagnosis(run_dir, diagnose)}" if dumps else text


def read_alerts(run_dir: Path) -> list[Alert]:
    """Return the alerts that fired on any node of the run, each once, by attempt and step."""
    fired: dict[str, Alert] = {}
    for path in sorted(run_dir.glob("nodes/*/alerts.jsonl")):
        for alert in AlertLog(path).read():
            if alert.state is AlertState.FIRING:
                fired.setdefault(alert.id, alert)
    return sorted(fired.values(), key=lambda alert: (alert.attempt, alert.first_step, alert.rank))


def merge_ranks(alerts: Sequence[Alert]) -> list[str]:
    """Return the alerts' messages, one for all alerts that differ in the rank only."""
    groups: dict[tuple[str, int, str], list[Alert]] = {}
    for alert in alerts:
        said = re.sub(rf" on rank {alert.rank}\b", "", alert.message.removeprefix(f"{alert.rule}: "))
        groups.setdefault((alert.rule, alert.attempt, said), []).append(alert)
    return [
        f"{rule} on ranks {', '.join(str(alert.rank) for alert in members)}: {said}"
        if len(members) > 1
        else members[0].message
        for (rule, _, said), members in groups.items()
    ]


def _described(name: str, items: list[str]) -> Iterator[str]:
    if not items:
        yield f"{name:<10} none"
    for place, item in enumerate(items[:MAX_ALERTS]):
        yield f"{'' if place else name:<10} {item}"
    if len(items) > MAX_ALERTS:
        yield f"{'':<10} and {len(items) - MAX_ALERTS} more"


def _diagnosis(run_dir: Path, command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            [*command, str(run_dir)], capture_output=True, text=True, timeout=DIAGNOSE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"diagnosis  not ready after {DIAGNOSE_LIMIT_S:g} s; try: trainermon diagnose {run_dir}\n"
    if done.returncode != 0:
        said = done.stderr.strip().rpartition("\n")[2]
        return f"diagnosis  failed ({said}); try: trainermon diagnose {run_dir}\n"
    return done.stdout
