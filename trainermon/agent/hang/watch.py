"""Watches the local ranks for a standstill and for death, and sees to it that the reason is found, told and kept.

    silent for longer than its limit ─▶ climb the ladder on every rank ─▶ verdict ─▶ post-mortem, alert `hang`
    gone without a good-bye ─▶ wait a moment for those that it takes along ─▶ post-mortem, alert `rank-dead`

Nothing is judged by two clocks: silence is measured by the agent's own. A rank that is waited for because it is known
to be busy (set-up, checkpoint, evaluation) excuses the others until its own limit. Nothing here ends or changes a rank.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from trainermon.agent.background import BackgroundTask
from trainermon.agent.hang.crash import crash_verdict
from trainermon.agent.hang.deaths import DeathWatch
from trainermon.agent.hang.evidence import DEAD, RUNNING, RankEvidence
from trainermon.agent.hang.known import KnownEvidence
from trainermon.agent.hang.ladder import EvidenceLadder
from trainermon.agent.hang.open_alerts import HANG, RANK_DEAD, OpenAlerts
from trainermon.agent.hang.records import LastRecords
from trainermon.agent.hang.reporting import HangReporter
from trainermon.agent.hang.silence import SilenceWatch
from trainermon.agent.hang.verdict import HangVerdict, verdict
from trainermon.agent.place import AgentPlace
from trainermon.agent.watch import RankState, RankWatch
from trainermon.core.config import HangConfig
from trainermon.core.control import Phase
from trainermon.core.journal import Header
from trainermon.core.values import Alert, as_plain
from trainermon.exporters.prometheus.exposition import Exposition

NOBODY = -1
"""Rank of an alert that no rank of this node is to blame for."""


class HangWatch:
    """Watches the ranks of one node for hangs and deaths, finds out who is to blame, and raises the alerts.

    The agent's loop calls it.

    Args:
        settings: Limits of silence, and which ways of looking into a rank are allowed.
        place: The agent's folders.
        ranks: Heartbeats of the ranks, read by the caller.
        headers: Returns, by rank, the header of its journal.
        records: The ranks' last steps and exceptions.
        reporter: Makes alerts and reports.
        open_alerts: Alerts of an earlier agent that may still fire.

    Attributes:
        hung: Ranks that are held to stand still now: those to blame if that is known, else all that are silent.
    """

    def __init__(  # noqa: PLR0913 - what is watched, and who is told
        self,
        settings: HangConfig,
        place: AgentPlace,
        *,
        ranks: RankWatch,
        headers: Callable[[], Mapping[int, Header]],
        records: LastRecords,
        reporter: HangReporter,
        open_alerts: Collection[Alert] = (),
    ) -> None:
        self.hung: frozenset[int] = frozenset()
        self._is_enabled = settings.enabled
        self._ranks = ranks
        self._silence = SilenceWatch(settings, ranks)
        self._deaths = DeathWatch(place.spool, ranks, headers)
        self._known = KnownEvidence(
            place.node, ranks=ranks, headers=headers, records=records, silence=self._silence, deaths=self._deaths
        )
        self._ladder = EvidenceLadder(place.spool, settings)
        self._open = OpenAlerts(open_alerts)
        self._reporter = reporter
        self._work = BackgroundTask("a standstill could not be looked into")
        self._detached: set[tuple[int, int]] = set()
        self._latest: tuple[HangVerdict | None, tuple[RankEvidence, ...]] = (None, ())

    @property
    def idle(self) -> bool:
        """Whether no hang or death is being looked into or waits to be, and no process is about to end."""
        return not (self._work.is_running or self._deaths.pending or self._deaths.awaits_exit)

    @property
    def num_dead(self) -> int:
        """Number of ranks that have died so far."""
        return self._deaths.num_dead

    def poll(self) -> None:
        """Record processes that have ended; call it every turn, as exit statuses are available only briefly."""
        self._deaths.poll()

    def look(self, now_s: float, gone: Sequence[int], *, has_read_all: bool) -> None:
        """Judge the ranks, after their heartbeats were looked at; `gone` have left since the last look.

        `has_read_all` tells whether nothing was left in the journals when they were read last. Of a rank that has died
        the last record may be the exception that says why.
        """
        self._deaths.poll()
        if not self._is_enabled:
            return
        states = self._ranks.ranks
        self._detached |= {(one.rank, one.pid) for one in states.values() if one.phase is Phase.DETACHED}
        self._open.take_over(states)
        self._deaths.note(now_s, gone, told=self._open.dead_ranks)
        for alert in self._open.take_resolved(states):
            if alert.rule == HANG:
                self.hung = frozenset()
            self._reporter.send(alert)
        if not self._work.is_running:
            self._begin_work(now_s, has_read_all=has_read_all)

    def show(self, metrics: Exposition) -> None:
        """Set the metrics of hung and dead ranks in `/metrics`."""
        metrics.set("trainermon_lost_ranks_total", self.num_dead)
        metrics.set("trainermon_detached_ranks_total", len(self._detached))
        for state in self._ranks.living:
            metrics.set("trainermon_rank_hung", float(state.rank in self.hung), rank=state.rank)

    def plain(self) -> dict[str, Any]:
        """Return the evidence on the local ranks, ready for JSON, for a controller that joins all nodes.

        Its key `looked_into` tells whether it comes from a hang or a death that was looked into, or is only what the
        control pages say now.
        """
        found, evidence = self._latest
        current = evidence if self._open and evidence else self._known.collect(time.monotonic())
        return {
            "host": self._known.host,
            "looked_into": bool(self._open and evidence),
            "verdict": as_plain(found) if self._open and found else None,
            "ranks": [as_plain(one) for one in current],
        }

    async def close(self) -> None:
        """Stop looking into hangs and deaths."""
        await self._work.close()
        self._deaths.close()

    def _begin_work(self, now_s: float, *, has_read_all: bool) -> None:
        """Begin to look into deaths or a standstill, where there is reason to; deaths explain a standstill."""
        if self._deaths.pending:
            if self._deaths.is_settled(now_s, has_read_all=has_read_all):
                self._work.start(self._look_into_deaths(now_s))
        elif not self._open.is_hanging:
            overdue = self._silence.overdue(now_s)
            if overdue:
                self._work.start(self._look_into_hang(now_s, overdue))

    async def _look_into_hang(self, now_s: float, overdue: Sequence[RankState]) -> None:
        generations = {state.rank: state.generation for state in overdue}
        evidence = await asyncio.gather(*map(self._ladder.climb, self._known.collect(now_s)))
        if generations != self._generations(generations):
            return  # it was only slow
        found = verdict(evidence)
        self.hung = frozenset(culprit.rank for culprit in found.culprits) or frozenset(generations)
        longest = max(overdue, key=lambda state: now_s - state.changed_s)
        silent_s, limit_s = now_s - longest.changed_s, self._silence.limit_s(longest)
        said = f"no rank has given a sign of life for {silent_s:.0f} s (limit {limit_s:.0f} s)"
        if len(generations) < self._ranks.num_alive:
            said = f"{len(generations)} of {self._ranks.num_alive} ranks here have given no sign for {limit_s:.0f} s"
        alert = self._reporter.make_alert(
            HANG,
            f"{found.text}; {said}",
            attempt=self._known.attempt,
            rank=found.culprits[0].rank if found.culprits else NOBODY,
            step=longest.step,
            value=silent_s,
            baseline=limit_s,
        )
        await self._tell(alert, generations, found, evidence)

    async def _look_into_deaths(self, now_s: float) -> None:
        order = self._deaths.order
        known = [
            self._ladder.last_words(one, self._deaths.notes_of(one.rank)) if one.life == DEAD else one
            for one in self._known.collect(now_s)
        ]
        living = await asyncio.gather(*(self._ladder.climb(one) for one in known if one.life == RUNNING))
        evidence = sorted([*living, *(one for one in known if one.life != RUNNING)], key=lambda one: one.rank)
        found = crash_verdict(evidence, order, unordered=self._deaths.unordered(order))
        self._deaths.mark_told(order)
        rank = found.culprits[0].rank if found.culprits else order[0]
        alert = self._reporter.make_alert(
            RANK_DEAD,
            found.text,
            attempt=self._known.attempt,
            rank=rank,
            step=self._ranks.ranks[rank].step,
            value=len(order),
            baseline=0,
        )
        await self._tell(alert, self._generations(order), found, evidence)

    def _generations(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the newest beat of each of `ranks`."""
        states = self._ranks.ranks
        return {rank: states[rank].generation for rank in ranks}

    async def _tell(
        self, alert: Alert, generations: Mapping[int, int], found: HangVerdict, evidence: Sequence[RankEvidence]
    ) -> None:
        self._latest = found, tuple(evidence)
        self._open.add(alert, generations)
        self._reporter.send(alert)
        await self._reporter.write(alert, found, evidence)
