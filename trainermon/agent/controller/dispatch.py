"""Brings each accepted escalation to the agents, and follows it until the ranks have said what became of it.

                 ┌──── no rank is known ◀─┐
    accepted ──▶ planned ──▶ told ──▶ ordered ──▶ every rank has reported ──▶ done, partial
                 ▲   (on disk)  │                 └── all were late ──┐
                 └── all were too late, so it is issued anew ◀────────┴──▶ failed

An agent knows an escalation by the id of its plan and takes it once. A plan is made anew only when every agent has said
that nothing was or will be dumped for it; while one of them has given no answer, the same plan is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from trainermon.agent.controller.client import FAULTS, AgentClient, describe
from trainermon.agent.controller.fleet import AgentFleet
from trainermon.agent.controller.journal import EscalationJournal, EscalationPlan, EscalationRecord
from trainermon.agent.controller.planning import (
    NO_REPORT,
    AgentAnswer,
    OrderMargin,
    OrderReceipt,
    assign,
    coverage_of,
    make_plan,
    outcome_of,
    read_answer,
    reasons_of,
)
from trainermon.agent.controller.settings import ControllerSettings
from trainermon.agent.orders.webhook import EscalationOrder
from trainermon.core.values import as_plain

ORDER_PATH = "api/v1/escalations"
MAX_ISSUES = 3
REPORT_LIMIT_S = 600.0
"""A rank that has not said so long after the order what became of it is not waited for any longer."""

_log = logging.getLogger(__name__)


class EscalationDispatcher:
    """Carries out escalations (dumps on a common step), each in a task: plan, tell the agents, wait for the dumps.

    Args:
        settings: Limits, and how agents are spoken to.
        fleet: The agents.
        client: Sends requests to them.
        journal: Where plans and outcomes are kept; only used under `lock`.
        lock: Held around every use of the journal that writes.

    Attributes:
        num_failed: Escalations after which no rank has written a dump.
        num_faults: Faults that were survived.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        *,
        fleet: AgentFleet,
        client: AgentClient,
        journal: EscalationJournal,
        lock: asyncio.Lock,
    ) -> None:
        self.num_failed = self.num_faults = 0
        self._settings = settings
        self._fleet = fleet
        self._client = client
        self._journal = journal
        self._lock = lock
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, escalation: EscalationRecord) -> None:
        """Start a task that carries out `escalation`, from the state in which the journal has it."""
        task = asyncio.get_running_loop().create_task(self._carry_out(escalation))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop all tasks; open escalations stay open on disk."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.num_faults += 1
            _log.error("an escalation is left open by a fault", exc_info=task.exception())

    async def _carry_out(self, escalation: EscalationRecord) -> None:
        await self._fleet.is_known.wait()
        deadline_s = time.monotonic() + self._settings.limits.give_up_s
        while escalation.outcome is None:
            plan = escalation.plan or await self._plan(escalation, issue=1, deadline_s=deadline_s)
            if plan is None:
                await self._finish(escalation, f"no rank of run {escalation.request.run!r} was found to live")
                return
            reasons = await self._tell(escalation, plan)
            told = set(escalation.coverage.values())
            if OrderReceipt.ORDERED.value in told:
                await self._await_reports(escalation, plan)
            elif OrderReceipt.UNREACHABLE.value in told and time.monotonic() < deadline_s:
                await asyncio.sleep(self._settings.agents.poll_s)  # whoever does not answer may have taken the order
                continue
            await self._conclude(escalation, plan, reasons, deadline_s=deadline_s)

    async def _plan(self, escalation: EscalationRecord, *, issue: int, deadline_s: float) -> EscalationPlan | None:
        """Return a new plan, on disk, or None if no rank could be found in time."""
        agents = self._settings.agents
        run = escalation.request.run
        while True:
            began_s = time.monotonic()
            await self._fleet.poll(run)
            round_s = time.monotonic() - began_s
            margin = OrderMargin(tries=agents.tries, timeout_s=agents.timeout_s, round_s=round_s)
            plan = make_plan(escalation.request, self._fleet.of_run(run), issue, margin, now_s=time.monotonic())
            if plan is not None:
                await self._write(partial(self._journal.plan, escalation, plan))
                return plan
            if time.monotonic() > deadline_s:
                return None
            await asyncio.sleep(agents.poll_s)

    async def _tell(self, escalation: EscalationRecord, plan: EscalationPlan) -> str:
        """Order the plan from all agents at once; afterwards the coverage says how they took it. Returns reasons."""
        assigned = assign(plan.ranks, self._fleet.of_run(escalation.request.run))
        orders = (self._order(escalation, plan, url, ranks) for url, ranks in assigned.items())
        answers = dict(zip(assigned, await asyncio.gather(*orders), strict=True))
        escalation.coverage = coverage_of(plan, assigned, answers)
        return reasons_of(answers.values())

    async def _order(
        self, escalation: EscalationRecord, plan: EscalationPlan, url: str, ranks: Sequence[int]
    ) -> AgentAnswer:
        request = escalation.request
        order = EscalationOrder(
            id=plan.id,
            run=request.run,
            attempt=plan.attempt,
            first_step=plan.first_step,
            num_steps=request.num_steps,
            task=request.task,
            ranks=tuple(ranks),
            reason=request.reason,
        )
        answer = AgentAnswer(OrderReceipt.UNREACHABLE, reason=f"{url} is gone")
        for _ in range(self._settings.agents.tries):
            agent = self._fleet.agents.get(url)
            if agent is None:
                break
            try:
                answer = read_answer(*await self._client.post(agent.target, ORDER_PATH, as_plain(order)))
            except FAULTS as error:
                answer = AgentAnswer(OrderReceipt.UNREACHABLE, reason=f"{url}: {describe(error)}")
            if answer.told is not OrderReceipt.UNREACHABLE:
                break
        return answer

    async def _await_reports(self, escalation: EscalationRecord, plan: EscalationPlan) -> None:
        """Wait until every rank that was told has reported, or can no more."""
        deadline_s = time.monotonic() + REPORT_LIMIT_S
        planned = frozenset(plan.ranks)
        while True:
            agents = self._fleet.of_run(escalation.request.run)
            reports = [agent.report for agent in agents if agent.report]
            for report in reports:
                escalation.coverage |= {r: s for r, s in report.dumps.get(plan.id, {}).items() if r in planned}
            waiting = [rank for rank, status in escalation.coverage.items() if status == OrderReceipt.ORDERED.value]
            living = {rank for report in reports if report.attempt == plan.attempt for rank in report.living_ranks}
            if not living.intersection(waiting) or time.monotonic() > deadline_s:
                escalation.coverage |= dict.fromkeys(waiting, NO_REPORT)
                return
            await asyncio.sleep(self._settings.agents.poll_s)

    async def _conclude(
        self, escalation: EscalationRecord, plan: EscalationPlan, reasons: str, *, deadline_s: float
    ) -> None:
        """Close the escalation, or issue it anew if it came too late for every rank."""
        if set(escalation.coverage.values()) == {OrderReceipt.LATE.value} and plan.issue < MAX_ISSUES:
            _log.warning("%s came too late for every rank; it is issued anew", plan.id)
            if await self._plan(escalation, issue=plan.issue + 1, deadline_s=deadline_s) is not None:
                return
        await self._finish(escalation, reasons)

    async def _finish(self, escalation: EscalationRecord, detail: str) -> None:
        outcome = outcome_of(escalation.coverage.values())
        await self._write(partial(self._journal.record_end, escalation, outcome, detail))
        self.num_failed += outcome == "failed"
        _log.info("escalation %s: %s %s", escalation.request.id, outcome, detail)

    async def _write(self, write: Callable[[], None]) -> None:
        """Write to the journal in a thread; a disk that is full is waited for."""
        while not await self._is_written(write):
            await asyncio.sleep(self._settings.agents.poll_s)

    async def _is_written(self, write: Callable[[], None]) -> bool:
        try:
            async with self._lock:
                await asyncio.to_thread(write)
        except OSError as error:
            _log.error("the journal of escalations cannot be written: %s", error)
            return False
        return True
