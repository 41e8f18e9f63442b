"""Alerts whose condition only the agent can see: a rank that hangs or is lost, a monitor that does not work.

The agent says `AgentStatement(rule="rank-hung", rank=3, …)` as often as it likes; what is new becomes an alert with the
severity, the words and the consequences of the rule of that name. Nothing has to hold for some time here: whoever makes
the statement has waited already.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from trainermon.alerts.conditions.criteria import Reported
from trainermon.alerts.rules import AlertRule
from trainermon.alerts.state import alert_id
from trainermon.alerts.wording import filled_in
from trainermon.core.values import Alert, AlertCondition, AlertState, Finding, Kind, SeriesKey

BLIND_RULE = "monitor-blind"
"""The rule on ranks of whose steps nothing is collected."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatement:
    """What the agent says about a rank, or about itself, for a `reported` rule such as `hang` or `monitor-lag`.

    Attributes:
        rule: Name of the rule.
        holds: Whether its condition holds, or is over.
        rank: The rank it is about; the first one of the node if it is about the agent.
        attempt: The rank's start of the job.
        step: The last step that was seen of it.
        time_s: Unix time.
        first_step: On which step it began, if that is known to be earlier.
        detail: What the rule's summary calls `{detail}`.
        value: A number that says how bad; NaN: there is none.
        usual: What that is compared with; NaN likewise.
        series: The series concerned, if it is about some; the first one is the worst.
        num_series: How many there are, where not all are listed.
    """

    rule: str
    holds: bool
    rank: int
    attempt: int
    step: int
    time_s: float
    first_step: int | None = None
    detail: str = ""
    value: float = math.nan
    usual: float = math.nan
    series: Sequence[SeriesKey] = ()
    num_series: int = 0


class ReportedAlerts:
    """Keeps the firing alerts of `reported` rules, which begin and end by statements of the agent.

    Args:
        rules: Of any kind; those that are not `reported` are passed over.
    """

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self._rules: Mapping[str, AlertRule] = {rule.name: rule for rule in rules if isinstance(rule.when, Reported)}
        self._on: dict[tuple[str, int], Alert] = {}

    @property
    def firing(self) -> list[Alert]:
        """The alerts that fire now, ordered by rank."""
        return sorted(self._on.values(), key=lambda alert: (alert.rank, alert.rule))

    def knows(self, rule: str) -> bool:
        """Return whether there is a `reported` rule of this name."""
        return rule in self._rules

    def observe(self, statement: AgentStatement) -> list[Alert]:
        """Return the alert that begins or ends by this statement; nothing if it says what is known, or has no rule."""
        rule = self._rules.get(statement.rule)
        place = (statement.rule, statement.rank)
        known = self._on.get(place)
        if rule is None or statement.holds is (known is not None):
            return []
        if known is None:
            self._on[place] = begun = _alert(rule, statement)
            return [begun]
        del self._on[place]
        return [_ended(known, step=statement.step, time_s=statement.time_s, why=statement.detail)]

    def adopt(self, alert: Alert) -> None:
        """Register an alert of a `reported` rule, or its end, that another part of the agent has made."""
        if alert.state is AlertState.FIRING:
            self._on[alert.rule, alert.rank] = alert
        else:
            self._on.pop((alert.rule, alert.rank), None)

    def begin_attempt(self, rank: int, attempt: int, time_s: float) -> list[Alert]:
        """End the alerts of this rank's earlier attempts, and return them: another process runs there now."""
        over = [place for place, alert in self._on.items() if place[1] == rank and alert.attempt < attempt]
        ended = [self._on.pop(place) for place in over]
        return [_ended(alert, step=alert.step, time_s=time_s, why=f"attempt {attempt} began") for alert in ended]


def _alert(rule: AlertRule, statement: AgentStatement) -> Alert:
    fields = {
        "rank": statement.rank,
        "step": statement.step,
        "value": f"{statement.value:.4g}",
        "usual": f"{statement.usual:.4g}",
        "detail": statement.detail,
    }
    first_step = statement.step if statement.first_step is None else statement.first_step
    findings = (Finding(series=key, value=statement.value, baseline=statement.usual) for key in statement.series)
    return Alert(
        id=alert_id(rule.name, rank=statement.rank, attempt=statement.attempt, first_step=first_step),
        rule=rule.name,
        severity=rule.severity,
        state=AlertState.FIRING,
        attempt=statement.attempt,
        rank=statement.rank,
        step=statement.step,
        first_step=first_step,
        time_s=statement.time_s,
        kind=statement.series[0].kind if statement.series else Kind.STEP,
        value=statement.value,
        baseline=statement.usual,
        num_series=max(statement.num_series, len(statement.series)),
        findings=tuple(findings),
        message=f"{rule.name}: {filled_in(rule.summary, fields)}",
        condition=AlertCondition.REPORTED,
    )


def _ended(alert: Alert, *, step: int, time_s: float, why: str) -> Alert:
    reason = f"; {why}" if why else ""
    message = f"{alert.rule}: over at step {step} on rank {alert.rank}, began at step {alert.first_step}{reason}"
    return dataclasses.replace(
        alert, state=AlertState.RESOLVED, step=max(step, alert.step), time_s=time_s, message=message
    )
