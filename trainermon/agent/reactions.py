"""What follows from a record: the consumers on the hot path, and what an alert or an event sets in motion.

Nothing here waits: writing is handed to the worker thread, ranks read their commands when they come by, and a diagnosis
runs in a process of its own.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from trainermon.agent.alert_page import PlainAlerts
from trainermon.agent.alerting import AlertBook
from trainermon.agent.consumers import RecordConsumer
from trainermon.agent.feed import EventFeed
from trainermon.agent.orders.commands import CommandBook, ConflictError
from trainermon.agent.orders.dumps import DumpEntry, RunDumps
from trainermon.agent.orders.reconfigure import REACH_S
from trainermon.agent.watch import RankWatch
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.escalation import Escalator
from trainermon.alerts.handling import AlertHandling
from trainermon.alerts.reported import AgentStatement
from trainermon.core.events import (
    ConfigurationEvent,
    ConfigurationStatus,
    DetachedEvent,
    DumpEvent,
    DumpStatus,
    GapEvent,
    RankEvent,
    ReplayEvent,
    WarningEvent,
    outcome_line,
)
from trainermon.core.journal import Header
from trainermon.core.values import Alert, Command, SeriesKey, StatBlock
from trainermon.exporters.prometheus.exposition import Exposition
from trainermon.exporters.views import RunHistory

MAX_REPORTS = 32
_DUMPED = frozenset({DumpStatus.WRITTEN, DumpStatus.NONFINITE, DumpStatus.CLEAN})

_log = logging.getLogger(__name__)


class RuleConsumer(RecordConsumer):
    """Evaluates the alert rules on the blocks of each round, and passes on the alerts that changed.

    Args:
        engine: Evaluates the rules.
        report: Called with each alert that changed.
    """

    def __init__(self, engine: RuleEngine, report: Callable[[Alert], None]) -> None:
        self._engine = engine
        self._report = report

    def on_header(self, header: Header) -> None:
        """Note that blocks of this rank will come."""
        self._engine.meet(header)

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Begin to evaluate the rules on one step of one rank."""
        self._engine.take(header, keys, block)

    def end_round(self) -> None:
        """Evaluate the rules on the steps of all ranks."""
        for alert in self._engine.settle():
            self._report(alert)

    def leave(self, over: Collection[int]) -> None:
        """Wait no longer for the ranks in `over`, all of whose steps were read, to compare the others."""
        for alert in self._engine.leave(over):
            self._report(alert)

    def report(self, statement: AgentStatement) -> None:
        """Evaluate the rules on a statement that the agent makes about a rank, or about itself."""
        for alert in self._engine.report(statement):
            self._report(alert)

    def adopt(self, alert: Alert) -> None:
        """Tell the rules of an alert that another part has made, as `hang`: it may explain other alerts."""
        self._engine.adopt(alert)
        self._report(alert)


class MetricsConsumer(RecordConsumer):
    """Updates `/metrics` of the agent with every block (one step of one rank)."""

    def __init__(self, metrics: Exposition) -> None:
        self._metrics = metrics

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Set the metrics of one rank in `/metrics` to those of its newest step."""
        self._metrics.update(header, keys, block)


class HistoryConsumer(RecordConsumer):
    """Adds every block (one step of one rank) to the history from which the page draws curves and heat maps."""

    def __init__(self, history: RunHistory) -> None:
        self._history = history

    def on_header(self, header: Header) -> None:
        """Note that blocks of this rank will come: no step is complete without it."""
        self._history.start(header)

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Add one step of one rank to the history."""
        self._history.add(header, keys, block)

    def on_end(self, header: Header) -> None:
        """Note that no more blocks of this rank will come."""
        self._history.end(header.coordinates.rank)


class DumpReports(RecordConsumer):
    """Remembers what became of each ordered dump on each rank.

    Attributes:
        by_command: By id of the command, then by rank, the status of its dump.
    """

    def __init__(self) -> None:
        self.by_command: OrderedDict[str, dict[int, DumpStatus]] = OrderedDict()

    def on_event(self, header: Header, event: RankEvent) -> None:
        """Remember the status that a rank reports of a dump."""
        if isinstance(event, DumpEvent) and event.command:
            self.by_command.setdefault(event.command, {})[header.coordinates.rank] = event.status
            while len(self.by_command) > MAX_REPORTS:
                self.by_command.popitem(last=False)


