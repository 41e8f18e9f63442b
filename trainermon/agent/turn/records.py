"""The part of a turn that follows the journals, and sets in motion what their records call for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from trainermon.agent.alerting import AlertBook
from trainermon.agent.orders.dumps import DumpEntry
from trainermon.agent.pipeline import RecordPipeline
from trainermon.agent.reactions import Reactions, RuleConsumer
from trainermon.agent.turn.views import RunViews
from trainermon.agent.watch import RankWatch


class RecordTurns:
    """Reads new records in turns, and starts the work that they call for: alerts, diagnoses, metrics.

    Args:
        pipeline: Reads the journals.
        views: What page and metrics show.
        reactions: Has noted new dumps and ended ranks.
        alerts: Writes alerts to the log.
        watch: Tells which ranks live.
        judge: Compares ranks without those that are gone.
        schedule: Called with each dump that is to be diagnosed.

    Attributes:
        has_read_all: Whether the last turn found nothing new.
    """

    def __init__(  # noqa: PLR0913 - what records go to
        self,
        pipeline: RecordPipeline,
        *,
        views: RunViews,
        reactions: Reactions,
        alerts: AlertBook,
        watch: RankWatch,
        judge: RuleConsumer,
        schedule: Callable[[DumpEntry], None],
    ) -> None:
        self.has_read_all = False
        self._pipeline = pipeline
        self._views = views
        self._reactions = reactions
        self._alerts = alerts
        self._watch = watch
        self._judge = judge
        self._schedule = schedule
        self._num_ended = 0
        self._forgotten: set[int] = set()

    @property
    def is_written(self) -> bool:
        """Whether every alert state is in the log file, `alerts.jsonl`."""
        return self._alerts.written

    @property
    def has_refused(self) -> bool:
        """Whether a rank's journal cannot be read, as an incompatible release wrote it."""
        return bool(self._pipeline.refused)

    def run(self) -> int:
        """Run one turn: read new records and react to them; return how many were new."""
        num_records = self._pipeline.step()
        self.has_read_all = not num_records
        if self.has_read_all:
            self._forget_gone()
        self._react()
        return num_records

    def store(self) -> int:
        """Read and store new records without reacting to them; return how many were new."""
        num_records = self._pipeline.step()
        self._alerts.poll()
        return num_records

    def close(self) -> None:
        """Close the journals."""
        self._pipeline.close()

    def flush(self) -> Future[None]:
        """Return a future that a later turn completes, when everything read so far is stored."""
        return self._pipeline.flush()

    def drain(self) -> Future[None]:
        """Return a future like `flush`, after the last rank has gone; its metrics are no longer shown."""
        self._views.end_run()
        return self._pipeline.flush()

    def _forget_gone(self) -> None:
        """Show nothing more of ranks that are gone, and wait for none, now that all they wrote was read."""
        gone = {state.rank for state in self._watch.states if not state.alive}
        self._judge.leave(gone)
        self._views.end_ranks(gone - self._forgotten)
        self._forgotten = gone

    def _react(self) -> None:
        self._views.publish_steps()
        self._alerts.poll()
        reactions = self._reactions
        for entry in reactions.new_dumps:
            self._schedule(entry)
        reactions.new_dumps.clear()
        if reactions.num_ended > self._num_ended:
            self._num_ended = reactions.num_ended
            self._pipeline.flush()  # a rank that has closed its journal waits to hear that it is stored
