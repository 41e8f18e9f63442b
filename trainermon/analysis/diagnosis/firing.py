"""Which alerts fired in a run: the gravest is the diagnosis of finite values, a broken law that of what came of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from trainermon.alerts.conditions.criteria import BreaksLaw
from trainermon.alerts.laws.law import Law, StepPhase
from trainermon.alerts.laws.registry import LAWS, law_of
from trainermon.alerts.log import AlertLog
from trainermon.alerts.reported import BLIND_RULE
from trainermon.alerts.rules import load_rules
from trainermon.analysis.diagnosis.findings import Diagnosis, DiagnosisVerdict, FaultPhase, Symptom
from trainermon.analysis.diagnosis.origin import INPUT, OPTIMIZER
from trainermon.analysis.diagnosis.rows.order import module_of
from trainermon.analysis.diagnosis.wording import rank_list
from trainermon.core.catalogue import (
    BACKWARDS_MISSING_SERIES,
    EVAL_MODE_SERIES,
    LEARNING_RATE_SERIES,
    STEP_TIME_SERIES,
    TOKENS_PER_SECOND_SERIES,
)
from trainermon.core.errors import RuleError
from trainermon.core.values import Alert, AlertCondition, AlertDirection, AlertState, Kind, SeriesKey, Severity

_GRAVITY = {Severity.FATAL: 0, Severity.CRITICAL: 1, Severity.WARNING: 2, Severity.INFO: 3}
# Of these a warning tells that the run is slow, or badly watched: not that it computes something wrong.
_OF_SPEED = (AlertCondition.STRAGGLER, AlertCondition.REPORTED)
_SPEEDS = (STEP_TIME_SERIES, TOKENS_PER_SECOND_SERIES)
# What the script itself sets: no value of the model changes it.
_SET_BY_SCRIPT = (LEARNING_RATE_SERIES, EVAL_MODE_SERIES, BACKWARDS_MISSING_SERIES)
_SOON = 10  # steps within which what the script set is taken for the cause of what went wrong
_MAX_OTHERS = 5
_PHASES = get_args(StepPhase)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _RunAlerts:
    """The alerts of an attempt: all that tell of what is computed, and all of those that are on at the end.

    `mild` are the warnings that the run is slow, or badly watched, over or not. `before` are those of earlier attempts
    that tell of what is computed; what ended one, as a dead rank, is over. `notes` are of what may be meant. `gaps` are
    those on ranks of whose steps nothing was collected; one that is not over is among `fired`, too.
    """

    fired: Sequence[Alert]
    mild: Sequence[Alert]
    still: Sequence[Alert]
    before: Sequence[Alert]
    notes: Sequence[Alert]
    gaps: Sequence[Alert]


def with_alerts(run_dir: Path, found: Diagnosis) -> Diagnosis:
    """Return what the alerts of the attempt make of a diagnosis of finite values. Reads the alert logs of all nodes.

    Where nothing was wrong, the gravest alert is the diagnosis, whether it still fires or not; of those that are as
    grave, a broken law. A rate that jumped comes before what laws of the optimizer find then. Where no alert fired in
    the attempt, it is the gravest of those before it. A warning that the run is slow is only named in the headline. A
    text says which rules still fire: `straggler (rank 1, since step 131)`.
    What did go wrong followed from the law that was broken until then, or from rates in which ranks differed: a
    reduction that loses what it carried makes copies part, and a norm of zero makes a ratio NaN. The headline also
    names what the script had set: a rate that jumped, a model in eval mode.
    Settings that were switched off, and steps of which nothing was collected, are named with the evidence; the latter
    in the headline, too, while they go on.
    """
    if found.attempt is None:
        return found
    alerts = _alerts_of(run_dir, found.attempt)
    noted = (f"noted: {alert.message}" for alert in alerts.notes)
    found = dataclasses.replace(found, evidence=(*found.evidence, *noted, *(alert.message for alert in alerts.gaps)))
    return (_gravest if found.verdict is DiagnosisVerdict.FINITE else _broken_first)(run_dir, found, alerts)


def _gravest(run_dir: Path, finite: Diagnosis, alerts: _RunAlerts) -> Diagnosis:
    evidence = (*finite.evidence, *_of_the_start(run_dir))
    finite = dataclasses.replace(finite, firing=_texts(alerts.still), evidence=evidence)
    if alerts.fired:
        return _told(finite, _foremost(alerts.fired), alerts, finite.headline)
    return _of_earlier(finite, alerts) if alerts.before else _with_mild(finite, alerts)


def _with_mild(finite: Diagnosis, alerts: _RunAlerts) -> Diagnosis:
    """Return `finite` with a warning that says nothing against its values in the headline; one that is on is first."""
    on = {alert.rule for alert in alerts.still}
    worst = min(alerts.mild, key=lambda alert: (alert.rule not in on, _order(alert)), default=None)
    if worst is None:
        return finite
    over = "" if worst.rule in on else ", and no longer at the end"
    return dataclasses.replace(
        finite,
        headline=f"{_headline(worst, _ranks_of(worst, alerts.mild))}{over}; {_lower(finite.headline)}",
        reason=f"{worst.message}. {finite.reason}",
    )


def _of_earlier(finite: Diagnosis, alerts: _RunAlerts) -> Diagnosis:
    """Return what went wrong before the last restart, where nothing did since; of the gravest alert alone."""
    worst = _foremost(alerts.before)
    alone = dataclasses.replace(alerts, fired=[one for one in alerts.before if one.attempt == worst.attempt])
    told = _told(finite, worst, alone, f"Since the restart, in attempt {finite.attempt}: {finite.headline}")
    return dataclasses.replace(told, attempt=worst.attempt, headline=f"Before the restart: {told.headline}")


def _broken_first(run_dir: Path, found: Diagnosis, alerts: _RunAlerts) -> Diagnosis:
    earlier = [alert for alert in alerts.fired if _is_upstream(alert) and found.step is not None]
    earlier = [alert for alert in earlier if alert.first_step <= (found.step or 0)]
    if not earlier:
        return found
    near = [alert for alert in earlier if not _is_set_by_script(alert) or _is_soon(found, alert)]
    cause = _foremost(near or earlier)
    if _is_set_by_script(cause):
        return _after_setting(found, cause, alerts)
    start = Diagnosis(
        verdict=found.verdict,
        run_id=found.run_id,
        headline="",
        reason="",
        attempt=found.attempt,
        firing=_texts(alerts.still),
        evidence=(*found.evidence, *_of_the_start(run_dir)),
        collect=found.collect,
    )
    told = _told(start, cause, alerts, "")
    return dataclasses.replace(told, consequences=(found.headline, *told.consequences))


def with_setting(run_dir: Path, nonfinite: Diagnosis) -> Diagnosis:
    """Return a diagnosis of what became NaN or Inf with what the script had set right before it in the headline."""
    if nonfinite.attempt is None or nonfinite.step is None:
        return nonfinite
    alerts = _alerts_of(run_dir, nonfinite.attempt)
    found = [one for one in alerts.fired if _is_set_by_script(one) and 0 <= nonfinite.step - one.first_step <= _SOON]
    return _after_setting(nonfinite, min(found, key=_order), alerts) if found else nonfinite


def _after_setting(found: Diagnosis, cause: Alert, alerts: _RunAlerts) -> Diagnosis:
    """Return `found` with what the script had set before it: as the cause if that was right before, else beside it."""
    if _is_rate_jump(cause) and found.module == OPTIMIZER:
        return found  # the jump is its headline
    what = _headline(cause, _ranks_of(cause, alerts.fired))
    found = dataclasses.replace(found, firing=_texts(alerts.still), reason=f"{cause.message}. {found.reason}")
    if not _is_soon(found, cause):
        return dataclasses.replace(found, headline=f"{found.headline}; before that, {_lower(what)}")
    return dataclasses.replace(found, headline=f"{what}: {_lower(found.headline)}", step=cause.first_step)


def _is_soon(found: Diagnosis, cause: Alert) -> bool:
    return (found.step or 0) - cause.first_step <= _SOON


def _of_the_start(run_dir: Path) -> tuple[str, ...]:
    """Return what the monitor noted when it was attached, and which rules it could not judge."""
    try:
        about: Mapping[str, Any] = json.loads((run_dir / "run.json").read_bytes())
        config, notes = about.get("config", {}), about.get("config_notes", [])
        off = {law.name: [key for key in law.needs if not config[key]] for law in LAWS if config}
    except (OSError, ValueError, LookupError, AttributeError, TypeError):  # of another version, or dumps alone
        return ()
    keys = sorted({key for needed in off.values() for key in needed})
    rules = [rule for rule in load_rules() if isinstance(rule.when, BreaksLaw) and off.get(rule.when.law)]
    unjudged = ", ".join(rule.name for rule in rules)
    return (
        *(f"noted at the start: {note}" for note in notes),
        *([f"not watched, as {', '.join(keys)} {'is' if len(keys) == 1 else 'are'} off: {unjudged}"] if keys else []),
    )


def _alerts_of(run_dir: Path, attempt: int) -> _RunAlerts:
    logs = [AlertLog(log) for log in sorted(run_dir.glob("nodes/*/alerts.jsonl"))]
    firing = [alert for log in logs for alert in log.read() if alert.state is AlertState.FIRING]
    told = [alert for alert in firing if _has_weight(alert)]
    still = [alert for log in logs for alert in log.open_alerts() if _has_fired(alert, attempt)]
    return _RunAlerts(
        fired=[
            *(alert for alert in told if alert.attempt == attempt),
            *(alert for alert in still if alert.rule == BLIND_RULE),
        ],
        mild=[
            alert
            for alert in firing
            if alert.attempt == attempt
            and alert.severity is not Severity.INFO
            and alert.rule != BLIND_RULE
            and not _has_weight(alert)
        ],
        still=still,
        notes=[one for one in firing if one.law and one.severity is Severity.INFO and one.attempt == attempt],
        gaps=[alert for alert in firing if alert.rule == BLIND_RULE and alert.attempt == attempt],
        before=[one for one in told if one.attempt < attempt and one.condition is not AlertCondition.REPORTED],
    )


def _order(alert: Alert) -> tuple[object, ...]:
    """Of what began in one step, what is earlier in it comes first: the rest may have followed. Gaps are last."""
    law = _law_of(alert)
    phase = _PHASES.index(law.phase) if law else len(_PHASES)
    is_gap = alert.rule == BLIND_RULE
    return _GRAVITY[alert.severity], is_gap, not alert.law, alert.first_step, phase, alert.rule, alert.rank


def _foremost(alerts: Sequence[Alert]) -> Alert:
    """Return the gravest alert; for a law of the optimizer, the jump of a rate right before: the law has it in it."""
    worst = min(alerts, key=_order)
    law = _law_of(worst)
    if law is None or law.phase != "optimizer":
        return worst
    jumps = (one for one in alerts if _is_rate_jump(one) and 0 <= worst.first_step - one.first_step <= _SOON)
    return min((one for one in jumps if one.attempt == worst.attempt), key=_order, default=worst)


def _headline(alert: Alert, ranks: Sequence[int]) -> str:
    if _is_rate_jump(alert):
        rate = f"The learning rate jumped from at most {alert.baseline:.3g} to {alert.value:.3g}"
        return f"{rate} in step {alert.first_step} on {rank_list(ranks)}"
    return f"The alert {alert.rule} fired on {rank_list(ranks)} from step {alert.first_step} on"


def _lower(headline: str) -> str:
    return f"{headline[:1].lower()}{headline[1:]}"


def _ranks_of(alert: Alert, alerts: Iterable[Alert]) -> list[int]:
    """Return the ranks on which its rule began to fire on its step."""
    return sorted({one.rank for one in alerts if (one.rule, one.first_step) == (alert.rule, alert.first_step)})


def _told(found: Diagnosis, alert: Alert, alerts: _RunAlerts, otherwise: str) -> Diagnosis:
    """Return `found` with what an alert says as its headline, and what else is known: `otherwise`."""
    same = [one for one in alerts.fired if (one.rule, one.first_step) == (alert.rule, alert.first_step)]
    ranks = _ranks_of(alert, same)
    is_over = all(one.rule != alert.rule for one in alerts.still)
    message = f"{alert.message}{' (no longer so at the end)' if is_over else ''}"
    others = [one for one in alerts.fired if one.rule != alert.rule and one.first_step >= alert.first_step]
    told = dataclasses.replace(
        found,
        verdict=DiagnosisVerdict.ALERTED,
        headline=_headline(alert, ranks),
        reason=". ".join(filter(None, (message, otherwise))),
        step=alert.first_step,
        rank=ranks[0] if len(ranks) == 1 else None,
        consequences=tuple(f"alert {text}" for text in _texts(others)[:_MAX_OTHERS]),
    )
    law = _law_of(alert)
    if law is not None:
        told = dataclasses.replace(told, step=_began(alert, law))
        return _with_law(told, law, [finding.series for one in same for finding in one.findings], ranks)
    of_rates = any(finding.series.name == LEARNING_RATE_SERIES for finding in alert.findings)
    return dataclasses.replace(told, module=OPTIMIZER, phase=FaultPhase.OPTIMIZER) if of_rates else told


def _law_of(alert: Alert) -> Law | None:
    try:
        return law_of(alert.law) if alert.law else None
    except (KeyError, RuleError):  # of a package that is not installed here
        return None


def _began(alert: Alert, law: Law) -> int:
    """Return the first step on which a law was broken, which may be long before it was seen."""
    return max(0, min(alert.first_step, alert.step - round(alert.value) + 1)) if law.counts_steps else alert.first_step


def _with_law(told: Diagnosis, law: Law, series: Iterable[SeriesKey], ranks: Sequence[int]) -> Diagnosis:
    """Return what is said of a broken law: what went wrong, where in the step, and what usually breaks it."""
    series = [*series]
    modules = tuple(dict.fromkeys(module_of(one) for one in series))
    slots = {one.slot for one in series}
    is_input = law.phase == "input"
    nowhere = is_input or law.is_of_the_whole
    last = max(0, (told.step or 0) - law.seen_after)  # on which it still held
    since = f"began between steps {last} and {last + 1}" if law.seen_after else f"since step {told.step}"
    return dataclasses.replace(
        told,
        symptom=Symptom.BREAKS_LAW,
        headline=f"{law.headline} ({rank_list(ranks)}, {since})",
        module=INPUT if is_input else "" if nowhere else next(iter(modules), ""),
        candidates=() if nowhere else modules[1:],
        phase=FaultPhase.FORWARD if is_input else FaultPhase(law.phase),
        causes=tuple(cause for cause in law.causes if cause.partition(":")[0] in slots) or law.causes,
        look_at=law.look_at,
    )


def _is_upstream(alert: Alert) -> bool:
    """Return whether an alert tells of what makes other values wrong, and is not made by them."""
    is_of_rates_apart = alert.condition is AlertCondition.DIFFERS and LEARNING_RATE_SERIES in _numbers_of(alert)
    return bool(alert.law) or is_of_rates_apart or _is_set_by_script(alert)


def _is_set_by_script(alert: Alert) -> bool:
    """Return whether an alert tells of a rate, a mode or missing batches that the script set, on all ranks alike."""
    is_more = alert.direction is AlertDirection.UP and not alert.law and alert.condition is not AlertCondition.DIFFERS
    return is_more and any(name in _SET_BY_SCRIPT for name in _numbers_of(alert))


def _is_rate_jump(alert: Alert) -> bool:
    is_jump = alert.condition is AlertCondition.EXCEEDS and alert.direction is AlertDirection.UP
    return is_jump and LEARNING_RATE_SERIES in _numbers_of(alert)


def _numbers_of(alert: Alert) -> list[str]:
    """Return the names of the numbers of the step that it tells of."""
    return [finding.series.name for finding in alert.findings if finding.series.kind is Kind.STEP]


def _has_fired(alert: Alert, attempt: int) -> bool:
    return alert.state is AlertState.FIRING and alert.attempt == attempt


def _has_weight(alert: Alert) -> bool:
    if alert.severity is not Severity.WARNING:
        return alert.severity is not Severity.INFO
    names = [finding.series for finding in alert.findings]
    is_of_time = any(series.kind is Kind.COMM or series.name in _SPEEDS for series in names)
    return alert.condition not in _OF_SPEED and not is_of_time and not alert.rule.startswith("accelerator-")


def _texts(alerts: Iterable[Alert]) -> tuple[str, ...]:
    rules: dict[str, list[Alert]] = {}
    for alert in alerts:
        rules.setdefault(alert.rule, []).append(alert)
    since = {rule: min(alert.first_step for alert in alerts) for rule, alerts in rules.items()}
    return tuple(
        f"{rule} ({rank_list(sorted({alert.rank for alert in rules[rule]}))}, since step {since[rule]})"
        for rule in sorted(rules, key=lambda rule: (since[rule], rule))
    )
