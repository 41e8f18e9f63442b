"""The rules of msprobe's monitor: as alert rules of ours, and as records of single anomalies in its form.

`alert.rules` of a configuration names `AnomalyTurbulence` (far from the mean so far) and `AnomalyNan` (not finite, or
above a limit). As alert rules they are grouped, held and shown like any other (`anomaly_rules`). With `dump` every
single anomaly becomes a record too (`AnomalyScanner`), which `trainermon anomalies` puts in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainermon.alerts.conditions.condition import Mask, RelativeToMeanWatcher
from trainermon.alerts.conditions.criteria import Criterion, NonFinite, RelativeToMean, Threshold
from trainermon.alerts.rules import AlertRule, SeriesSelection
from trainermon.core.config import AnomalyRuleConfig
from trainermon.core.derived import DERIVED, INFS, NANS, Array
from trainermon.core.journal import Header
from trainermon.core.naming import METRICS, SeriesNames, tag_of
from trainermon.core.values import STATISTICS, Coordinates, Kind, SeriesKey, Severity, StatBlock

TURBULENCE = "AnomalyTurbulence"
NAN = "AnomalyNan"
JUDGED = {"norm": "norm", "min": "min", "max": "max", "mean": "mean", "zeros": "zero_ratio"}
"""Statistics that the rules look at, by the names of `ops`."""
TURBULENT = ("norm", "mean")

# A mean of gradients or activations may hover around zero, where any ratio is large: as in msprobe, that is reported.


def anomaly_rules(rules: Sequence[AnomalyRuleConfig], ops: Sequence[str]) -> tuple[AlertRule, ...]:
    """Convert msprobe's anomaly rules into alert rules.

    One for each rule and each statistic of `ops` that rules look at, and one for what is not finite.
    """
    found: list[AlertRule] = []
    for number, rule in enumerate(rules, start=1):
        suffix = f"-{number}" if number > 1 else ""
        if rule.rule_name == NAN:
            found.append(_rule(f"anomaly-nan{suffix}", NonFinite(), "nonfinite"))
        threshold = rule.args.threshold
        if threshold is None:
            continue
        limit = Threshold(above=threshold, below=-threshold)
        relative = RelativeToMean(threshold=threshold)
        for op in _judged(ops):
            if rule.rule_name == NAN:
                found.append(_rule(f"anomaly-nan-{op}{suffix}", limit, JUDGED[op]))
            elif op in TURBULENT:
                found.append(_rule(f"anomaly-turbulence-{op}{suffix}", relative, JUDGED[op]))
    return tuple(found)


def _judged(ops: Sequence[str]) -> list[str]:
    return [op for op in ops if op in JUDGED]


def _rule(name: str, when: Criterion, statistic: str) -> AlertRule:
    return AlertRule(
        name=name,
        severity=Severity.WARNING,
        on=SeriesSelection(kinds=tuple(METRICS), statistic=statistic),
        when=when,
        keep_steps=1,
        summary=_SUMMARIES[type(when)].replace("STATISTIC", statistic),
        runbook="anomaly-turbulence" if isinstance(when, RelativeToMean) else "anomaly-nan",
    )


_SUMMARIES: dict[type[Criterion], str] = {
    NonFinite: "{k} of {n} series are not finite, step {step} on rank {rank}, worst {worst} ({nans} NaN, {infs} Inf)",
    Threshold: "STATISTIC of {k} of {n} series is beyond its limit, step {step} on rank {rank}, worst {worst}: {value}",
    RelativeToMean: "STATISTIC of {k} of {n} series is far from its mean, step {step} on rank {rank}, worst {worst}: "
    "{value}, mean {usual}",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """One value that one of msprobe's anomaly rules finds odd; fields and key are those of its `anomaly.json`.

    `micro_step`, `pp_stage` and `vpp_stage` number the forward and backward, the pipeline stage and the virtual stage;
    `call_id` orders the series of a step, `tag_name` names one, `group_mates` are the ranks of the same pipeline (None:
    not known, as there are several stages).
    """

    rank: int
    step: int
    micro_step: int
    pp_stage: int
    vpp_stage: int
    call_id: int
    tag_name: str
    message: str
    group_mates: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        """Key of the record in anomaly.json."""
        return f"{self.tag_name}_step_{self.step}_call_{self.call_id}"


class _HoldingRule(NamedTuple):
    """A rule that holds for a statistic of a row, and what it is in words."""

    row: int
    rule: str
    op: str
    value: str


class AnomalyScanner:
    """Finds the single odd values of one rank and attempt by msprobe's anomaly rules, step by step.

    Every finite value of a series enters the mean that `AnomalyTurbulence` compares with, from the first block on.

    Args:
        rules: In their order; if several hold for a value, the first counts.
        ops: Names of statistics; those that are not in `JUDGED` do not matter.
        coordinates: The rank's position in the job.
    """

    def __init__(self, rules: Sequence[AnomalyRuleConfig], ops: Sequence[str], coordinates: Coordinates) -> None:
        self._rules = rules
        self._judged = _judged(ops)
        self._coordinates = coordinates
        self._names = SeriesNames()
        self._num_series = 0
        self._is_judged: Mask = np.zeros(0, np.bool_)
        self._watchers = [
            {
                op: RelativeToMeanWatcher(RelativeToMean(threshold=rule.args.threshold), JUDGED[op])
                for op in self._judged
                if op in TURBULENT and rule.rule_name == TURBULENCE and rule.args.threshold is not None
            }
            for rule in rules
        ]

    def scan(self, header: Header, block: StatBlock) -> list[Anomaly]:
        """Return the anomalies of a step, in the order of the series; at most one per series and statistic."""
        self._grow(header.series)
        series = np.asarray(block.series).astype(np.intp)
        judged = np.flatnonzero(self._is_judged[series])
        series = series[judged]
        moments = np.asarray(block.values, np.float64).reshape(len(STATISTICS), -1)[:, judged]
        with np.errstate(all="ignore"):
            found = sorted(self._judge(series, moments), key=lambda seen: seen.row)
        return [self._anomaly(header.series, int(series[seen.row]), block.step, seen) for seen in found]

    def _grow(self, keys: Sequence[SeriesKey]) -> None:
        if len(keys) == self._num_series:
            return
        self._num_series = len(keys)
        self._is_judged = np.array([key.kind in METRICS for key in keys], np.bool_)
        for watchers in self._watchers:
            for watcher in watchers.values():
                watcher.grow(len(keys))

    def _judge(self, series: Any, moments: Array) -> Iterator[_HoldingRule]:
        nonfinite = moments[NANS] + moments[INFS] > 0
        for op in self._judged:
            value = DERIVED[JUDGED[op]](moments)
            new = np.ones(len(series), np.bool_)
            for rule, watchers in zip(self._rules, self._watchers, strict=True):
                usual = np.full(len(series), np.nan)
                if rule.rule_name == NAN:
                    limit = rule.args.threshold
                    bad = nonfinite if limit is None else nonfinite | (np.abs(value) > limit)
                elif op in watchers:
                    bad = watchers[op].judge(series, moments).bad
                    usual = watchers[op].baseline(series)
                    watchers[op].learn(series, None)
                else:
                    continue
                for row in np.flatnonzero(bad & new):
                    counts = f" ({moments[NANS, row]:.0f} NaN, {moments[INFS, row]:.0f} Inf)" if nonfinite[row] else ""
                    yield _HoldingRule(int(row), rule.rule_name, op, f"{value[row]}{counts}, history mean {usual[row]}")
                new &= ~bad

    def _anomaly(self, keys: Sequence[SeriesKey], number: int, step: int, seen: _HoldingRule) -> Anomaly:
        key, place = keys[number], self._names.places(keys)[number]
        rank = self._coordinates.rank
        tag = tag_of(place, key.kind, rank)
        return Anomaly(
            rank=rank,
            step=step,
            micro_step=place.micro_step or 0,
            pp_stage=self._coordinates.pp,
            vpp_stage=place.stage,
            call_id=_call_id(key.kind, number, len(keys)),
            tag_name=tag,
            message=f"Rule {seen.rule} reports anomaly signal in {(tag, seen.op)} at step {step}, "
            f"current value {seen.value}.",
            group_mates=(rank,) if self._coordinates.pp_size == 1 else None,
        )


def _call_id(kind: Kind, number: int, num_series: int) -> int:
    """Return a number that grows in the order in which a step comes to its series.

    Series are numbered as forwards first show them, which for gradients is the reverse of their order.
    """
    if kind is Kind.ACTV:
        return number
    if kind in (Kind.ACTV_GRAD, Kind.GRAD_UNREDUCED):
        return 2 * num_series - 1 - number
    return 2 * num_series + number
