"""A running controller: what it was posted becomes escalations, and what it has seen becomes answers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from trainermon.agent.controller.client import AgentClient
from trainermon.agent.controller.discovery import make_finders
from trainermon.agent.controller.dispatch import EscalationDispatcher
from trainermon.agent.controller.fleet import AgentFleet
from trainermon.agent.controller.journal import EscalationJournal
from trainermon.agent.controller.laws import LawWatch
from trainermon.agent.controller.replicas import LOOK_S as COMPARE_S
from trainermon.agent.controller.replicas import ReplicaWatch
from trainermon.agent.controller.settings import ControllerSettings
from trainermon.agent.controller.standstill import LOOK_S, StandstillInquiry
from trainermon.agent.orders.commands import parse_command
from trainermon.agent.orders.webhook import DumpRequest, FiredAlert, make_requests, parse_notification
from trainermon.core.strict import build, require
from trainermon.core.values import DumpTask

HOUR_S = 3600.0
MAX_RUNS = 100
"""So many runs may one body of Alertmanager's name: each is an escalation of its own."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManualOrder:
    """A dump that a person or a program orders by HTTP from the controller.

    Attributes:
        id: Name of the order and of its dump; one that was used before is a repetition.
        run: Of which run; "": the only one.
        ranks: Which ranks; None: all.
        task: `statistics` or `tensor`.
        num_steps: For how many steps.
        reason: What it is for.
    """

    id: str
    run: str = ""
    ranks: tuple[int, ...] | None = None
    task: DumpTask = DumpTask.STATISTICS
    num_steps: int = 1
    reason: str = ""


