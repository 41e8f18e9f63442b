"""Alerts and dumps as the page lists them, and the reports on them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Protocol

from trainermon.agent.alert_page import PlainAlerts
from trainermon.agent.hang.report import FOLDER as REPORTS
from trainermon.agent.hang.report import RULES as REPORTED
from trainermon.agent.hang.report import report_name
from trainermon.agent.orders.dumps import MAX_REPORT_BYTES, DumpKey, RunDumps
from trainermon.agent.place import AgentPlace
from trainermon.core.values import Alert

READ_TIMEOUT_S = 10.0


class KnownAlerts(Protocol):
    """The alerts of a node."""

    @property
    def latest(self) -> Mapping[str, Alert]:
        """By id, the last state of each alert."""


class RunFindings:
    """Lists the alerts and dumps of a run for the page, and reads the reports on them.

    Args:
        place: The agent's folders.
        alerts: The run's alerts.
        dumps: The run's dumps.
        plain: Turns alerts into JSON.
        executor: Reads the files.
    """

    def __init__(
        self, place: AgentPlace, *, alerts: KnownAlerts, dumps: RunDumps, plain: PlainAlerts, executor: Executor
    ) -> None:
        self._place = place
        self._alerts = alerts
        self._dumps = dumps
        self._plain = plain
        self._executor = executor

    def alerts(self) -> list[dict[str, Any]]:
        """Return every alert of the run in its last state, as mappings ready for JSON."""
        return [self._plain.plain(alert) for alert in self._alerts.latest.values()]

    def dumps(self) -> list[dict[str, Any]]:
        """Return every dump of the run, oldest first, as mappings ready for JSON."""
        entries = self._dumps.entries.values()
        return [entry.as_plain() for entry in sorted(entries, key=lambda entry: (entry.key.attempt, entry.key.step))]

    async def diagnosis(self, identity: str, attempt: int, step: int) -> bytes | None:
        """Return the diagnosis (JSON) of the dump with this id, attempt and step.

        None if there is none, or reading takes too long.
        """
        entry = self._dumps.entries.get(DumpKey(identity, attempt, step))
        if entry is None or not entry.diagnosed:
            return None
        return await self._read(self._place.run_dir / entry.key.report)

    async def post_mortem(self, name: str) -> bytes | None:
        """Return the post-mortem `name` of an alert of this node as Markdown.

        None if there is none, or reading takes too long.
        """
        alerts = self._alerts.latest.values()
        node = self._place.node
        if not any(alert.rule in REPORTED and report_name(alert, node) == name for alert in alerts):
            return None
        return await self._read(self._place.run_dir / REPORTS / f"{name}.md")

    async def _read(self, path: Path) -> bytes | None:
        job = asyncio.get_running_loop().run_in_executor(self._executor, _read_report, path)
        try:
            return await asyncio.wait_for(job, READ_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError):
            return None


def _read_report(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(MAX_REPORT_BYTES)
