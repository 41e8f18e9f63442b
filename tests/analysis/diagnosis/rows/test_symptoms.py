"""What an alert says is wrong: decided by what its rule looks for, and never by how the rule is called."""

import pytest

from tests.alerts.alerts_by_hand import alert
from tests.alerts.series import block, feed, rules
from trainermon.alerts.engine import RuleEngine
from trainermon.analysis.diagnosis.findings import Symptom
from trainermon.analysis.diagnosis.rows.symptoms import symptom_of
from trainermon.core.values import Alert, AlertCondition, AlertDirection, AlertState, Kind, SeriesKey

RULE = """rules:
  - name: {name}
    severity: warning
    on: {{kind: {kind}, statistic: {statistic}}}
    when: {when}
    summary: "it did"
"""
SPIKE = "{{spike: {{score: 8, window: 8, warmup: 8, direction: {side}}}}}"
CALM = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0]
NAMES = ["relu-off", "gradient-dead", "my-vanishing", "my-outlier-rank", "my-overflow", "my-nonfinite"]


def fired(folder, name, when, values, *, kind="grad_reduced", statistic="rms") -> Alert:
    """Return the alert of one rule, of any name, on one series with these values."""
    text = RULE.format(name=name, kind=kind, statistic=statistic, when=when)
    engine = RuleEngine(rules(folder, text))
    alerts = feed(engine, [SeriesKey(Kind(kind), "w")], [block(step, {0: [one]}) for step, one in enumerate(values)])
    return next(one for one in alerts if one.state is AlertState.FIRING)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "case",
    [
        ("{dead: {zero_ratio: 1.0, steps: 3, lived: 3}}", "zero_ratio", [*CALM, 0, 0, 0, 0], Symptom.DIED),
        ("{vanishing: {share: 0.001, warmup: 8}}", "rms", [*CALM, *[1e-6] * 4], Symptom.DIED),
        (SPIKE.format(side="up"), "rms", [*CALM, 1e3, 1e3], Symptom.EXPLODED),
        (SPIKE.format(side="both"), "rms", [*CALM, 1e3, 1e3], Symptom.EXPLODED),
        (SPIKE.format(side="both"), "rms", [*CALM, 1e-3, 1e-3], Symptom.DIED),
        (SPIKE.format(side="down"), "rms", [*CALM, 1e-3, 1e-3], Symptom.DIED),
        (SPIKE.format(side="both"), "mean", [*CALM, -1e3, -1e3], Symptom.EXPLODED),
        ("{exceeds: {times: 5, warmup: 8}}", "rms", [*CALM, 1e3], Symptom.EXPLODED),
        ("{relative_to_mean: {threshold: 5.0}}", "mean", [*CALM, -1e3], Symptom.EXPLODED),
        ("{nonfinite: true}", "nonfinite", [*CALM, float("nan")], None),
        ("{threshold: {above: 10}}", "rms", [*CALM, 1e3], None),
        ("{frozen: {steps: 3, lived: 8}}", "sum", [*range(1, 13), 5, 5, 5, 5], None),
    ],
)
def test_the_condition_decides_whatever_the_rule_is_called(tmp_path, name, case):
    when, statistic, values, symptom = case
    found = fired(tmp_path, name, when, values, statistic=statistic)

    assert symptom_of(found) is symptom


@pytest.mark.parametrize(
    ("condition", "kind", "direction", "symptom"),
    [
        (AlertCondition.SPREAD, Kind.GRAD_UNREDUCED, AlertDirection.UP, Symptom.DIVERGED),
        (AlertCondition.DIFFERS, Kind.PARAM_UPDATED, AlertDirection.NONE, Symptom.DIVERGED),
        (AlertCondition.DIFFERS, Kind.CHECKSUM, AlertDirection.NONE, Symptom.DIVERGED),
        (AlertCondition.SATURATED, Kind.ACTV, AlertDirection.UP, Symptom.EXPLODED),
        (AlertCondition.RATIO, Kind.UPDATE, AlertDirection.UP, Symptom.EXPLODED),
        (AlertCondition.SPIKE, Kind.LOSS, AlertDirection.UP, Symptom.EXPLODED),
        (AlertCondition.SPIKE, Kind.LOSS, AlertDirection.DOWN, None),  # a loss that falls is no fault
        (AlertCondition.SPIKE, Kind.STEP, AlertDirection.UP, None),
        (AlertCondition.SPIKE, Kind.COMM, AlertDirection.UP, None),
        (AlertCondition.CUSTOM, Kind.ACTV, AlertDirection.DOWN, Symptom.DIED),
        (AlertCondition.REPORTED, Kind.GRAD_REDUCED, AlertDirection.NONE, None),
        (None, Kind.GRAD_REDUCED, AlertDirection.UP, Symptom.EXPLODED),  # of an old log
        (None, Kind.GRAD_REDUCED, AlertDirection.NONE, None),
    ],
)
def test_direction_and_kind_of_series_decide_what_the_condition_leaves_open(condition, kind, direction, symptom):
    value, baseline = (2.0, 9.5) if direction is AlertDirection.DOWN else (9.5, 2.0)
    told = alert(
        rule="gradient-dead", condition=condition, kind=kind, direction=direction, value=value, baseline=baseline
    )

    assert symptom_of(told) is symptom
