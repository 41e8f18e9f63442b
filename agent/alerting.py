"""Every alert of the run, and how it is written down.

The log lies on a file system that may hang or be full, so it is written in the same worker thread as the segments;
alerts wait in memory until it succeeds. After a restart the same records give the same alerts with the same ids, which
the log and the command book take only once.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future

from trainermon.alerts.log import AlertLog
from trainermon.monitor.values import Alert, AlertState

MAX_WAITING = 10_000
RETRY_S = 5.0


class AlertBook:
    """Every alert of the run in its last state, and the writing of the log.

    Args:
        executor: Runs the writing; one job at a time.
        log: The log; after this only the executor's thread touches it.
    """

    def __init__(self, executor: Executor, log: AlertLog) -> None:
        self.latest = {alert.id: alert for alert in log.read()}
        self._executor = executor
        self._log = log
        self._waiting: collections.deque[Alert] = collections.deque(maxlen=MAX_WAITING)
        self._job: Future[bool] | None = None
        self._retry_s = math.inf

    @property
    def firing(self) -> list[Alert]:
        """The alerts that are on."""
        return [alert for alert in self.latest.values() if alert.state is AlertState.FIRING]

    @property
    def written(self) -> bool:
        """Whether everything is in the log."""
        return self._job is None and not self._waiting and self._retry_s == math.inf

    def add(self, alert: Alert) -> bool:
        """Take a new state of an alert; return False if nothing is new, as when an agent was restarted."""
        known = self.latest.get(alert.id)
        if known is not None and _place(known) >= _place(alert):
            return False
        self.latest[alert.id] = alert
        self._waiting.append(alert)
        return True

    def poll(self) -> None:
        """Start writing what waits, and take note of what was written; never waits itself."""
        if self._job is not None and self._job.done():
            self._retry_s = math.inf if self._job.result() else time.monotonic() + RETRY_S
            self._job = None
        if self._job is None and (self._waiting or time.monotonic() >= self._retry_s):
            alerts = tuple(self._waiting)
            self._waiting.clear()
            self._job = self._executor.submit(self._write, alerts)

    def _write(self, alerts: Sequence[Alert]) -> bool:
        for alert in alerts:
            self._log.append(alert)
        return self._log.retry()


def _place(alert: Alert) -> tuple[int, bool, int]:
    """Return how far an alert has come; evaluating old records again gives earlier places."""
    return alert.step, alert.state is AlertState.RESOLVED, alert.num_series
