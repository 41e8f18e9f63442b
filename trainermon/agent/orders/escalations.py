"""Dumps on this node's ranks that somebody else decided on: a controller, or in a one-node job Alertmanager itself.

They stand under the same quota and rate limit as those of the agent's own rules. An escalation is known by its id and
carried out once, however often it comes.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trainermon.agent.assembly import AgentParts
from trainermon.agent.orders.answers import AgentReport, FiringAlert, OrderAnswer, OrderStatus, RankSummary
from trainermon.agent.orders.commands import ConflictError, parse_command, require_possible
from trainermon.agent.orders.webhook import DumpRequest, EscalationOrder, make_requests, parse_notification
from trainermon.agent.watch import RankState
from trainermon.alerts.escalation import EscalationDecision
from trainermon.core.errors import ConfigError
from trainermon.core.strict import build
from trainermon.core.values import Action, Alert, Command

REACH_S = 0.5
MAX_ALERTS = 50
PLACES = ("dp", "tp", "pp", "cp", "ep")


class NodeEscalations:
    """Carries out, on an agent's ranks, the dumps that a controller or Alertmanager asks for.

    Reports what is needed to plan them.
    """

    def __init__(self, parts: AgentParts) -> None:
        self._run_id = parts.settings.run_id
        self._alerts = parts.alerting.book
        self._handling = parts.alerting.handling
        self._commands = parts.orders.commands
        self._escalator = parts.alerting.escalator
        self._pipeline = parts.pipeline
        self._reports = parts.orders.dump_reports
        self._watch = parts.watch
        self._history = parts.views.history

    def rank_states(self) -> AgentReport:
        """Return the agent's report for the controller: ranks, their pace, firing alerts, what became of dumps."""
        now_s, latest = time.monotonic(), self._history.latest
        heard, silenced = self._firing
        return AgentReport(
            run_id=self._run_id,
            host=socket.gethostname(),
            attempt=self._attempt,
            world_size=max((header.coordinates.world_size for header in self._pipeline.headers.values()), default=0),
            step=latest.step if latest else None,
            steps_per_s=round(self._watch.steps_per_s, 6),
            ranks=tuple(self._summary(state, now_s) for state in self._watch.states),
            alerts=heard,
            silenced=silenced,
            dumps=self._reports.by_command,
        )

    @property
    def _firing(self) -> tuple[tuple[FiringAlert, ...], tuple[FiringAlert, ...]]:
        """The newest alerts that fire: those that are not silenced, and those that are."""
        firing = self._alerts.firing
        muted = self._handling.muted(firing, time.time())
        heard = [alert for alert in firing if alert.id not in muted]
        silenced = [alert for alert in firing if alert.id in muted]
        return tuple(map(_in_short, heard[-MAX_ALERTS:])), tuple(map(_in_short, silenced[-MAX_ALERTS:]))

    def escalate(self, body: Any) -> OrderAnswer:
        """Order the dump that a controller's JSON describes; return how it was taken, and the ranks concerned.

        Raises:
            ConfigError: The body is wrong.
            ConflictError: It is for another run or attempt, or none of its ranks lives here.
            OSError: It cannot be written down; nothing was ordered.
        """
        if not isinstance(body, Mapping):
            raise ConfigError("the body: expected a JSON object")
        order = build(EscalationOrder, body)
        if order.run != self._run_id:
            raise ConflictError(f"run: found {order.run!r}, this is the agent of {self._run_id!r}")
        command = _checked_command(order)
        decision = self._escalator.decision(order.id)
        if decision is None:
            if order.attempt != self._attempt:
                raise ConflictError(f"attempt: found {order.attempt}, the run is in attempt {self._attempt}")
            ranks = self._living(order.ranks)
            in_time, late = self._in_time(ranks, order.first_step)
            if not in_time:
                return OrderAnswer(status=OrderStatus.LATE, ranks=(), late=tuple(late))
            require_possible(command, in_time, self._watch.steps)
            decision = self._admit([order.id], order.id, in_time, first_step=order.first_step)
        return self._submit(command, decision, asked=order.ranks)

    def take_alerts(self, body: Any) -> OrderAnswer:
        """Carry out what a notification of Alertmanager asks for on local ranks; return how it was taken.

        Raises:
            ConfigError: The body is no notification of version 4.
            OSError: It cannot be written down; nothing was ordered.
        """
        notification = parse_notification(body, now_s=time.time())
        reasons = list(notification.ignored)
        fired = [alert for alert in notification.alerts if alert.run in ("", self._run_id)]
        reasons += [f"{alert.rule}: it is of run {alert.run!r}" for alert in notification.alerts if alert not in fired]
        new = [dataclasses.replace(alert, run=self._run_id) for alert in fired if self._is_new(alert.key)]
        answers = [self._follow(request) for request in make_requests(new, truncated=notification.truncated)]
        if answers:
            return dataclasses.replace(answers[0], ignored=tuple(reasons))
        status = OrderStatus.DUPLICATE if fired else OrderStatus.IGNORED
        return OrderAnswer(status=status, ignored=tuple(reasons))

    @property
    def _attempt(self) -> int:
        return max((header.attempt for header in self._pipeline.headers.values()), default=0)

    def _summary(self, state: RankState, now_s: float) -> RankSummary:
        return RankSummary(
            rank=state.rank,
            alive=state.alive,
            step=state.step,
            phase=state.phase.name.lower(),
            lag_s=round(now_s - state.changed_s, 3),
            place=self._place(state.rank),
        )

    def _place(self, rank: int) -> dict[str, int]:
        """Return the rank's place on each axis that the job has."""
        header = self._pipeline.headers.get(rank)
        if header is None:
            return {}
        found = header.coordinates
        return {axis: getattr(found, axis) for axis in PLACES if getattr(found, f"{axis}_size") > 1}

    def _is_new(self, key: str) -> bool:
        """Whether an alert still has to be followed: also if an agent was killed between its decision and the order."""
        decision = self._escalator.decision(key)
        return decision is None or (bool(decision.ranks) and self._commands.first_step(decision.command) is None)

    def _follow(self, request: DumpRequest) -> OrderAnswer:
        decision = self._escalator.decision(request.alerts[0])
        if decision is None:
            steps = self._watch.steps
            margin = self._watch.margin(REACH_S, at_least=2)
            first_step = max(steps.values(), default=0) + margin
            try:
                ranks = self._living(request.ranks)
            except ConflictError as error:
                return OrderAnswer(status=OrderStatus.SUPPRESSED, reason=str(error))
            decision = self._admit(request.alerts, request.id, ranks, first_step=first_step)
        order = EscalationOrder(
            id=decision.command,
            run=self._run_id,
            attempt=self._attempt,
            first_step=max(0, decision.first_step),
            num_steps=request.num_steps,
            task=request.task,
            reason=request.reason,
        )
        return self._submit(_checked_command(order), decision, asked=None)

    def _living(self, ranks: Sequence[int] | None) -> list[int]:
        living = self._watch.steps
        wanted = None if ranks is None else set(ranks)
        chosen = [rank for rank in living if wanted is None or rank in wanted]
        if not chosen:
            asked = "no rank" if ranks is None else f"none of the ranks {sorted(ranks)[:20]}"
            raise ConflictError(f"{asked} lives on this node; living are {sorted(living)[:20]}")
        return chosen

    def _in_time(self, ranks: Sequence[int], first_step: int) -> tuple[list[int], list[int]]:
        steps = self._watch.steps
        in_time = [rank for rank in ranks if steps[rank] <= first_step]
        return in_time, [rank for rank in ranks if rank not in in_time]

    def _admit(
        self, alerts: Sequence[str], command: str, ranks: Sequence[int], *, first_step: int
    ) -> EscalationDecision:
        return self._escalator.admit(alerts, command, ranks, first_step=first_step, now_s=time.time())

    def _submit(self, command: Command, decision: EscalationDecision, *, asked: Sequence[int] | None) -> OrderAnswer:
        if not decision.ranks:
            return OrderAnswer(status=OrderStatus.SUPPRESSED, reason=decision.reason)
        known = self._commands.first_step(decision.command) is not None
        if not known:
            bounded = dataclasses.replace(command, first_step=decision.first_step, max_bytes=decision.bytes_per_rank)
            self._commands.submit(bounded, decision.ranks, attempt=self._attempt, steps=self._watch.steps)
        late = sorted(set(asked or ()) & set(self._watch.steps) - set(decision.ranks))
        return OrderAnswer(
            status=OrderStatus.DUPLICATE if known else OrderStatus.ACCEPTED,
            id=decision.command,
            ranks=tuple(decision.ranks),
            late=tuple(late),
            first_step=decision.first_step,
        )


def _in_short(alert: Alert) -> FiringAlert:
    return FiringAlert(
        id=alert.id,
        rule=alert.rule,
        severity=alert.severity.value,
        rank=alert.rank,
        step=alert.first_step,
        message=alert.message,
    )


def _checked_command(order: EscalationOrder) -> Command:
    return parse_command(
        {
            "id": order.id,
            "action": Action.DUMP.value,
            "first_step": order.first_step,
            "num_steps": order.num_steps,
            "task": order.task,
            "reason": order.reason,
        },
        next_step=0,
    )
