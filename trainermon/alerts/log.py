"""The file of a node's alerts: one JSON object per line, appended, never rewritten.

An alert is written once per state, however often the agent is restarted. A full disk or a torn line costs no later
alert.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainermon.core.ledger import Ledger
from trainermon.core.values import (
    Alert,
    AlertCondition,
    AlertDirection,
    AlertState,
    Finding,
    Kind,
    SeriesKey,
    Severity,
    as_plain,
)

_logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""How many alerts wait for a disk that takes nothing; the oldest are dropped beyond that."""


class AlertLog:
    """Appends alerts to the file `alerts.jsonl`, one JSON object per line, and reads them back.

    Args:
        path: The file; it is created, with mode 0600, by the first alert. One process writes to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ledger = Ledger(path)
        self._waiting: deque[Alert] = deque(maxlen=MAX_WAITING)
        self._known = {(alert.id, alert.state) for alert in self.read()}

    @property
    def num_waiting(self) -> int:
        """Number of alerts that could not be written yet."""
        return len(self._waiting)

    def append(self, alert: Alert) -> bool:
        """Write the alert, unless its id stands there in the same state; return whether everything is written.

        What cannot be written now (disk full, file system gone) waits and is written, in order, by a later `append` or
        `retry`.
        """
        if (alert.id, alert.state) not in self._known:
            self._known.add((alert.id, alert.state))
            self._waiting.append(alert)
        return self.retry()

    def retry(self) -> bool:
        """Write the alerts that could not be written before; return whether all are written now."""
        while self._waiting:
            try:
                self._ledger.append(as_plain(self._waiting[0]))
            except OSError as error:
                _logger.warning("%d alerts wait, as %s cannot be written: %s", len(self._waiting), self._path, error)
                return False
            self._waiting.popleft()
        return True

    def read(self) -> list[Alert]:
        """Return the alerts in the file, in order; lines that are torn or not an alert are left out."""
        return self._ledger.read(parse_alert)

    def open_alerts(self) -> list[Alert]:
        """Return the alerts in the file that fired and were not resolved, for `RuleEngine.resume`."""
        fired: dict[str, Alert] = {}
        for alert in self.read():
            if alert.state is AlertState.RESOLVED:
                fired.pop(alert.id, None)
            else:
                fired[alert.id] = alert
        return list(fired.values())


def parse_alert(plain: Any) -> Alert:
    """Return the alert that `plain`, a mapping from JSON made with `as_plain`, describes.

    Raises:
        ValueError: it is not one.
    """
    try:
        fields = dict(plain)
        fields["findings"] = tuple(_parse_finding(finding) for finding in fields["findings"])
        for name, kind in (("severity", Severity), ("state", AlertState), ("kind", Kind)):
            fields[name] = kind(fields[name])
        for name in ("time_s", "value", "baseline"):
            fields[name] = _number(fields[name])
        fields |= _parse_condition(fields)
        return Alert(**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an alert: {error!r}") from error


def _parse_condition(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return condition and direction; where an earlier version did not write them, those of the built-in rule."""
    if fields.get("condition") is not None:
        return {"condition": AlertCondition(fields["condition"]), "direction": AlertDirection(fields["direction"])}
    # Only for old lines: reading the built-in rules takes longer than reading most logs.
    from trainermon.alerts.conditions.criteria import condition_of, direction_of
    from trainermon.alerts.rules import default_criteria

    criterion = default_criteria().get(fields["rule"])
    return {
        "condition": None if criterion is None else condition_of(criterion),
        "direction": direction_of(criterion, value=fields["value"], baseline=fields["baseline"]),
    }


def _parse_finding(plain: Any) -> Finding:
    series = dict(plain["series"])
    series["kind"] = Kind(series["kind"])
    return Finding(series=SeriesKey(**series), value=_number(plain["value"]), baseline=_number(plain["baseline"]))


def _number(plain: Any) -> float:
    number = float(plain)
    if isinstance(plain, str) and math.isfinite(number):
        raise ValueError(f"found the text {plain!r}, expected a number")
    return number
