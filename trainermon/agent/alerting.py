"""Every alert of the run, and how it is written down.

The log lies on a file system that may hang or be full, so it is written in the same worker thread as the segments, and
in the order of things: an alert is handed over before the segment that holds its records can be. An agent that is
killed in between sees the records again and gives the same alert with the same id, which the log takes only once.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Executor, Future

from trainermon.alerts.log import AlertLog
from trainermon.core.values import Alert, AlertState

MAX_PENDING = 10_000
RETRY_S = 5.0


class AlertBook:
    """Keeps the last state of every alert of the run, and writes each new state into the log `alerts.jsonl`.

    Args:
        executor: Runs the writing; one job at a time, in order.
        log: The log; after this only the executor's thread touches it.

    Attributes:
        latest: By id, the last state of each alert.
        dropped: Number of alert states that were not written because the file system has not answered for too long.
    """

    def __init__(self, executor: Executor, log: AlertLog) -> None:
        self.latest = {alert.id: alert for alert in log.read()}
        self.dropped = 0
        self._executor = executor
        self._log = log
        self._jobs: list[Future[bool]] = []
        self._retry_s = math.inf

    @property
    def firing(self) -> list[Alert]:
        """The alerts that fire now."""
        return [alert for alert in self.latest.values() if alert.state is AlertState.FIRING]

    @property
    def written(self) -> bool:
        """Whether every alert state is in the log file, and no write is pending."""
        return not self._jobs and self._retry_s == math.inf

    def add(self, alert: Alert) -> bool:
        """Keep and log a new state of an alert; return False if it is known, as after a restart of the agent."""
        known = self.latest.get(alert.id)
        if known is not None and _place(known) >= _place(alert):
            return False
        self.latest[alert.id] = alert
        if len(self._jobs) < MAX_PENDING:
            self._jobs.append(self._executor.submit(self._log.append, alert))
        else:
            self.dropped += 1
        return True

    def poll(self) -> None:
        """Check which writes to the log have ended, and repeat those that failed when it is time to; never waits."""
        while self._jobs and self._jobs[0].done():
            self._retry_s = math.inf if self._jobs.pop(0).result() else time.monotonic() + RETRY_S
        if not self._jobs and time.monotonic() >= self._retry_s:
            self._jobs.append(self._executor.submit(self._log.retry))


def _place(alert: Alert) -> tuple[int, bool, int]:
    """Return how far an alert has come; evaluating old records again gives earlier places."""
    return alert.step, alert.state is AlertState.RESOLVED, alert.num_series
