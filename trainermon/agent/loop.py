"""The agent's one loop: turns of the pipeline, looks at the ranks, and the decision when it is over.

    running ── every rank gone ──▶ draining ── all stored ──▶ finished ── linger over ──▶ end
       ▲                              │                          │
       └────── a rank is there ◀──────┴──────────────────────────┘

Time is this process's monotonic clock. If the loop itself stood still (the agent was stopped, the node suspended),
nobody is judged for that time, in which nobody looked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from pathlib import Path

from trainermon.agent.assembly import AgentParts
from trainermon.agent.hang.reporting import HangReporter
from trainermon.agent.hang.watch import HangWatch
from trainermon.agent.health import MonitorHealth, readings_of
from trainermon.agent.lifecycle.child import output_of
from trainermon.agent.lifecycle.lock import DRAINING, FINISHED, RUNNING, AgentStatus, RunLock, is_followed, write_status
from trainermon.agent.lifecycle.release import linger_s
from trainermon.agent.node import RankFile, RunNode, read_rank_file
from trainermon.agent.orders.deliveries import DumpDeliveries
from trainermon.agent.orders.dumps import DumpDiagnoser, DumpEntry
from trainermon.agent.orders.escalations import NodeEscalations
from trainermon.agent.place import AgentPlace
from trainermon.agent.web.access import open_access
from trainermon.agent.web.http import build_application
from trainermon.agent.web.server import WebServer, certificate_of
from trainermon.core.errors import ConfigError
from trainermon.exporters.discovery import clear_targets, write_targets
from trainermon.exporters.export import SEGMENTS_FOLDER

COMPACT_MODULE = "trainermon.exporters.store.retention"
TARGETS_FILE = "prometheus_sd.json"
TARGETS_FOLDER = "prometheus_sd"
BUSY_PAUSE_S = 0.01
MAX_PAUSE_S = 0.05
FAULT_PAUSE_S = 1.0
MAX_FAULTS = 600
LOOK_S = 0.2
COMPACT_S = 600.0
COMPACT_LIMIT_S = 1800.0
GAP_S = 5.0
FLUSH_LIMIT_S = 20.0
CLEAR_LIMIT_S = 2.0
DRAIN_LIMIT_S = 900.0

_log = logging.getLogger(__name__)


class NodeAgent:
    """Follows one spool until its run is over.

    Args:
        parts: From `assemble`.
        spool: The spool; its lock is held.
        executor: Does what touches the run directory; one job at a time.
        host: Name of this node.
        lock: That of the spool; without it nobody looks whether it is lost.
    """

    def __init__(
        self, parts: AgentParts, spool: Path, executor: Executor, *, host: str, lock: RunLock | None = None
    ) -> None:
        self._lock = lock
        self._is_lost = False
        self._parts = parts
        self._spool = spool
        self._host = host
        self._executor = executor
        place = AgentPlace(
            run_id=parts.settings.run_id, spool=spool, run_dir=parts.settings.run_dir, node_dir=parts.node_dir
        )
        self._hang = HangWatch(
            parts.settings.hang,
            place,
            ranks=parts.watch,
            headers=lambda: parts.pipeline.headers,
            records=parts.records,
            reporter=HangReporter(
                place,
                records=parts.records,
                report=parts.judge.adopt,
                severities={rule.name: rule.severity for rule in parts.rules},
                executor=executor,
            ),
            open_alerts=parts.alerts.firing,
        )
        self._node = RunNode(parts, executor=executor, host=host, flush=self._flush, stop=self.stop, hang=self._hang)
        self._diagnoser = DumpDiagnoser(
            parts.settings.run_dir, executor=executor, commit=self._settle, finished=self._show_diagnosis
        )
        self._deliveries = DumpDeliveries(spool, parts.settings.run_dir)
        self._health = MonitorHealth(lambda: readings_of(parts), parts.judge.report)
        self._server: WebServer | None = None
        self._stopping = False
        self._state = RUNNING
        self._num_ended = self._num_commits = 0
        self._num_faults = 0
        self._has_read_all = False
        self._forgotten: set[int] = set()
        self._last_turn_s = self._looked_s = self._gone_s = self._compacted_s = time.monotonic()
        self._compaction: asyncio.Task[None] | None = None
        self._draining: Future[None] | None = None
        self._status: AgentStatus | None = None
        self._rank_files: set[tuple[int, int]] = set()

    def stop(self) -> None:
        """End soon: store what was followed, and leave."""
        self._stopping = True

    async def run(self) -> bool:
        """Work until the run is over or `stop`; return whether everything that was written is stored."""
        self._serve()
        self._report()  # before a backlog is followed: whoever started this agent waits for its address
        self._look(time.monotonic())
        self._resume_diagnoses()
        pause_s = BUSY_PAUSE_S
        try:
            while not self._stopping and self._num_faults < MAX_FAULTS:
                try:
                    num_records = self._turn(time.monotonic())
                    if self._is_over() or self._has_lost_spool():
                        break
                    pause_s = BUSY_PAUSE_S if num_records else min(2 * pause_s, MAX_PAUSE_S)
                    self._num_faults = 0
                except Exception:  # noqa: BLE001 - the border: a fault in a turn must not end the watching
                    pause_s = FAULT_PAUSE_S
                    self._note_fault()
                await asyncio.sleep(pause_s)
            if self._stopping or (self._is_lost and not is_followed(self._spool)):
                await self._leave_early()
        finally:
            await self._close()
        return self._state == FINISHED and not self._is_lost and not self._parts.pipeline.follower.refused

    def _has_lost_spool(self) -> bool:
        """Whether the spool is not the one that this agent follows; whoever follows the new one writes to the store."""
        if self._lock is not None and self._lock.is_lost(self._spool):
            _log.error(
                "somebody has removed %s and made it again: this agent ends, another one follows it", self._spool
            )
            self._is_lost = True
        return self._is_lost

    def _turn(self, now_s: float) -> int:
        self._note_gap(now_s)
        self._hang.poll()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look(now_s)
            self._parts.config_watch.poll(now_s, self._parts.reactions.attempt)
        num_records = self._parts.pipeline.step()
        self._has_read_all = not num_records
        if self._has_read_all:
            self._forget_gone()
        self._react()
        self._advance(now_s, num_records)
        self._report()
        return num_records

    def _look(self, now_s: float) -> None:
        gone = self._parts.watch.look(now_s)
        for rank in gone:
            _log.info("rank %d is gone", rank)
        self._hang.look(now_s, gone, has_read_all=self._has_read_all)
        self._hang.show(self._parts.metrics)
        for rank, header in self._parts.pipeline.follower.headers.items():
            if (rank, header.attempt) not in self._rank_files:
                self._rank_files.add((rank, header.attempt))
                self._read_rank_file(rank)
        self._health.poll(now_s)
        self._deliveries.poll()
        self._diagnoser.poll()
        if now_s - self._compacted_s >= COMPACT_S:
            self._compacted_s = now_s
            if self._compaction is None or self._compaction.done():
                self._compaction = asyncio.get_running_loop().create_task(self._compact())

    def _forget_gone(self) -> None:
        """Show nothing more of ranks that are gone, now that all they wrote was read."""
        gone = {rank for rank, state in self._parts.watch.ranks.items() if not state.alive}
        for rank in gone - self._forgotten:
            self._parts.history.end(rank)
            self._parts.metrics.remove_rank(rank)
        self._forgotten = gone

    def _react(self) -> None:
        """Set in motion what the records of this turn call for."""
        for summary in self._parts.history.take_summaries():
            self._parts.feed.publish("step", summary)
        reactions = self._parts.reactions
        self._parts.alerts.poll()
        for entry in reactions.new_dumps:
            self._diagnoser.schedule(entry)
        reactions.new_dumps.clear()
        if reactions.num_ended > self._num_ended:
            self._num_ended = reactions.num_ended
            self._parts.pipeline.flush()  # a rank that has closed its journal waits to hear that it is stored

    def _advance(self, now_s: float, num_records: int) -> None:
        """Go from state to state; every look may find a rank again."""
        if self._parts.watch.num_alive:
            self._gone_s = now_s
            self._draining = None
            self._state = RUNNING
        elif num_records:
            self._state = DRAINING  # what the last of them have left is still being read
            self._draining = None
        elif self._draining is None:
            self._state = DRAINING
            self._parts.metrics.end_run()
            self._draining = self._parts.pipeline.flush()
        elif self._draining.done() and self._parts.alerts.written:
            self._state = FINISHED
        if self._node.state != self._state:
            self._node.state = self._state
            self._parts.feed.publish("state", {"state": self._state})

    def _is_over(self) -> bool:
        """Whether the agent may go; looks once more for ranks that have come since."""
        now_s = time.monotonic()
        self._note_gap(now_s)  # this process may have been stopped since the turn began
        waited_s = now_s - self._gone_s
        wanted_s = linger_s(self._spool, self._parts.settings.linger_s)
        if self._state == DRAINING and waited_s > max(DRAIN_LIMIT_S, self._parts.settings.linger_s):
            _log.error("not everything could be stored within %g s; the rest stays in %s", DRAIN_LIMIT_S, self._spool)
            return True
        if self._state != FINISHED or waited_s < wanted_s or not (self._diagnoser.idle and self._hang.idle):
            return False
        if not self._deliveries.idle:
            is_late = waited_s > max(DRAIN_LIMIT_S, wanted_s)
            if is_late:
                _log.error("dumps could not be delivered within %g s; they stay in %s", DRAIN_LIMIT_S, self._spool)
            return is_late
        if not self._parts.alerts.written:
            return False
        self._look(time.monotonic())
        if self._parts.watch.num_alive == 0 and self._parts.pipeline.step() == 0:
            return True
        self._state, self._draining = DRAINING, None
        return False

    def _note_gap(self, now_s: float) -> None:
        """Judge nobody for a time in which this process itself stood still."""
        gap_s = now_s - self._last_turn_s
        if gap_s > GAP_S:
            _log.warning("this process stood still for %.0f s, which counts as no rank's silence", gap_s)
            self._gone_s = now_s
            self._parts.watch.skip(gap_s)
            self._health.restart_timers()
        self._last_turn_s = now_s

    def _note_fault(self) -> None:
        self._num_faults += 1
        self._node.num_faults += 1
        if self._node.num_faults.bit_count() == 1:  # 1st, 2nd, 4th ... so that a lasting fault does not fill the log
            _log.exception("a turn of the agent failed (number %d)", self._node.num_faults)

    def _serve(self) -> None:
        settings = self._parts.settings
        hosts = (*settings.allowed_hosts, self._host)
        access = settings.access.completed()
        try:
            gate = open_access(access, own_token=self._parts.token)
            escalations = NodeEscalations(self._parts)
            application = build_application(self._node, access=gate, hosts=hosts, escalations=escalations)
            self._server = WebServer(
                application, host=settings.host, port=settings.port, certificate=certificate_of(access)
            )
        except (OSError, ConfigError) as error:
            _log.error("no page and no metrics: cannot listen on %s: %s", settings.host, error)
            return
        _log.info("page %s", self._server.url)
        for path in self._targets_files():
            self._executor.submit(_write_targets, path, self._server.target, {"node": self._host})

    def _targets_files(self) -> tuple[Path, Path]:
        """Return this node's discovery file, and its twin in the folder that a Prometheus follows for all runs."""
        run_dir = self._parts.settings.run_dir
        name = f"{self._parts.settings.run_id}.{self._host}.json"
        return self._parts.node_dir / TARGETS_FILE, run_dir.parent / TARGETS_FOLDER / name

    def _report(self) -> None:
        """Replace the status file if it says something else than the last one."""
        pipeline = self._parts.pipeline
        if pipeline.status.num_commits != self._num_commits:
            self._num_commits = pipeline.status.num_commits
            self._parts.metrics.set("trainermon_last_commit_timestamp_seconds", time.time())
        status = AgentStatus(
            pid=os.getpid(),
            run_id=self._parts.settings.run_id,
            output=self._parts.settings.output,
            state=self._state,
            url=self._server.url if self._server else None,
            flushed={
                str(rank): (position.cursor.file, position.cursor.offset) for rank, position in pipeline.flushed.items()
            },
            problem=pipeline.status.store_error or self._deliveries.problem,
        )
        if status == self._status:
            return
        self._status = status
        try:
            write_status(self._spool, status)
        except OSError as error:
            _log.warning("the status file cannot be written: %s", error)

    def _read_rank_file(self, rank: int) -> None:
        def take(job: asyncio.Future[RankFile]) -> None:
            self._node.rank_files[rank] = job.result()

        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self._executor, read_rank_file, self._parts.settings.run_dir, rank)
        job.add_done_callback(take)

    def _resume_diagnoses(self) -> None:
        """Have those dumps of local ranks diagnosed that an earlier agent was not able to."""
        for entry in self._parts.dumps.entries.values():
            if not entry.diagnosed and not self._parts.watch.ranks.keys().isdisjoint(entry.ranks):
                self._diagnoser.schedule(entry)

    async def _compact(self) -> None:
        """Have the segments kept within their budget, by a process that ends with this loop, wherever it is."""
        wanted = self._parts.settings.retention
        command = [sys.executable, "-m", COMPACT_MODULE, str(self._parts.node_dir / SEGMENTS_FOLDER)]
        command += ["--max-bytes", str(wanted.max_bytes), "--full-detail-hours", str(wanted.full_detail_hours)]
        try:
            await output_of(command, limit_s=COMPACT_LIMIT_S)
        except asyncio.TimeoutError:
            _log.warning("segments were not merged within %g s", COMPACT_LIMIT_S)
        except OSError as error:
            _log.warning("segments were not merged: %s", error)

    def _show_diagnosis(self, entry: DumpEntry) -> None:
        _log.info("diagnosis of %s: %s", entry.key.folder, self._parts.settings.run_dir / entry.key.report)
        self._parts.feed.publish("dump", entry.as_plain())
        for alert in self._parts.alerts.latest.values():
            plain = self._parts.reactions.plain_alert(alert)
            if plain["diagnosis"] == entry.key.url:
                self._parts.feed.publish("alert", plain)

    async def _flush(self) -> bool:
        """Commit everything followed so far, within a limit; the loop's turns do the work."""
        done = asyncio.wrap_future(self._parts.pipeline.flush())
        await asyncio.wait([done], timeout=FLUSH_LIMIT_S)
        return done.done()

    async def _settle(self) -> bool:
        """Deliver and commit everything, which is what a diagnosis reads."""
        await self._deliveries.done()
        return await self._flush()

    async def _leave_early(self) -> None:
        """Store what is there, within a limit; whoever comes next goes on from that."""
        done = self._parts.pipeline.flush()
        deadline = time.monotonic() + FLUSH_LIMIT_S
        while not (done.done() and self._parts.alerts.written) and time.monotonic() < deadline:
            self._parts.pipeline.step()
            self._parts.alerts.poll()
            await asyncio.sleep(BUSY_PAUSE_S)
        is_over = done.done() and not self._parts.watch.num_alive
        self._state = FINISHED if is_over else DRAINING

    async def _close(self) -> None:
        await self._hang.close()
        await self._diagnoser.close()
        await self._deliveries.close()
        if not self._is_lost:
            self._report()
        self._parts.feed.close()
        if self._server is not None:
            await self._server.close()
        cleared = self._executor.submit(_clear_targets, *self._targets_files())
        await asyncio.wait([asyncio.wrap_future(cleared)], timeout=CLEAR_LIMIT_S)
        self._parts.pipeline.close()
        self._parts.exports.close()
        self._parts.watch.close()


def _write_targets(path: Path, target: str, labels: Mapping[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_targets(path, target, labels)
    except OSError as error:
        _log.warning("Prometheus cannot find this agent: %s", error)


def _clear_targets(node_file: Path, shared_file: Path) -> None:
    with contextlib.suppress(OSError):
        clear_targets(node_file)
        shared_file.unlink(missing_ok=True)