class Reactions(RecordConsumer):
    """Passes alerts to page, log and ranks, and the ranks' events to page and diagnosis.

    Attributes:
        new_dumps: Dumps that a rank has reported since this was last emptied.
        attempt: The newest one.
        lag_s: Wall time from the end of the newest block's step to its evaluation; 0 if the clocks say it was negative.
        num_ended: How many journals were closed in good order.
    """

    def __init__(  # noqa: PLR0913 - the places where an alert or an event goes
        self,
        *,
        alerts: AlertBook,
        commands: CommandBook,
        dumps: RunDumps,
        escalator: Escalator,
        feed: EventFeed,
        handling: AlertHandling,
        metrics: Exposition,
        plain: PlainAlerts,
        watch: RankWatch,
    ) -> None:
        self.new_dumps: list[DumpEntry] = []
        self.num_ended = 0
        self.attempt = 0
        self.lag_s = 0.0
        self._newest_s = 0.0
        self._alerts = alerts
        self._commands = commands
        self._dumps = dumps
        self._escalator = escalator
        self._feed = feed
        self._handling = handling
        self._metrics = metrics
        self._plain = plain
        self._watch = watch

    def on_alert(self, alert: Alert) -> None:
        """Show and log the alert, and order the dump that its rule escalates to, unless it is silenced."""
        if not self._alerts.add(alert):
            return
        _log.info("%s %s: %s", alert.severity, alert.state, alert.message)
        self._feed.publish("alert", self._plain.plain(alert))
        if self._handling.silence(alert, time.time()) is not None:
            return
        margin = self._watch.margin(REACH_S, at_least=1)
        orders = self._escalator.decide(alert, self._watch.steps, time.time(), margin_steps=margin)
        ranks: dict[Command, list[int]] = {}
        for rank, commands in orders.items():
            for command in commands:
                ranks.setdefault(command, []).append(rank)
        for command, concerned in ranks.items():
            self._order(command, concerned, attempt=alert.attempt)

    def on_header(self, header: Header) -> None:
        """Send the rank the commands that it has yet to carry out in this attempt."""
        self.attempt = max(self.attempt, header.attempt)
        rank = header.coordinates.rank
        self._commands.resend(rank, attempt=header.attempt, step=self._watch.steps.get(rank, 0))

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Note when the rank's step ended."""
        del header, keys
        self._newest_s = block.time_s

    def end_round(self) -> None:
        """Measure how many seconds the agent lags behind the ranks."""
        self.lag_s = max(0.0, time.time() - self._newest_s)
        self._metrics.set("trainermon_journal_lag_seconds", self.lag_s)

    def on_event(self, header: Header, event: RankEvent) -> None:
        """Note a dump that the rank reports, or log its warning."""
        rank = header.coordinates.rank
        match event:
            case WarningEvent() | DetachedEvent():
                _log.warning("rank %d %s: %s", rank, event.type, event.message)
            case GapEvent():
                _log.warning("rank %d gap, steps %s to %s: %s", rank, event.first, event.last or "", event.message)
            case ConfigurationEvent():
                level = logging.INFO if event.status is ConfigurationStatus.APPLIED else logging.WARNING
                reason = f": {event.reason}" if event.reason else ""
                _log.log(level, "rank %d: new configuration %s%s", rank, event.status, reason)
            case DumpEvent():
                self._escalator.settle(event.command, rank, event.bytes or 0)
                self._on_dump(event, rank)
            case ReplayEvent():
                self._on_dump(event, rank)

    def _on_dump(self, event: DumpEvent | ReplayEvent, rank: int) -> None:
        self._count(event.status)
        entry = self._dumps.record(event)
        if entry is not None:
            if not entry.diagnosed:
                self.new_dumps.append(entry)
            self._feed.publish("dump", entry.as_plain())
        _log.info("%s", outcome_line(event, rank))

    def configure(self, command: Command) -> None:
        """Send an edited configuration to every living rank, unless an earlier agent has done so."""
        if self._commands.first_step(command.id) is None:
            self._order(command, sorted(self._watch.steps), attempt=self.attempt)

    def on_end(self, header: Header) -> None:
        """Count one more rank that has closed its journal in good order."""
        del header
        self.num_ended += 1

    def _order(self, command: Command, ranks: Sequence[int], *, attempt: int) -> None:
        try:
            self._commands.submit(command, ranks, attempt=attempt, steps=self._watch.steps)
        except (ConflictError, OSError) as error:
            _log.warning("command %s was not ordered: %s", command.id, error)

    def _count(self, status: DumpStatus) -> None:
        self._metrics.add("trainermon_dumps_total")
        if status not in _DUMPED:
            self._metrics.add("trainermon_dump_failures_total")
