"""Says in the spool what the agent does: state, address, stored positions, and what keeps it from storing."""

from __future__ import annotations

import logging
import os
import time

from trainermon.agent.lifecycle.lock import AgentStatus, write_status
from trainermon.agent.pipeline import RecordPipeline
from trainermon.agent.place import AgentPlace
from trainermon.exporters.prometheus.exposition import Exposition

_log = logging.getLogger(__name__)


class StatusReporter:
    """Writes `agent.status.json` in the spool anew whenever its content changes.

    Args:
        place: The agent's folders.
        output: The run directory, as the settings name it.
        pipeline: Tells what is stored.
        metrics: `/metrics`, which shows when something was stored last.
    """

    def __init__(self, place: AgentPlace, output: str, *, pipeline: RecordPipeline, metrics: Exposition) -> None:
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
        )
        if status == self._last:
            return
        self._last = status
        try:
            write_status(self._place.spool, status)
        except OSError as error:
            _log.warning("the status file cannot be written: %s", error)
