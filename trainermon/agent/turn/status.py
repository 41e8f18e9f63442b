"""Says in the spool what the agent does: state, address, stored positions, and what keeps it from storing."""

from __future__ import annotations

import logging
import os
import time

from trainermon.agent.alerting import AlertBook
from trainermon.agent.lifecycle.lock import AgentStatus, ToldAlert, write_status
from trainermon.agent.pipeline import RecordPipeline
from trainermon.agent.place import AgentPlace
from trainermon.exporters.prometheus.exposition import Exposition

MAX_TOLD = 20
"""Most alerts that a rank logs; the page and `alerts.jsonl` have all."""

_log = logging.getLogger(__name__)


class StatusReporter:
    """Writes `agent.status.json` in the spool anew whenever its content changes.

    Args:
        place: The agent's folders.
        output: The run directory, as the settings name it.
        pipeline: Tells what is stored.
        metrics: `/metrics`, which shows when something was stored last.
        alerts: The run's alerts.
    """

    def __init__(
        self, place: AgentPlace, output: str, *, pipeline: RecordPipeline, metrics: Exposition, alerts: AlertBook
    ) -> None:
        self._alerts = alerts
        self._told: dict[tuple[int, str, int], ToldAlert] = {}
        self._num_seen = 0
        self._place = place
        self._output = output
        self._pipeline = pipeline
        self._metrics = metrics
        self._num_commits = 0
        self._last: AgentStatus | None = None

    def report(self, state: str, *, url: str | None, problem: str) -> None:
        """Write the present status: the agent's `state`, its page's `url`, and a `problem` besides storing.

        A failure is logged.
        """
        stored = self._pipeline.status
        if stored.num_commits != self._num_commits:
            self._num_commits = stored.num_commits
            self._metrics.set("trainermon_last_commit_timestamp_seconds", time.time())
        flushed = self._pipeline.flushed.items()
        status = AgentStatus(
            pid=os.getpid(),
            run_id=self._place.run_id,
            output=self._output,
            state=state,
            url=url,
            flushed={str(rank): (position.cursor.file, position.cursor.offset) for rank, position in flushed},
            problem=stored.store_error or problem,
            alerts=self._told_alerts(),
        )
        if status == self._last:
            return
        self._last = status
        try:
            write_status(self._place.spool, status)
        except OSError as error:
            _log.warning("the status file cannot be written: %s", error)

    def _told_alerts(self) -> tuple[ToldAlert, ...]:
        """Return the alerts that a rank shall log: of one rule and step the first rank's, and of all the first ones."""
        latest = self._alerts.latest
        for alert in list(latest.values())[self._num_seen :] if len(self._told) < MAX_TOLD else ():
            key = alert.attempt, alert.rule, alert.first_step
            self._told.setdefault(key, ToldAlert(*key, str(alert.severity), alert.message))
        self._num_seen = len(latest)
        return tuple(self._told.values())[:MAX_TOLD]
