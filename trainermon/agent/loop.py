"""The agent's one loop: turns of the pipeline, looks at the ranks, and the decision when it is over.

Time is this process's monotonic clock. If the loop itself stood still (the agent was stopped, the node suspended),
nobody is judged for that time, in which nobody looked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Executor

from trainermon.agent.assembly import AgentParts
from trainermon.agent.hang.reporting import HangReporter
from trainermon.agent.hang.watch import HangWatch
from trainermon.agent.health import MonitorHealth, readings_of
from trainermon.agent.lifecycle.claim import SpoolClaim
from trainermon.agent.lifecycle.lock import FINISHED, RunLock
from trainermon.agent.node import RunNode
from trainermon.agent.orders.escalations import NodeEscalations
from trainermon.agent.turn.compaction import SegmentCompaction
from trainermon.agent.turn.dumps import FLUSH_LIMIT_S, DumpFollowUp, flush_within
from trainermon.agent.turn.faults import TurnFaults
from trainermon.agent.turn.looks import RankLooks
from trainermon.agent.turn.rank_files import RankFiles
from trainermon.agent.turn.records import RecordTurns
from trainermon.agent.turn.states import AgentStates
from trainermon.agent.turn.status import StatusReporter
from trainermon.agent.web.listener import AgentListener
from trainermon.agent.web.overview import RunOverview

BUSY_PAUSE_S = 0.01
MAX_PAUSE_S = 0.05
REPEAT_PAUSE_S = 0.5
"""Where no rank lives, and all that is left to do is to try to store again."""
FAULT_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


class NodeAgent:
    """The event loop of an agent: follows the ranks of one spool, turn by turn, until their run is over.

    Args:
        parts: From `assemble`.
        executor: Does what touches the run directory; one job at a time.
        host: Name of this node.
        lock: That of the spool; None: nobody looks whether it is lost.
    """

    def __init__(self, parts: AgentParts, executor: Executor, *, host: str, lock: RunLock | None = None) -> None:
        self._parts = parts
        self._claim = SpoolClaim(parts.place.spool, lock)
        hang = _hang_watch(parts, executor)
        rank_files = RankFiles(parts.place.run_dir, executor)
        self._faults = TurnFaults()
        self._dumps = _dump_follow_up(parts, executor)
        self._looks = _looks(parts, hang=hang, rank_files=rank_files, dumps=self._dumps)
        self._turns = _record_turns(parts, self._dumps)
        self._states = AgentStates(parts.place.spool, linger_s=parts.settings.agent.linger_s, drain=self._turns.drain)
        self._overview = RunOverview(parts, rank_files, host=host)
        self._node = RunNode(
            parts,
            overview=self._overview,
            hang=hang,
            faults=self._faults,
            executor=executor,
            flush=self._flush,
            stop=self.stop,
        )
        self._listener = AgentListener(parts.place, parts.settings, token=parts.token, host=host, executor=executor)
        self._status = StatusReporter(
            parts.place,
            parts.settings.output,
            pipeline=parts.pipeline,
            metrics=parts.views.metrics,
            alerts=parts.alerting.book,
        )
        self._stopping = self._has_given_up = False

    def stop(self) -> None:
        """Ask the agent to store what it has read, and to end soon."""
        self._stopping = True

    async def run(self) -> bool:
        """Work until the run is over or `stop` is called; return whether everything written is stored."""
        parts = self._parts
        self._listener.open(self._node, NodeEscalations(parts))
        self._report()  # before a backlog is followed: whoever started this agent waits for its address
        self._looks.look(time.monotonic(), has_read_all=self._turns.has_read_all)
        self._dumps.resume(parts.orders.dumps, parts.watch)
        pause_s = BUSY_PAUSE_S
        try:
            while not self._stopping and not self._faults.is_hopeless:
                try:
                    num_records = self._turn(time.monotonic())
                    if self._is_over() or self._claim.check():
                        break
                    pause_s = BUSY_PAUSE_S if num_records else min(2 * pause_s, self._longest_pause_s)
                    self._faults.end_row()
                except Exception:  # noqa: BLE001 - the border: a fault in a turn must not end the watching
                    pause_s = FAULT_PAUSE_S
                    self._faults.note()
                await asyncio.sleep(pause_s)
            if self._stopping or (self._claim.is_lost and not self._claim.has_successor):
                await self._leave_early()
        finally:
            await self._close()
        is_whole = self._states.state == FINISHED and not self._turns.has_refused
        return is_whole and not self._claim.is_lost and not self._has_given_up

    def _turn(self, now_s: float) -> int:
        self._note_gap(now_s)
        self._looks.poll()
        if self._looks.is_due(now_s):
            self._looks.look(now_s, has_read_all=self._turns.has_read_all)
            self._parts.look_for_edits(now_s)
        num_records = self._turns.run()
        self._states.advance(
            now_s, num_records, has_ranks=bool(self._looks.num_alive), is_written=self._turns.is_written
        )
        self._overview.show_state(self._states.state)
        self._report()
        return num_records

    def _is_over(self) -> bool:
        """Whether the agent may go; looks once more for ranks that have come since."""
        now_s = time.monotonic()
        self._note_gap(now_s)  # this process may have been stopped since the turn began
        if self._states.is_overdue(now_s) and (left := self._left()):
            _log.error("no rank has been there for too long to wait for this: %s", "; ".join(left))
            self._has_given_up = True
            return True
        if not self._states.has_lingered(now_s) or self._left():
            return False
        self._looks.look(time.monotonic(), has_read_all=self._turns.has_read_all)
        if self._looks.num_alive == 0 and self._turns.store() == 0:
            return True
        self._states.go_back()
        return False

    @property
    def _longest_pause_s(self) -> float:
        only_repeats = not self._looks.num_alive and self._parts.pipeline.status.store_error
        return REPEAT_PAUSE_S if only_repeats else MAX_PAUSE_S

    def _left(self) -> list[str]:
        """Return what keeps the agent from ending, in words."""
        spool = self._claim.spool
        waits = {
            f"not everything is stored; the rest stays in {spool}": self._states.state != FINISHED,
            f"dumps are not delivered; they stay in {spool}": not self._dumps.is_delivered,
            "dumps are not diagnosed": not self._dumps.is_diagnosed,
            "alerts are not in the log of alerts": not self._turns.is_written,
            "the end of a rank is still looked into": not self._looks.idle,
        }
        return [what for what, is_left in waits.items() if is_left]

    def _note_gap(self, now_s: float) -> None:
        """Judge nobody for a time in which this process itself stood still."""
        gap_s = self._states.notice_gap(now_s)
        if gap_s:
            self._looks.skip(gap_s)

    def _report(self) -> None:
        self._status.report(self._states.state, url=self._listener.url, problem=self._dumps.problem)

    async def _flush(self) -> bool:
        return await flush_within(self._turns.flush)

    async def _leave_early(self) -> None:
        """Store what is there, within a limit; whoever comes next goes on from that."""
        done = self._turns.flush()
        deadline = time.monotonic() + FLUSH_LIMIT_S
        while not (done.done() and self._turns.is_written) and time.monotonic() < deadline:
            self._turns.store()
            await asyncio.sleep(BUSY_PAUSE_S)
        self._states.leave(is_over=done.done() and not self._looks.num_alive)

    async def _close(self) -> None:
        await self._looks.close()
        await self._dumps.close()
        await self._node.close()
        if not self._claim.is_lost:
            self._report()
        self._parts.end_feed()
        await self._listener.close()
        self._parts.close()


def _hang_watch(parts: AgentParts, executor: Executor) -> HangWatch:
    alerting = parts.alerting
    reporter = HangReporter(
        parts.place,
        records=parts.records,
        report=alerting.judge.adopt,
        severities={rule.name: rule.severity for rule in alerting.rules},
        executor=executor,
    )
    return HangWatch(
        parts.settings.hang,
        parts.place,
        ranks=parts.watch,
        headers=lambda: parts.pipeline.headers,
        records=parts.records,
        reporter=reporter,
        open_alerts=alerting.book.firing,
    )


def _dump_follow_up(parts: AgentParts, executor: Executor) -> DumpFollowUp:
    return DumpFollowUp(
        parts.place,
        executor=executor,
        plain=parts.alerting.plain,
        alerts=parts.alerting.book,
        feed=parts.views.feed,
        flush=parts.pipeline.flush,
    )


def _looks(parts: AgentParts, *, hang: HangWatch, rank_files: RankFiles, dumps: DumpFollowUp) -> RankLooks:
    return RankLooks(
        parts.watch,
        hang=hang,
        metrics=parts.views.metrics,
        health=MonitorHealth(lambda: readings_of(parts), parts.alerting.judge.report),
        pipeline=parts.pipeline,
        rank_files=rank_files,
        dumps=dumps,
        compaction=SegmentCompaction(parts.place.segments, parts.settings.retention),
        accelerators=parts.accelerators,
    )


def _record_turns(parts: AgentParts, dumps: DumpFollowUp) -> RecordTurns:
    return RecordTurns(
        parts.pipeline,
        views=parts.views,
        reactions=parts.orders.reactions,
        alerts=parts.alerting.book,
        watch=parts.watch,
        judge=parts.alerting.judge,
        schedule=dumps.schedule,
    )
