"""Whether the monitor itself works: what the agent says about its own parts, as statements for `reported` rules.

    monitor-blind              nothing is collected of a rank's steps: it detached, or another optimizer is stepped
    monitor-records-lost       ranks left out records, or files were gone before they were read, in the last minutes
    monitor-lagging            the rules see steps long after their end
    monitor-store-failing      nothing could be stored for a while
    monitor-store-incomplete   rows could not be stored, or a segment was damaged, and were set aside
    monitor-export-failing     exporters have failed, or were too slow, in the last minutes
    monitor-condition-failing  the condition of a rule has raised an error

Looked at every few seconds, by this process's monotonic clock.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from trainermon.agent.consumers import RecordConsumer
from trainermon.alerts.reported import BLIND_RULE, AgentStatement
from trainermon.core.events import DetachedEvent, GapEvent, RankEvent
from trainermon.core.journal import Header
from trainermon.core.values import SeriesKey, StatBlock
from trainermon.exporters.store.store import SetAside

if TYPE_CHECKING:
    from trainermon.agent.assembly import AgentParts

LOOK_S = 5.0
RECENT_S = 300.0
"""For so long after the last loss or failure an alert about it stays on."""

LAG_LIMIT_S = 30.0
STORE_LIMIT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HealthReadings:
    """What is wrong, at one moment, with the monitoring itself: lag, losses, failures.

    Attributes:
        rank: The first rank of this node, under which alerts about the monitor are raised.
        attempt: The newest attempt (start of the job).
        step: The newest step.
        lag_s: Seconds from the end of that step to its evaluation.
        lost_records: By rank, records that were not taken or not there to be read, since the agent started.
        lost_files: Journal files of all ranks that were gone before they were read, since the agent started.
        store_error: Why nothing can be stored; empty if it can.
        set_aside: What is missing in the store.
        num_export_failures: Calls of exporters that failed and steps that they left out, since the agent started.
        faults: By rule that was switched off, the error.
    """

    rank: int
    attempt: int
    step: int
    lag_s: float = 0.0
    lost_records: Mapping[int, int] = dataclasses.field(default_factory=dict)
    lost_files: int = 0
    store_error: str = ""
    set_aside: SetAside = dataclasses.field(default_factory=SetAside)
    num_export_failures: int = 0
    faults: Mapping[str, str] = dataclasses.field(default_factory=dict)


class UnseenSteps(RecordConsumer):
    """Raises and ends the alerts on ranks of whose steps nothing is collected any more, from what they report.

    Args:
        report: Receives what is to be said.
    """

    def __init__(self, report: Callable[[AgentStatement], None]) -> None:
        self._report = report
        self._steps: dict[int, int] = {}

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        """Note how far the rank has been seen."""
        del keys
        self._steps[header.coordinates.rank] = block.step

    def on_event(self, header: Header, event: RankEvent) -> None:
        """Say that nothing is collected any more, or was not for some steps."""
        rank = header.coordinates.rank
        match event:
            case GapEvent():
                first = self._steps.get(rank, -1) + 1 if event.first is None else event.first
                self._say(header, first, event.last, event.message, event.what)
            case DetachedEvent():
                self._say(header, self._steps.get(rank, -1) + 1, None, event.message)

    def _say(self, header: Header, first: int, last: int | None, why: str, what: str = "") -> None:
        rank = header.coordinates.rank
        steps = f"from step {first} on" if last is None else f"of steps {first} to {last}"
        subject = f"rank {rank}" if what else f"nothing is collected of rank {rank}"
        begun = AgentStatement(
            rule=BLIND_RULE,
            holds=True,
            rank=rank,
            attempt=header.attempt,
            step=first if last is None else last,
            first_step=first,
            time_s=time.time(),
            detail=f"{subject} {steps}: {why}",
        )
        self._report(begun)
        if last is not None:
            self._report(dataclasses.replace(begun, holds=False, detail=f"watched again from step {last + 1} on"))


class MonitorHealth:
    """Raises and ends alerts about the monitoring itself, from readings of the agent's state.

    Args:
        read: Takes the readings; None as long as no rank has been seen.
        report: Receives what is to be said about each rule, again at every look.
    """

    def __init__(self, read: Callable[[], HealthReadings | None], report: Callable[[AgentStatement], None]) -> None:
        self._read = read
        self._report = report
        self._looked_s = -math.inf
        self._seen: dict[str, int] = {}
        self._grew_s: dict[str, float] = {}
        self._store_failed_s = math.inf
        self._lagging_looks = 0

    def poll(self, now_s: float) -> None:
        """Read the state of all parts and report what is wrong, if it is time to; `now_s` is monotonic."""
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        readings = self._read()
        if readings is None:
            return
        for statement in (
            self._records(readings, now_s),
            self._lag(readings),
            self._store(readings, now_s),
            self._missing(readings),
            self._exports(readings, now_s),
            self._conditions(readings),
        ):
            self._report(statement)

    def restart_timers(self) -> None:
        """Begin all waiting times anew, as this process itself was stopped meanwhile."""
        self._store_failed_s = math.inf
        self._lagging_looks = 0

    def _records(self, readings: HealthReadings, now_s: float) -> AgentStatement:
        lost = sum(readings.lost_records.values())
        ranks = ", ".join(str(rank) for rank, number in sorted(readings.lost_records.items()) if number)
        reasons = [f"left out by rank {ranks}, whose log says why: a spool that is slow or full"] if ranks else []
        if readings.lost_files:
            reasons.append(f"{readings.lost_files} journal files were removed before they were read")
        detail = "; ".join(reasons)
        holds = self._has_grown("records", lost + readings.lost_files, now_s)
        return _statement(readings, "monitor-records-lost", holds=holds, value=float(lost), detail=detail)

    def _lag(self, readings: HealthReadings) -> AgentStatement:
        self._lagging_looks = self._lagging_looks + 1 if readings.lag_s > LAG_LIMIT_S else 0
        holds = self._lagging_looks >= 3
        return _statement(
            readings,
            "monitor-lagging",
            holds=holds,
            value=readings.lag_s,
            usual=LAG_LIMIT_S,
            detail="of the newest step",
        )

    def _store(self, readings: HealthReadings, now_s: float) -> AgentStatement:
        self._store_failed_s = min(self._store_failed_s, now_s) if readings.store_error else math.inf
        failing_s = max(0.0, now_s - self._store_failed_s)
        return _statement(
            readings,
            "monitor-store-failing",
            holds=failing_s >= STORE_LIMIT_S,
            value=failing_s,
            detail=readings.store_error,
        )

    def _missing(self, readings: HealthReadings) -> AgentStatement:
        found = readings.set_aside
        details = []
        if found.num_rows:
            details.append(f"{found.num_rows} rows are in quarantine ({found.reason})")
        if found.damaged:
            details.append(f"damaged: {', '.join(path.name for path in found.damaged)}"[:1000])
        number = found.num_rows + len(found.damaged)
        return _statement(
            readings,
            "monitor-store-incomplete",
            holds=number > 0,
            value=float(number),
            detail="; ".join(details),
        )

    def _exports(self, readings: HealthReadings, now_s: float) -> AgentStatement:
        number = readings.num_export_failures
        holds = self._has_grown("exports", number, now_s)
        return _statement(
            readings, "monitor-export-failing", holds=holds, value=float(number), detail="see the agent's log"
        )

    def _conditions(self, readings: HealthReadings) -> AgentStatement:
        detail = "; ".join(f"{rule}: {fault}" for rule, fault in sorted(readings.faults.items()))
        return _statement(
            readings,
            "monitor-condition-failing",
            holds=bool(readings.faults),
            value=float(len(readings.faults)),
            detail=detail,
        )

    def _has_grown(self, name: str, count: int, now_s: float) -> bool:
        """Return whether a count has grown lately."""
        if count > self._seen.get(name, 0):
            self._grew_s[name] = now_s
        self._seen[name] = count
        return now_s - self._grew_s.get(name, -math.inf) < RECENT_S


def _statement(  # noqa: PLR0913 - what differs between statements
    readings: HealthReadings, rule: str, *, holds: bool, value: float, detail: str, usual: float = math.nan
) -> AgentStatement:
    return AgentStatement(
        rule=rule,
        holds=holds,
        rank=readings.rank,
        attempt=readings.attempt,
        step=readings.step,
        time_s=time.time(),
        detail=detail if holds else "",
        value=value,
        usual=usual,
    )


def readings_of(parts: AgentParts) -> HealthReadings | None:
    """Return what is wrong with an agent's parts now (lag, losses, failures); None as long as no rank has been seen."""
    follower, status, reactions = parts.pipeline.follower, parts.pipeline.status, parts.orders.reactions
    if not follower.headers:
        return None
    return HealthReadings(
        rank=min(follower.headers),
        attempt=reactions.attempt,
        step=max(parts.watch.steps.values(), default=0),
        lag_s=reactions.lag_s,
        lost_records=follower.lost_records,
        lost_files=follower.lost_files,
        store_error=status.store_error,
        set_aside=status.set_aside,
        num_export_failures=parts.exports.num_errors + parts.exports.num_dropped,
        faults=parts.alerting.engine.faults,
    )
