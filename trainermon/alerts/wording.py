"""The values and the sentence of an alert, from the state of its group."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.conditions.criteria import BreaksLaw, condition_of, direction_of
from trainermon.alerts.rules import AlertRule
from trainermon.alerts.state import SeriesPeaks, alert_id
from trainermon.core.values import Alert, AlertState, Finding, SeriesKey

_logger = logging.getLogger(__name__)

MAX_FINDINGS = 20
"""An alert lists so many series, the worst ones, and counts the others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlertMoment:
    """The rank, attempt, step and time at which an alert changed."""

    rank: int
    attempt: int
    step: int
    time_s: float

    def at(self, step: int, time_s: float) -> AlertMoment:
        """Return another moment of the same rank and attempt."""
        return AlertMoment(rank=self.rank, attempt=self.attempt, step=step, time_s=time_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlertConcern:
    """The series that an alert is about, with their worst values.

    Attributes:
        slots: The series, worst first; at least one.
        keys: The key of every series that the rule looks at.
        num_judged: Of how many of them it says anything: a law only of those of its first kind.
        peaks: The worst values.
        first_step: The step on which the condition began.
    """

    slots: NDArray[np.intp]
    keys: list[SeriesKey]
    num_judged: int
    peaks: SeriesPeaks
    first_step: int


def make_alert(rule: AlertRule, state: AlertState, concern: AlertConcern, moment: AlertMoment) -> Alert:
    """Return an alert of `rule` about the series of `concern`; its message names the worst series with its numbers."""
    worst = concern.slots[0]
    peaks = concern.peaks
    value, baseline = float(peaks.value[worst]), float(peaks.baseline[worst])
    return Alert(
        id=alert_id(rule.name, rank=moment.rank, attempt=moment.attempt, first_step=concern.first_step),
        rule=rule.name,
        severity=rule.severity,
        state=state,
        attempt=moment.attempt,
        rank=moment.rank,
        step=moment.step,
        first_step=concern.first_step,
        time_s=moment.time_s,
        kind=concern.keys[worst].kind,
        value=value,
        baseline=baseline,
        num_series=len(concern.slots),
        findings=tuple(
            Finding(series=concern.keys[slot], value=float(peaks.value[slot]), baseline=float(peaks.baseline[slot]))
            for slot in concern.slots[:MAX_FINDINGS]
        ),
        message=f"{rule.name}: {_sentence(rule, state, concern, moment)}",
        condition=condition_of(rule.when),
        direction=direction_of(rule.when, value=value, baseline=baseline),
        law=rule.when.law if isinstance(rule.when, BreaksLaw) else "",
    )


def filled_in(summary: str, fields: Mapping[str, object]) -> str:
    """Return a rule's `summary` with the fields in braces filled in.

    Unchanged where that fails, so that no alert is lost.
    """
    try:
        return summary.format_map(fields)
    except Exception:  # the border: rules that no file was read for may say anything
        _logger.debug("summary %r cannot be filled in", summary, exc_info=True)
        return summary


def _sentence(rule: AlertRule, state: AlertState, concern: AlertConcern, moment: AlertMoment) -> str:
    worst, peaks = concern.slots[0], concern.peaks
    value, usual = float(peaks.value[worst]), float(peaks.baseline[worst])
    fields = {
        "k": len(concern.slots),
        "n": concern.num_judged,
        "step": moment.step,
        "rank": moment.rank,
        "worst": concern.keys[worst].label,
        "tensor": concern.keys[worst].name,
        "value": f"{value:.4g}",
        "usual": f"{usual:.4g}",
        "percent": f"{100 * value:.3g} %",
        "usual_percent": f"{100 * usual:.3g} %",
        "times": f"{value / usual:.3g}" if usual else "inf",
        "score": f"{peaks.score[worst]:.1f}",
        "nans": f"{peaks.nans[worst]:,.0f}",
        "infs": f"{peaks.infs[worst]:,.0f}",
        "count": f"{peaks.count[worst]:,.0f}",
        "for": moment.step - concern.first_step + 1,
    }
    if state is not AlertState.RESOLVED:
        return filled_in(rule.summary, fields)
    begun = "over at step {step} on rank {rank}, began at step {first}; {k} of {n} series were concerned, worst {worst}"
    return begun.format(first=concern.first_step, **fields)