class Controller:
    """Watches the agents of all nodes, and has ranks dump on one common step when an alert or a person asks for it.

    Such an order is called an escalation. Make it inside the event loop.

    Args:
        settings: Those of the controller.
        journal: Where accepted escalations are kept on disk.
        token: Requests to agents that have no token of their own are signed with it.

    Attributes:
        client: Speaks to the agents.
        fleet: The agents.
        journal: The escalations.
        standstill: Who holds up a run that stands still.
        replicas: Whether the copies of parameters on different nodes are equal.
        laws: What does not hold of the gradients of ranks on different nodes.
        dispatcher: Carries escalations out.
        counts: Alerts and escalations since the start, by what became of them.
        num_faults: Rounds that failed.
    """

    def __init__(self, settings: ControllerSettings, journal: EscalationJournal, *, token: str) -> None:
        self.settings = settings
        self.journal = journal
        self.counts: Counter[str] = Counter()
        self.num_faults = 0
        self.client = AgentClient(settings.agents, token=token)
        self._lock = asyncio.Lock()
        self.fleet = AgentFleet(self.client, make_finders(settings))
        self.standstill = StandstillInquiry(self.fleet, self.client)
        self.replicas = ReplicaWatch(self.fleet, self.client, self._escalate)
        self.laws = LawWatch(self.fleet, self.client)
        self.dispatcher = EscalationDispatcher(
            settings, fleet=self.fleet, client=self.client, journal=journal, lock=self._lock
        )

    async def run(self) -> None:
        """Watch agents and carry out escalations until cancelled; resumes those that an earlier one left open."""
        for escalation in self.journal.open:
            self.dispatcher.start(escalation)
        poll_s = self.settings.agents.poll_s
        try:
            await asyncio.gather(
                self._repeat(self.fleet.discover, self.settings.discovery.refresh_s),
                self._repeat(self.fleet.poll, poll_s),
                self._repeat(self.standstill.look, LOOK_S),
                self._repeat(self.replicas.look, max(COMPARE_S, poll_s)),
                self._repeat(self.laws.look, max(COMPARE_S, poll_s)),
            )
        finally:
            await self.dispatcher.close()
            await self.client.close()

    async def take_alerts(self, body: Any) -> dict[str, Any]:
        """Accept the dumps that Alertmanager's notification (webhook JSON) asks for; return {"status", "ignored"}.

        `status` is `accepted`, or, where nothing changes, `duplicate`, `suppressed` or `ignored`; `ignored` lists the
        reasons for which alerts have no consequence. What is accepted is on disk.

        Raises:
            ConfigError: The body is no notification of version 4, or names more than `MAX_RUNS` runs.
            OSError: It cannot be kept; Alertmanager shall try again.
        """
        notification = parse_notification(body, now_s=time.time(), max_age_s=self.settings.limits.max_age_s)
        async with self._lock:
            ignored = [*notification.ignored]
            named = [self._named(alert) for alert in notification.alerts]
            ignored += [f"{alert.rule}: it has no label run" for alert in named if not alert.run]
            fired = [alert for alert in named if alert.run]
            new = [alert for alert in fired if not self.journal.knows(alert.key)]
            self.counts["received"] += len(notification.alerts) + len(notification.ignored)
            self.counts["ignored"] += len(ignored)
            self.counts["duplicate"] += len(fired) - len(new)
            requests = make_requests(new, truncated=notification.truncated)
            require(len(requests) <= MAX_RUNS, "alerts", f"{len(requests)} runs", f"at most {MAX_RUNS} in one body")
            results = await self._accept(requests)
        status = next((s for s in ("accepted", "suppressed") if s in results), "duplicate" if fired else "ignored")
        return {"status": status, "ignored": ignored}

    async def order(self, body: Any) -> dict[str, Any]:
        """Accept a dump that a person or a program asks for with the JSON `body` (`ManualOrder`).

        Return {"status", "id"}. `status` is `accepted`, `duplicate` or `suppressed`.

        Raises:
            ConfigError: The body is wrong.
            OSError: It cannot be kept.
        """
        request = parse_order(body)
        async with self._lock:
            if request.id in self.journal.escalations:
                return {"status": "duplicate", "id": request.id}
            named = request if request.run else dataclasses.replace(request, run=self._only_run())
            require(named.run, "run", body.get("run"), f"one of {self.fleet.runs}")
            (status,) = await self._accept([named])
            return {"status": status, "id": request.id}

    async def _escalate(self, request: DumpRequest) -> None:
        """Accept what this controller itself has found, once."""
        async with self._lock:
            if request.id not in self.journal.escalations:
                await self._accept([request])

    def _named(self, alert: FiredAlert) -> FiredAlert:
        """Return the alert with its run; where there is only one, that is meant."""
        return alert if alert.run else dataclasses.replace(alert, run=self._only_run())

    def _only_run(self) -> str:
        runs = self.fleet.runs
        return runs[0] if len(runs) == 1 else ""

    async def _accept(self, requests: Sequence[DumpRequest]) -> list[str]:
        """Put requests of different runs on disk and have them carried out, unless there were too many.

        Returns, for each, `accepted` or `suppressed`. The lock is held.
        """
        now_s = time.time()
        limit = self.settings.limits.max_per_hour
        full = {one.run for one in requests if self.journal.num_recent(one.run, since_s=now_s - HOUR_S) >= limit}
        accepted = [one for one in requests if one.run not in full]
        suppressed = {
            one.alerts: f"{one.reason}: {limit} escalations of run {one.run} in the last hour"
            for one in requests
            if one.run in full
        }
        if requests:
            escalations = await asyncio.to_thread(self.journal.record, accepted, suppressed, now_s=now_s)
            self.counts.update({"suppressed": len(requests) - len(accepted), "accepted": len(accepted)})
            for reason in suppressed.values():
                _log.info("suppressed: %s", reason)
            for escalation in escalations:
                self.dispatcher.start(escalation)
        return ["suppressed" if one.run in full else "accepted" for one in requests]

    async def _repeat(self, work: Callable[[], Awaitable[None]], period_s: float) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await work()
            except Exception:  # noqa: BLE001 - the border: a fault in one round must not end the watching
                self.num_faults += 1
                _log.exception("a round of the controller failed")
            await asyncio.sleep(max(0.0, period_s - (time.monotonic() - began_s)))


def parse_order(body: Any) -> DumpRequest:
    """Parse the JSON with which a client orders a dump: `id`, and maybe `run`, `ranks`, `task`, `num_steps`, `reason`.

    Raises:
        ConfigError: A key is unknown, missing, of the wrong type or out of range.
    """
    require(isinstance(body, Mapping), "the body", body, "a JSON object")
    order = build(ManualOrder, body)
    plain = {"id": order.id, "action": "dump", "num_steps": order.num_steps, "task": order.task, "reason": order.reason}
    parse_command(plain, next_step=0)
    ranks = None if order.ranks is None else tuple(sorted(set(order.ranks)))
    require(ranks is None or (ranks and ranks[0] >= 0), "ranks", order.ranks, "at least one rank, or none for all")
    return DumpRequest(**{**dataclasses.asdict(order), "ranks": ranks}, alerts=())
