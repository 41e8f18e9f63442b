"""Alerts as the page shows them: with what their value is, their dump, its diagnosis, and their report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainermon.agent.hang.report import report_url
from trainermon.agent.orders.dumps import RunDumps
from trainermon.alerts.rules import AlertRule
from trainermon.core.values import Alert, as_plain


class PlainAlerts:
    """Makes an alert plain for JSON.

    Args:
        rules: Whose alerts they are.
        dumps: Of the run.
        node: Name of this node in the run directory.
    """

    def __init__(self, rules: Sequence[AlertRule], dumps: RunDumps, *, node: str) -> None:
        self._statistics = {rule.name: rule.on.statistic for rule in rules}
        self._dumps = dumps
        self._node = node

    def plain(self, alert: Alert) -> dict[str, Any]:
        """Return the alert as a mapping for the page, with the URLs of its diagnosis and report and the id of its dump.

        `statistic` says what its value is. All of these are None where there is none.
        """
        entry = self._dumps.find(identity=alert.id, attempt=alert.attempt, step=alert.first_step)
        plain: dict[str, Any] = as_plain(alert)
        plain["statistic"] = self._statistics.get(alert.rule)  # None if the rule is no longer in the file
        plain["dump"] = entry.key.id if entry else None
        plain["diagnosis"] = entry.key.url if entry and entry.diagnosed else None
        plain["report"] = report_url(alert, self._node)
        return plain
