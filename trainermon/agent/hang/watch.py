"""Watches the local ranks for a standstill and for death, and sees to it that the reason is found, told and kept.

    silent for longer than its limit ─▶ climb the ladder on every rank ─▶ verdict ─▶ post-mortem, alert `hang`
    gone without a good-bye ─▶ wait a moment for those that it takes along ─▶ post-mortem, alert `rank-dead`

Nothing is judged by two clocks: silence is measured by the agent's own. A rank that is waited for because it is known
to be busy (set-up, checkpoint, evaluation) excuses the others until its own limit. Nothing here ends or changes a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from trainermon.agent.hang.crash import crash_verdict, memory_hint
from trainermon.agent.hang.evidence import DEAD, ENDED, RUNNING, RankEvidence
from trainermon.agent.hang.exits import ExitWatch
from trainermon.agent.hang.ladder import EvidenceLadder
from trainermon.agent.hang.limits import HangLimits
from trainermon.agent.hang.process import oom_kills, read_process
from trainermon.agent.hang.records import LastRecords
from trainermon.agent.hang.report import FOLDER, PostMortem, read_tail, report_name, write_report
from trainermon.agent.hang.verdict import HangVerdict, verdict
from trainermon.agent.watch import RankState, RankWatch
from trainermon.alerts.state import alert_id
from trainermon.core.config import HangConfig
from trainermon.core.control import Phase
from trainermon.core.journal import Header
from trainermon.core.spool import rank_pid
from trainermon.core.values import Alert, AlertCondition, AlertState, Finding, Kind, SeriesKey, Severity, as_plain
from trainermon.exporters.prometheus.exposition import Exposition

HANG = "hang"
RANK_DEAD = "rank-dead"
NOBODY = -1
"""Rank of an alert that no rank of this node is to blame for."""

SETTLE_S = 3.0
"""For how long others may follow a rank that has died, before it is asked who was first."""

SETTLE_ALONE_S = 0.5
"""The same where no rank is left."""

READ_LIMIT_S = 20.0
"""For how long a judgement on dead ranks waits until what they wrote last, their exceptions among it, was read."""

WRITE_LIMIT_S = 20.0

_BUSY = frozenset({Phase.SETUP, Phase.CHECKPOINT, Phase.EVALUATION, Phase.REPLAY, Phase.DUMP})
_SAID_GOOD_BYE = frozenset({Phase.CLOSED})
_SERIES = {HANG: SeriesKey(Kind.STEP, "silence_seconds"), RANK_DEAD: SeriesKey(Kind.STEP, "lost_ranks")}

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _OpenAlert:
    """An alert that is on, and the beats of the ranks that it is about when it began."""

    alert: Alert
    generations: Mapping[int, int]


class HangWatch:
    """Watches the ranks of one node; driven by the agent's loop.

    Args:
        settings: Limits, and which rungs may be climbed.
        spool: Where the ranks are.
        run_id: Of the run.
        run_dir: Where reports go.
        host: Name of this node.
        ranks: Their heartbeats, looked at by the caller.
        headers: Returns, by rank, the header of its journal.
        records: Their last records.
        report: Where alerts go.
        severities: Of the rules `hang` and `rank-dead`.
        open_alerts: Alerts of an earlier agent that may still be on.
        executor: Writes the report.
        log: The agent's log.

    Attributes:
        hung: Ranks that are held to stand still now: those to blame if that is known, else all that are silent.
        num_dead: How many ranks have died.
    """

    def __init__(  # noqa: PLR0913  # what a report is made of
        self,
        settings: HangConfig,
        *,
        spool: Path,
        run_id: str,
        run_dir: Path,
        host: str,
        ranks: RankWatch,
        headers: Callable[[], Mapping[int, Header]],
        records: LastRecords,
        report: Callable[[Alert], None],
        severities: Mapping[str, Severity],
        open_alerts: Collection[Alert] = (),
        executor: Executor,
        log: Path,
    ) -> None:
        self.hung: frozenset[int] = frozenset()
        self.num_dead = 0
        self._detached: set[tuple[int, int]] = set()
        self._settings = settings
        self._spool, self._run_dir, self._log_file = spool, run_dir, log
        self._run_id, self._host = run_id, host
        self._ranks = ranks
        self._headers = headers
        self._records = records
        self._report = report
        self._severities = severities
        self._executor = executor
        self._limits = HangLimits(settings)
        self._ladder = EvidenceLadder(spool, settings)
        self._exits = ExitWatch()
        self._dead: dict[int, float] = {}  # in the order in which they died
        self._told_dead: set[int] = set()
        self._inherited = [alert for alert in open_alerts if alert.rule in (HANG, RANK_DEAD)]
        self._open: list[_OpenAlert] = []
        self._followed: dict[int, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._latest: tuple[HangVerdict | None, tuple[RankEvidence, ...]] = (None, ())
        self._oom_kills = oom_kills() or 0
        ranks.on_silence = self._limits.learn

    @property
    def idle(self) -> bool:
        """Whether nothing is being looked into or waits to be."""
        return (self._task is None or self._task.done()) and not self._pending_deaths()

    def poll(self) -> None:
        """Notice processes that end; for every turn of the loop, as their status is only told for a moment."""
        self._exits.poll()

    def look(self, now_s: float, gone: Sequence[int], *, has_read_all: bool) -> None:
        """Judge the ranks, after their heartbeats were looked at; `gone` have left since the last look.

        `has_read_all` tells whether nothing was left in the journals when they were read last. Of a rank that has died
        the last record may be the exception that says why.
        """
        self._exits.poll()
        if not self._settings.enabled:
            return
        for state in self._ranks.ranks.values():
            if state.alive:
                self._follow(state)
            if state.phase is Phase.DETACHED:
                self._detached.add((state.rank, state.pid))
        self._take_over()
        self._note_deaths(now_s, [*gone, *self._never_seen()])
        self._resolve()
        if self._task is not None and not self._task.done():
            return
        if self._pending_deaths():
            settled_s = SETTLE_S if self._ranks.num_alive else SETTLE_ALONE_S
            waited_s = now_s - max(self._dead.values())
            if waited_s >= settled_s and (has_read_all or waited_s >= READ_LIMIT_S):
                self._begin(self._look_into_deaths(now_s))
        elif not any(entry.alert.rule == HANG for entry in self._open):
            overdue = self._overdue(now_s)
            if overdue:
                self._begin(self._look_into_hang(now_s, overdue))

    def limit_s(self, rank: int) -> float:
        """Return for how long a rank may be silent now."""
        state = self._ranks.ranks[rank]
        return self._limits.limit_s(rank, state.phase)

    def show(self, metrics: Exposition) -> None:
        """Set what `/metrics` tells of hung and lost ranks."""
        metrics.set("trainermon_lost_ranks_total", self.num_dead)
        metrics.set("trainermon_detached_ranks_total", len(self._detached))
        for rank, state in self._ranks.ranks.items():
            if state.alive:
                metrics.set("trainermon_rank_hung", float(rank in self.hung), rank=rank)

    def plain(self) -> dict[str, Any]:
        """Return what is known of the local ranks, as JSON for a controller that joins the nodes.

        `looked_into` tells whether it comes from a standstill or a death that was looked into, or is only what the
        control pages say now.
        """
        found, evidence = self._latest
        current = evidence if self._open and evidence else self._evidence(time.monotonic())
        return {
            "host": self._host,
            "looked_into": bool(self._open and evidence),
            "verdict": as_plain(found) if self._open and found else None,
            "ranks": [as_plain(one) for one in current],
        }

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._exits.close()

    def _begin(self, work: Any) -> None:
        self._task = asyncio.get_running_loop().create_task(self._contained(work))

    @staticmethod
    async def _contained(work: Any) -> None:
        try:
            await work
        except Exception:  # noqa: BLE001 - the border: the agent goes on without this report
            _log.exception("a standstill could not be looked into")

    def _follow(self, state: RankState) -> None:
        if self._followed.get(state.rank) != state.pid:
            self._followed[state.rank] = state.pid
            self._exits.follow(state.rank, rank_pid(self._spool, state.rank))

    def _take_over(self) -> None:
        """Go on with the alerts of an earlier agent: they are over when the ranks give a sign again."""
        for alert in self._inherited if self._ranks.ranks else ():
            states = self._ranks.ranks.values()
            known = {state.rank: state.generation for state in states if alert.rule == HANG or state.rank == alert.rank}
            self._open.append(_OpenAlert(alert, known))
            self._inherited = []

    # ------------------------------------------------------------------ standstill

    def _overdue(self, now_s: float) -> list[RankState]:
        """Return the ranks that are silent for too long, unless one that is known to be busy excuses them."""
        alive = [state for state in self._ranks.ranks.values() if state.alive and state.generation >= 0]
        overdue = [state for state in alive if now_s - state.changed_s > self.limit_s(state.rank)]
        excuses = [state for state in alive if state.phase in _BUSY and state not in overdue]
        return [state for state in overdue if state.phase in _BUSY or not excuses]

    async def _look_into_hang(self, now_s: float, overdue: Sequence[RankState]) -> None:
        generations = {state.rank: state.generation for state in overdue}
        evidence = await asyncio.gather(*map(self._ladder.climb, self._evidence(now_s)))
        if any(self._ranks.ranks[rank].generation != known for rank, known in generations.items()):
            return  # it was only slow
        found = verdict(evidence)
        self.hung = frozenset(culprit.rank for culprit in found.culprits) or frozenset(generations)
        longest = max(overdue, key=lambda state: now_s - state.changed_s)
        silent_s, limit_s = now_s - longest.changed_s, self.limit_s(longest.rank)
        blamed = found.culprits[0].rank if found.culprits else NOBODY
        said = f"no rank has given a sign of life for {silent_s:.0f} s (limit {limit_s:.0f} s)"
        if len(generations) < self._ranks.num_alive:
            said = f"{len(generations)} of {self._ranks.num_alive} ranks here have given no sign for {limit_s:.0f} s"
        alert = self._alert(HANG, blamed, longest.step, f"{found.text}; {said}", value=silent_s, baseline=limit_s)
        await self._tell(alert, generations, found, evidence)

    # ------------------------------------------------------------------ death

    def _pending_deaths(self) -> bool:
        return bool(self._dead.keys() - self._told_dead)

    def _note_deaths(self, now_s: float, gone: Sequence[int]) -> None:
        for rank in self._exits.in_order(gone):
            if self._ranks.ranks[rank].phase not in _SAID_GOOD_BYE:
                self._dead[rank] = now_s
                self.num_dead += 1
        for rank in [rank for rank in self._dead if self._ranks.ranks[rank].alive]:  # a new attempt
            del self._dead[rank]
            self._told_dead.discard(rank)

    def _never_seen(self) -> list[int]:
        """Return the ranks of this attempt that were gone before anybody looked, where nobody has told of them."""
        headers = self._headers()
        attempt = max((header.attempt for header in headers.values()), default=0)
        told = {entry.alert.rank for entry in self._open if entry.alert.rule == RANK_DEAD}
        found = []
        for rank, header in headers.items():
            state = self._ranks.ranks.get(rank)
            if state is not None and not state.alive and state.generation >= 0 and rank not in self._followed:
                self._followed[rank] = state.pid
                process = read_process(state.pid)
                if process is not None and process.state == "Z":  # nobody has collected it: it tells how it ended
                    self._exits.follow(rank, state.pid)
                    self._exits.poll()
                found += [rank] if header.attempt == attempt and rank not in told else []
        return found

    async def _look_into_deaths(self, now_s: float) -> None:
        order = list(self._dead)
        known = [self._ladder.last_words(one) if one.life == DEAD else one for one in self._evidence(now_s)]
        living = await asyncio.gather(*(self._ladder.climb(one) for one in known if one.life == RUNNING))
        evidence = sorted([*living, *(one for one in known if one.life != RUNNING)], key=lambda one: one.rank)
        first_s = min(self._dead.values())
        unordered = [rank for rank in order if self._dead[rank] == first_s and self._exits.exit_of(rank) is None]
        found = crash_verdict(evidence, order, unordered=unordered)
        self._told_dead |= set(order)
        rank = found.culprits[0].rank if found.culprits else order[0]
        alert = self._alert(RANK_DEAD, rank, self._ranks.ranks[rank].step, found.text, value=len(order), baseline=0)
        generations = {rank: self._ranks.ranks[rank].generation for rank in order}
        await self._tell(alert, generations, found, evidence)

    # ------------------------------------------------------------------ both

    def _evidence(self, now_s: float) -> list[RankEvidence]:
        return [self._known(state, now_s) for _, state in sorted(self._ranks.ranks.items())]

    def _known(self, state: RankState, now_s: float) -> RankEvidence:
        header = self._headers().get(state.rank)
        attempt = header.attempt if header else 0
        limit_s = self.limit_s(state.rank)
        life = RUNNING if state.alive else DEAD if state.rank in self._dead else ENDED
        return RankEvidence(
            rank=state.rank,
            world_size=header.coordinates.world_size if header else 1,
            host=self._host,
            attempt=attempt,
            pid=self._exits.pid(state.rank) if state.alive else 0,
            life=life if state.phase is not Phase.CLOSED else ENDED,
            phase=state.phase.name.lower(),
            step=state.step,
            silent_s=round(now_s - state.changed_s, 3),
            limit_s=limit_s if math.isfinite(limit_s) else 0.0,
            exit=self._exits.exit_of(state.rank),
            error=self._records.error(state.rank, attempt=attempt),
        )

    def _alert(  # noqa: PLR0913  # what the alerts differ in
        self, rule: str, rank: int, step: int, text: str, *, value: float, baseline: float
    ) -> Alert:
        attempt = max((header.attempt for header in self._headers().values()), default=0)
        return Alert(
            id=alert_id(rule, rank=rank, attempt=attempt, first_step=step),
            rule=rule,
            severity=self._severities.get(rule, Severity.CRITICAL),
            state=AlertState.FIRING,
            attempt=attempt,
            rank=rank,
            step=step,
            first_step=step,
            time_s=time.time(),
            kind=Kind.STEP,
            value=value,
            baseline=baseline,
            num_series=1,
            findings=(Finding(series=_SERIES[rule], value=value, baseline=baseline),),
            message=f"{rule}: {text}",
            condition=AlertCondition.REPORTED,
        )

    async def _tell(
        self, alert: Alert, generations: Mapping[int, int], found: HangVerdict, evidence: Sequence[RankEvidence]
    ) -> None:
        self._latest = found, tuple(evidence)
        self._open.append(_OpenAlert(alert, generations))
        self._report(alert)
        name = report_name(alert, self._host)
        report = PostMortem(
            rule=alert.rule,
            run_id=self._run_id,
            host=self._host,
            attempt=alert.attempt,
            step=alert.step,
            time_s=alert.time_s,
            verdict=found,
            ranks=tuple(evidence),
            records={one.rank: self._records.steps(one.rank) for one in evidence},
            hints=self._hints(evidence),
            log=read_tail(self._log_file),
        )
        job = self._executor.submit(write_report, self._run_dir / FOLDER, name, report)
        try:
            await asyncio.wait_for(asyncio.wrap_future(job), WRITE_LIMIT_S)
        except (OSError, asyncio.TimeoutError) as error:
            _log.warning("the post-mortem %s is not written: %s", name, str(error) or "the file system does not answer")
        else:
            _log.info("post-mortem: %s", self._run_dir / FOLDER / f"{name}.md")

    def _hints(self, evidence: Sequence[RankEvidence]) -> tuple[str, ...]:
        kills = (oom_kills() or 0) - self._oom_kills
        hints = (memory_hint(one, oom_kills=kills) for one in evidence if one.life == DEAD)
        return tuple(dict.fromkeys(hint for hint in hints if hint))

    def _resolve(self) -> None:
        """End the alerts whose ranks go on, or have come back in a later attempt."""
        for entry in list(self._open):
            states = [self._ranks.ranks[rank] for rank in entry.generations]
            if not all(self._is_over(entry, state) for state in states):
                continue
            self._open.remove(entry)
            if entry.alert.rule == HANG:
                self.hung = frozenset()
            lives = any(state.alive for state in states)
            step = max(entry.alert.step, *(state.step for state in states)) if lives else entry.alert.step
            became = "the ranks go on" if lives else "the ranks have gone"
            message = f"{entry.alert.rule}: over at step {step}, {became}; began at step {entry.alert.first_step}"
            self._report(
                dataclasses.replace(
                    entry.alert, state=AlertState.RESOLVED, step=step, time_s=time.time(), message=message
                )
            )

    @staticmethod
    def _is_over(entry: _OpenAlert, state: RankState) -> bool:
        if not state.alive:
            return entry.alert.rule == HANG
        return state.generation != entry.generations[state.rank]
