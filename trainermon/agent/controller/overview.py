"""The job as a whole, for the page and its JSON: nodes, ranks, alerts, escalations.

It may be of ten thousand ranks and is asked for every two seconds by every page that is open: so it is made of plain
values at once, and an escalation of all ranks says so in a few words.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import trainermon
from trainermon.agent.controller.controller import Controller
from trainermon.agent.controller.fleet import AgentHandle
from trainermon.agent.controller.journal import EscalationRecord
from trainermon.agent.hang.evidence import spans
from trainermon.agent.hang.verdict import HangVerdict
from trainermon.agent.orders.answers import RankSummary
from trainermon.core.values import as_plain

MAX_SHOWN = 100
MAX_SPANS = 20


def render_job(controller: Controller) -> bytes:
    """Return, as JSON, every agent with its ranks and alerts, and the newest escalations; the page shows it.

    Cost: 4 µs for each rank.
    """
    now_s = time.monotonic()
    agents = controller.fleet.agents.values()
    plain = {
        "version": trainermon.__version__,
        "ready": controller.fleet.is_known.is_set(),
        "runs": controller.fleet.runs,
        "standstills": {run: _describe_hang(hang) for run, hang in controller.standstill.verdicts.items()},
        "divergences": {
            run: [{"text": each.text, "step": each.step, "ranks": each.ranks} for each in found.values()]
            for run, found in controller.replicas.findings.items()
        },
        "broken_laws": {
            run: [{"text": each.text, "step": each.step, "ranks": each.ranks} for each in found]
            for run, found in controller.laws.findings.items()
        },
        "agents": [_describe_agent(agent, now_s) for agent in agents],
        "escalations": [_in_short(escalation) for escalation in _newest(controller)],
    }
    return json.dumps(plain, allow_nan=False, separators=(",", ":")).encode()


def describe_escalations(controller: Controller) -> list[dict[str, Any]]:
    """Return the newest escalations as mappings ready for JSON, newest first."""
    return [_describe_escalation(escalation) for escalation in _newest(controller)]


def _newest(controller: Controller) -> Iterable[EscalationRecord]:
    return reversed(list(controller.journal.escalations.values())[-MAX_SHOWN:])


def _describe_agent(agent: AgentHandle, now_s: float) -> dict[str, Any]:
    plain: dict[str, Any] = {"url": agent.target.url, "up": agent.is_up, "problem": agent.problem}
    report = agent.report
    if report is None:
        return plain
    return plain | {
        "age_s": round(now_s - agent.seen_s, 3),
        "run_id": report.run_id,
        "attempt": report.attempt,
        "host": report.host,
        "world_size": report.world_size,
        "step": report.step,
        "steps_per_s": as_plain(report.steps_per_s),
        "ranks": [_describe_rank(state) for state in report.ranks],
        "alerts": [as_plain(alert) for alert in report.alerts],
        "silenced": [as_plain(alert) for alert in report.silenced],
    }


def _describe_rank(state: RankSummary) -> dict[str, Any]:
    return {
        "rank": state.rank,
        "alive": state.alive,
        "step": state.step,
        "phase": state.phase,
        "lag_s": as_plain(state.lag_s),
        "place": state.place,
    }


def _describe_hang(hang: HangVerdict) -> dict[str, Any]:
    return {
        "kind": hang.kind.value,
        "text": hang.text,
        "culprits": [culprit.rank for culprit in hang.culprits],
        "waiting": hang.waiting,
    }


def _in_short(escalation: EscalationRecord) -> dict[str, Any]:
    """Describe an escalation with its ranks as text; `coverage` has, by status, which ranks."""
    by_status: dict[str, list[int]] = {}
    for rank, status in escalation.coverage.items():
        by_status.setdefault(status, []).append(rank)
    ranks = escalation.request.ranks
    return _describe_escalation(escalation) | {
        "ranks": None if ranks is None else spans(ranks, most=MAX_SPANS),
        "coverage": {status: spans(of_status, most=MAX_SPANS) for status, of_status in by_status.items()},
    }


def _describe_escalation(escalation: EscalationRecord) -> dict[str, Any]:
    request, plan = escalation.request, escalation.plan
    return {
        "id": request.id,
        "run": request.run,
        "ranks": request.ranks,
        "task": request.task,
        "num_steps": request.num_steps,
        "reason": request.reason,
        "accepted_s": escalation.accepted_s,
        "command": plan.id if plan else None,
        "attempt": plan.attempt if plan else None,
        "first_step": plan.first_step if plan else None,
        "outcome": escalation.outcome,
        "detail": escalation.detail,
        "coverage": {str(rank): status for rank, status in sorted(escalation.coverage.items())},
    }
