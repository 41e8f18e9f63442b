"""The common step of an escalation, and what the agents' answers mean. Pure functions: no clock, no network.

Nothing waits in training, so "the same step on all ranks" is a step that every rank has yet to reach when it hears of
it. An agent may have to be asked several times; in that time the fastest rank must not come as far as the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from trainermon.agent.controller.fleet import AgentHandle, living_ranks
from trainermon.agent.controller.journal import EscalationPlan
from trainermon.agent.orders.answers import OrderStatus
from trainermon.agent.orders.webhook import DumpRequest
from trainermon.core.values import TextEnum

SPARE_STEPS = 2  # the step a rank is on may end at once, and it reads orders when the next one begins

WRITTEN = frozenset({"written", "nonfinite", "clean"})
NO_REPORT = "no report"


class OrderReceipt(TextEnum):
    """What became of an order that the controller sent to an agent.

    `ordered`: its ranks were told. `suppressed`: its limits forbid it. `late`: its ranks are past the step. `refused`:
    the agent rejected it. `unreachable`: no answer.
    """

    ORDERED = "ordered"
    SUPPRESSED = "suppressed"
    LATE = "late"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"


@dataclasses.dataclass(frozen=True, slots=True)
class AgentAnswer:
    """One agent's answer to an order.

    Attributes:
        told: How it took the order.
        ranks: Ranks that were told to dump.
        late: Ranks that are past the step already.
        reason: Why nothing was ordered, in words.
    """

    told: OrderReceipt
    ranks: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrderMargin:
    """How long it may take until an agent has an order: that decides how far ahead a common step must be.

    Attributes:
        tries: How often a request is sent.
        timeout_s: Longest time for each, in seconds.
        round_s: How long it takes to speak to all agents once, in seconds.
    """

    tries: int
    timeout_s: float
    round_s: float = 0.0

    def steps(self, steps_per_s: float) -> int:
        """Return how many steps ahead of the fastest rank a common step must be; `steps_per_s` is that rank's pace.

        >>> OrderMargin(tries=3, timeout_s=0.5).steps(10.0)
        17
        """
        return math.ceil((self.tries * self.timeout_s + self.round_s) * steps_per_s) + SPARE_STEPS


def make_plan(
    request: DumpRequest, agents: Sequence[AgentHandle], issue: int, margin: OrderMargin, *, now_s: float
) -> EscalationPlan | None:
    """Choose the ranks and the common step for `request`; None while none of its ranks is known to live.

    Args:
        request: Which ranks are to dump.
        agents: Those of the newest attempt of its run.
        issue: 1, or more if an earlier plan came too late everywhere.
        margin: How far ahead the common step is.
        now_s: Monotonic time, by which the steps of agents that do not answer are extrapolated.
    """
    living = living_ranks(agents)
    chosen = tuple(sorted(living if request.ranks is None else living.keys() & request.ranks))
    if not chosen:
        return None
    reports = [agent.report for agent in agents if agent.report]
    pace = max(report.steps_per_s for report in reports)
    # Ranks of a job go in step: where an agent answers now, nobody is guessed at that has long been silent.
    asked = [found for found in living.values() if found[0].is_up] or list(living.values())
    newest = max(state.step + _steps_since(agent, pace, now_s) for agent, state in asked)
    return EscalationPlan(
        id=request.id if issue == 1 else f"{request.id}-{issue}",
        issue=issue,
        attempt=max(report.attempt for report in reports),
        first_step=max(0, newest) + margin.steps(pace),
        ranks=chosen,
    )


def read_answer(status: int, plain: Any) -> AgentAnswer:
    """Return what an agent's HTTP answer to an order means; `plain` is its parsed JSON."""
    if status in (200, 202) and isinstance(plain, Mapping):
        ranks, late = _ranks(plain.get("ranks")), _ranks(plain.get("late"))
        match plain.get("status"):
            case OrderStatus.ACCEPTED.value | OrderStatus.DUPLICATE.value:
                return AgentAnswer(OrderReceipt.ORDERED, ranks, late)
            case OrderStatus.SUPPRESSED.value:
                return AgentAnswer(OrderReceipt.SUPPRESSED, reason=str(plain.get("reason", ""))[:200])
            case OrderStatus.LATE.value:
                return AgentAnswer(OrderReceipt.LATE, (), late)
    detail = str(plain.get("detail", "") if isinstance(plain, Mapping) else plain)[:200]
    if status == 409:  # another attempt began, or the rank is gone: as good as late
        return AgentAnswer(OrderReceipt.LATE, reason=detail)
    if 400 <= status < 500:
        return AgentAnswer(OrderReceipt.REFUSED, reason=f"{status}: {detail}")
    return AgentAnswer(OrderReceipt.UNREACHABLE, reason=f"{status}: {detail}")


def assign(ranks: Sequence[int], agents: Sequence[AgentHandle]) -> dict[str, tuple[int, ...]]:
    """Group `ranks` by the agent that has them now: return its address with its share of them.

    Ranks that no agent has are left out. An agent that was restarted has another address, but still its ranks. Agents
    that answer come first, so that nobody who has the time waits for those that do not.
    """
    wanted = frozenset(ranks)
    assigned: dict[str, tuple[int, ...]] = {}
    for agent in sorted(agents, key=lambda agent: not agent.is_up):
        its_ranks = (state.rank for state in agent.report.ranks) if agent.report else ()
        of_agent = tuple(sorted(wanted.intersection(its_ranks)))
        if of_agent:
            assigned[agent.target.url] = of_agent
    return assigned


def coverage_of(
    plan: EscalationPlan, assigned: Mapping[str, Sequence[int]], answers: Mapping[str, AgentAnswer]
) -> dict[int, str]:
    """Return, for each rank of the plan, how its order was taken: the value of an `OrderReceipt`.

    `assigned` has the ranks, and `answers` the answer, of each agent, by its address. A rank of no agent is
    unreachable; one that its agent did not name among those it ordered is late.
    """
    coverage = dict.fromkeys(plan.ranks, OrderReceipt.UNREACHABLE.value)
    for url, ranks in assigned.items():
        answer = answers[url]
        for rank in ranks:
            is_late = rank in answer.late or (answer.told is OrderReceipt.ORDERED and rank not in answer.ranks)
            coverage[rank] = (OrderReceipt.LATE if is_late else answer.told).value
    return coverage


def reasons_of(answers: Iterable[AgentAnswer]) -> str:
    """Return the different reasons that agents gave, joined by semicolons; "" if none gave one."""
    return "; ".join(dict.fromkeys(answer.reason for answer in answers if answer.reason))


def outcome_of(statuses: Collection[str]) -> str:
    """Return how an escalation ended, from what became of each rank's dump.

    `done`: all were written. `partial`: some. `failed`: none. `suppressed`: limits kept all ranks from it.
    """
    if statuses and set(statuses) == {OrderReceipt.SUPPRESSED.value}:
        return "suppressed"
    num_written = sum(status in WRITTEN for status in statuses)
    return "done" if num_written and num_written == len(statuses) else "partial" if num_written else "failed"


def _steps_since(agent: AgentHandle, steps_per_s: float, now_s: float) -> int:
    return 0 if agent.is_up else math.ceil((now_s - agent.seen_s) * steps_per_s)


def _ranks(plain: Any) -> tuple[int, ...]:
    return tuple(rank for rank in plain if isinstance(rank, int)) if isinstance(plain, list) else ()
