"""Alerts as the page shows them: with what their value is, their dump, its diagnosis, and their report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from trainermon.agent.hang.report import report_url
from trainermon.agent.orders.dumps import RunDumps
from trainermon.alerts.handling import AlertHandling
from trainermon.alerts.rules import AlertRule
from trainermon.core.values import Alert, as_plain


class PlainAlerts:
    """Turns alerts into JSON-ready mappings for the web page and its event stream.

    Args:
        rules: The rules that the agent evaluates; they tell which statistic an alert's value is.
        dumps: The run's dumps, among which an alert's own is looked up.
        node: Name of this node in the run directory.
        handling: What people have said about alerts; None: nothing.
    """

    def __init__(
        self, rules: Sequence[AlertRule], dumps: RunDumps, *, node: str, handling: AlertHandling | None = None
    ) -> None:
        self._handling = handling
        self._runbooks = {rule.name: rule.runbook for rule in rules}
        self._statistics = {rule.name: rule.on.statistic for rule in rules}
        self._dumps = dumps
        self._node = node

    def plain(self, alert: Alert) -> dict[str, Any]:
        """Return the alert as a mapping for the page: its own fields, and what else is known of it.

        `statistic` is what the alert's value is (`rms`, `nans`), `dump` the id of its dump, the next two are URLs;
        `runbook` is the name of its entry, `acknowledged` and `silenced` say by whom, when and until when.
        Each is None where there is none.
        """
        entry = self._dumps.find(identity=alert.id, attempt=alert.attempt, step=alert.first_step)
        plain: dict[str, Any] = as_plain(alert)
        plain["statistic"] = self._statistics.get(alert.rule)  # None if the rule is no longer in the file
        plain["dump"] = entry.key.id if entry else None
        plain["diagnosis"] = entry.key.url if entry and entry.diagnosed else None
        plain["report"] = report_url(alert, self._node)
        plain["runbook"] = self._runbooks.get(alert.rule, alert.rule)
        said = self._handling
        plain["acknowledged"] = as_plain(said.acknowledgement(alert.id)) if said else None
        plain["silenced"] = as_plain(said.silence(alert, time.time())) if said else None
        return plain
