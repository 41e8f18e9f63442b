"""Which alerts fired in a run whose values are finite: the gravest is its diagnosis, the others stand beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from trainermon.alerts.log import AlertLog
from trainermon.analysis.diagnosis.findings import Diagnosis, DiagnosisVerdict
from trainermon.analysis.diagnosis.wording import rank_list
from trainermon.core.catalogue import STEP_TIME_SERIES, TOKENS_PER_SECOND_SERIES
from trainermon.core.values import Alert, AlertCondition, AlertState, Kind, Severity

_GRAVITY = {Severity.FATAL: 0, Severity.CRITICAL: 1, Severity.WARNING: 2, Severity.INFO: 3}
# Of these a warning tells that the run is slow, or badly watched: not that it computes something wrong.
_OF_SPEED = (AlertCondition.STRAGGLER, AlertCondition.REPORTED)
_SPEEDS = (STEP_TIME_SERIES, TOKENS_PER_SECOND_SERIES)


def with_alerts(run_dir: Path, finite: Diagnosis, attempt: int) -> Diagnosis:
    """Return the diagnosis of the gravest alert of the attempt, whether it still fires or not; `finite` without one.

    A warning that the run is slow is no diagnosis. Either way it has a text for each rule that still fires:
    `straggler (rank 1, since step 131)`. Reads the alert logs of all nodes.
    """
    logs = [AlertLog(log) for log in sorted(run_dir.glob("nodes/*/alerts.jsonl"))]
    still = [alert for log in logs for alert in log.open_alerts() if _has_fired(alert, attempt)]
    finite = dataclasses.replace(finite, firing=_texts(still))
    fired = [alert for log in logs for alert in log.read() if _has_fired(alert, attempt) and _has_weight(alert)]
    if not fired:
        return finite
    gravest = min(fired, key=lambda alert: (_GRAVITY[alert.severity], alert.first_step, alert.rule, alert.rank))
    same = [alert for alert in fired if (alert.rule, alert.first_step) == (gravest.rule, gravest.first_step)]
    ranks = sorted({alert.rank for alert in same})
    is_over = all(alert.rule != gravest.rule for alert in still)
    return dataclasses.replace(
        finite,
        verdict=DiagnosisVerdict.ALERTED,
        headline=f"The alert {gravest.rule} fired on {rank_list(ranks)} from step {gravest.first_step} on",
        reason=f"{gravest.message}{' (no longer so at the end)' if is_over else ''}. {finite.headline}",
        step=gravest.first_step,
        rank=ranks[0] if len(ranks) == 1 else None,
    )


def _has_fired(alert: Alert, attempt: int) -> bool:
    return alert.state is AlertState.FIRING and alert.attempt == attempt


def _has_weight(alert: Alert) -> bool:
    if alert.severity is not Severity.WARNING:
        return alert.severity is not Severity.INFO
    names = [finding.series for finding in alert.findings]
    is_of_time = any(series.kind is Kind.COMM or series.name in _SPEEDS for series in names)
    return alert.condition not in _OF_SPEED and not is_of_time and not alert.rule.startswith("accelerator-")


def _texts(still: Iterable[Alert]) -> tuple[str, ...]:
    rules: dict[str, list[Alert]] = {}
    for alert in still:
        rules.setdefault(alert.rule, []).append(alert)
    since = {rule: min(alert.first_step for alert in alerts) for rule, alerts in rules.items()}
    return tuple(
        f"{rule} ({rank_list(sorted({alert.rank for alert in rules[rule]}))}, since step {since[rule]})"
        for rule in sorted(rules, key=lambda rule: (since[rule], rule))
    )
