"""The job as a whole, for the page and its JSON: nodes, ranks, alerts, escalations."""

from __future__ import annotations

import time
from typing import Any

import trainermon
from trainermon.agent.controller.controller import Controller
from trainermon.agent.controller.fleet import AgentHandle
from trainermon.agent.controller.journal import EscalationRecord
from trainermon.agent.hang.verdict import HangVerdict
from trainermon.core.values import as_plain

MAX_SHOWN = 100


def describe_job(controller: Controller) -> dict[str, Any]:
    """Return, ready for JSON, every agent with its ranks and alerts, and the newest escalations.

    The controller's page shows it.
    """
    now_s = time.monotonic()
    agents = controller.fleet.agents.values()
    return {
        "version": trainermon.__version__,
        "ready": controller.fleet.is_known.is_set(),
        "runs": controller.fleet.runs,
        "standstills": {run: _describe_hang(hang) for run, hang in controller.standstill.verdicts.items()},
        "divergences": {
            run: [{"text": each.text, "step": each.step, "ranks": each.ranks} for each in found.values()]
            for run, found in controller.replicas.findings.items()
        },
        "agents": [_describe_agent(agent, now_s) for agent in agents],
        "escalations": describe_escalations(controller),
    }


def describe_escalations(controller: Controller) -> list[dict[str, Any]]:
    """Return the newest escalations as mappings ready for JSON, newest first."""
    newest = list(controller.journal.escalations.values())[-MAX_SHOWN:]
    return [_describe_escalation(escalation) for escalation in reversed(newest)]


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
        "steps_per_s": report.steps_per_s,
        "ranks": [as_plain(state) for state in report.ranks],
        "alerts": [as_plain(alert) for alert in report.alerts],
    }


def _describe_hang(hang: HangVerdict) -> dict[str, Any]:
    return {
        "kind": hang.kind.value,
        "text": hang.text,
        "culprits": [culprit.rank for culprit in hang.culprits],
        "waiting": hang.waiting,
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
