"""What a tracking service is told beside numbers, settings and alerts; and which steps it knows from before."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.core.environment.secrets import Redactor
from trainermon.core.private_files import replace_file

ALERTS_FILE = "alerts.jsonl"


class AlertNote(NamedTuple):
    """One alert: the name of its rule, and a line about it."""

    rule: str
    line: str


class ToldSteps:
    """Remembers, across restarts, the newest step that the service was told: the store repeats the last segment.

    Args:
        path: Where it stands.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            attempt, step = json.loads(path.read_text(encoding="utf-8"))
            self._newest = (int(attempt), int(step))
        except (OSError, ValueError, TypeError):
            self._newest = (-1, -1)

    def is_new(self, attempt: int, step: int) -> bool:
        """Return whether the service was not told this step of this attempt."""
        return (attempt, step) > self._newest

    def add(self, attempt: int, step: int) -> None:
        """Note that the service was told a step."""
        self._newest = (attempt, step)

    def keep(self) -> None:
        """Write it down."""
        replace_file(self._path, json.dumps(self._newest).encode())


def settings_of(run_dir: Path) -> dict[str, str | int | float | bool]:
    """Return the run's settings with dotted names, such as `agent.flush_s`, without what is or looks like a secret.

    Empty where `run.json` cannot be read.
    """
    try:
        said = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    redactor = Redactor()
    clean = {name: redactor.value(name, value) for name, value in _flat("", said) if value is not None and value != ""}
    return {redactor.text(name): value for name, value in clean.items()}


def alerts_of(node_dir: Path) -> list[AlertNote]:
    """Return every alert that was raised on the node, in their order, once each, its message without secrets."""
    try:
        lines = (node_dir / ALERTS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: dict[str, AlertNote] = {}
    for line in lines:
        with contextlib.suppress(ValueError, LookupError, TypeError):  # the last line may be half written
            alert = json.loads(line)
            note = AlertNote(
                alert["rule"], f"step {alert['first_step']}: {alert['severity']}: {Redactor().text(alert['message'])}"
            )
            if alert["state"] == "firing":
                found.setdefault(alert["id"], note)
    return list(found.values())


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    else:
        yield name, value
