"""AnomalyTurbulence and AnomalyNan: grouped alerts, and single records with the keys of msprobe."""

import numpy as np
import pytest

from tests.alerts.series import INF, NAN, block, header, row
from trainermon.alerts.conditions.condition import RelativeToMeanWatcher
from trainermon.alerts.conditions.criteria import Direction, RelativeToMean
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.config import AnomalyArguments, AnomalyRuleConfig
from trainermon.core.errors import RuleError
from trainermon.core.values import AlertState, Coordinates, Kind, SeriesKey
from trainermon.msprobe.anomalies import AnomalyScanner, anomaly_rules

TURBULENCE = AnomalyRuleConfig(rule_name="AnomalyTurbulence", args=AnomalyArguments(threshold=0.5))
NOT_FINITE = AnomalyRuleConfig(rule_name="AnomalyNan")
KEYS = (
    SeriesKey(Kind.ACTV, "fc1", "input.0", micro_step=1),
    SeriesKey(Kind.ACTV_GRAD, "fc1", "input.0", micro_step=1),
    SeriesKey(Kind.GRAD_REDUCED, "fc1.weight"),
    SeriesKey(Kind.PARAM_UPDATED, "fc1.weight", stage=2),
    SeriesKey(Kind.LOSS, "loss"),
)


def nan_above(threshold):
    return AnomalyRuleConfig(rule_name="AnomalyNan", args=AnomalyArguments(threshold=threshold))


def means(values, condition):
    """Return, value by value, what the condition says and what the mean is then."""
    watcher = RelativeToMeanWatcher(condition, "norm")
    watcher.grow(1)
    found = []
    with np.errstate(all="ignore"):
        for value in values:
            verdict = watcher.judge(slice(None), np.array([row(value)]).T)
            watcher.learn(slice(None), None)
            found.append((bool(verdict.bad[0]), float(watcher.baseline(np.array([0]))[0])))
    return found


def test_the_mean_is_that_of_msprobe():
    values = [1.0, 2.0, 1.2, 0.9, 10.0]
    expected, mean = [], values[0]
    for value in values:
        mean = 0.99 * mean + 0.01 * value
        expected.append(mean)

    found = means(values, RelativeToMean(threshold=0.5))

    assert [mean for _, mean in found] == pytest.approx(expected, rel=1e-14)
    assert [bad for bad, _ in found] == [False, True, False, False, True]


@pytest.mark.parametrize(("direction", "bad"), [(Direction.BOTH, True), (Direction.UP, False), (Direction.DOWN, True)])
def test_a_drop_by_ten_counts_downwards(direction, bad):
    assert means([1.0, 0.1], RelativeToMean(threshold=0.5, direction=direction))[1][0] is bad


def test_what_is_not_finite_changes_no_mean():
    found = means([1.0, NAN, [1.0, INF], 1.0, 3.0], RelativeToMean(threshold=0.5))

    assert [bad for bad, _ in found] == [False, False, False, False, True]
    assert found[2][1] == 1.0


def test_a_series_that_begins_with_zero_is_not_judged_by_it():
    assert [bad for bad, _ in means([0.0, 5.0, 5.0, 50.0], RelativeToMean(threshold=0.5))] == [
        False,
        False,
        False,
        True,
    ]


def test_the_condition_can_be_written_in_a_file_of_rules(tmp_path):
    path = tmp_path / "rules.yaml"
    text = """
rules:
  - name: far
    severity: warning
    on: {kind: grad_reduced, statistic: norm}
    when: {relative_to_mean: {threshold: 0.5, direction: up}}
    summary: "{worst}"
"""
    path.write_text(text)

    assert load_rules(path)[0].when == RelativeToMean(threshold=0.5, direction=Direction.UP)
    path.write_text(text.replace("direction: up", "beta: 1"))
    with pytest.raises(RuleError, match="beta: found 1, expected less than 1"):
        load_rules(path)


def test_rules_become_grouped_alerts():
    engine = RuleEngine(anomaly_rules((TURBULENCE, nan_above(100.0)), ("norm", "max")))

    alerts = []
    for step, value in enumerate([1.0, 1.0, 2.0, 1.0, NAN, 1.0, 1e3]):
        alerts += engine.evaluate(header(), KEYS, block(step, {0: value, 2: value}))

    firing = [(alert.rule, alert.step, alert.num_series) for alert in alerts if alert.state is AlertState.FIRING]
    assert firing == [
        ("anomaly-turbulence-norm", 2, 2),
        ("anomaly-nan-2", 4, 2),
        ("anomaly-turbulence-norm", 6, 2),
        ("anomaly-nan-norm-2", 6, 2),
        ("anomaly-nan-max-2", 6, 2),
    ]


def test_every_rule_has_an_entry_in_the_runbook():
    from trainermon.alerts.rules import RUNBOOK

    rules = anomaly_rules((TURBULENCE, NOT_FINITE), ("norm",))
    assert all(f"## {rule.runbook}\n" in RUNBOOK.read_text() for rule in rules)


def test_without_rules_there_are_none():
    assert anomaly_rules((), ("norm",)) == ()


def scan(rules, values, *, ops=("norm",)):
    scanner = AnomalyScanner(rules, ops, Coordinates(rank=3, world_size=4, pp=1, pp_size=2))
    head = header()
    import dataclasses

    head = dataclasses.replace(head, series=KEYS, placements=(None,) * len(KEYS))
    return [one for step, value in enumerate(values) for one in scanner.scan(head, block(step, value))]


def test_a_record_has_the_fields_and_the_key_of_msprobe():
    found = scan((NOT_FINITE,), [{0: 1.0, 3: 1.0}, {0: NAN, 3: [INF, 1.0]}])

    assert [one.key for one in found] == [
        "0:fc1.input:1/rank3/actv_step_1_call_0",
        "2:fc1.weight/rank3/param_updated_step_1_call_13",
    ]
    assert [(one.rank, one.step, one.micro_step, one.pp_stage, one.vpp_stage) for one in found] == [
        (3, 1, 1, 1, 0),
        (3, 1, 0, 1, 2),
    ]
    tag = "0:fc1.input:1/rank3/actv"
    assert found[0].message == (
        f"Rule AnomalyNan reports anomaly signal in {(tag, 'norm')} at step 1, current value 0.0 (1 NaN, 0 Inf), "
        "history mean nan."
    )


def test_a_healthy_run_has_no_anomaly():
    values = [{number: [1.0, 0.9] for number in range(5)}] * 5

    assert scan((TURBULENCE, NOT_FINITE), values, ops=("norm", "mean", "zeros")) == []


def test_of_several_rules_the_first_counts():
    found = scan((TURBULENCE, nan_above(10.0)), [{2: 1.0}, {2: 100.0}, {2: 1.9}, {2: NAN}])

    assert [one.message.split()[1] for one in found] == ["AnomalyTurbulence", "AnomalyNan"]


def test_gradients_are_called_in_the_reverse_order():
    keys = (KEYS[0], SeriesKey(Kind.ACTV_GRAD, "fc1", "input.0"), SeriesKey(Kind.ACTV_GRAD, "fc2", "input.0"), KEYS[2])
    import dataclasses

    scanner = AnomalyScanner((NOT_FINITE,), ("norm",), Coordinates())
    head = dataclasses.replace(header(), series=keys, placements=(None,) * 4)

    found = sorted(scanner.scan(head, block(0, dict.fromkeys(range(4), NAN))), key=lambda one: one.call_id)

    assert [one.tag_name.split("/")[0] for one in found] == [
        "0:fc1.input:1",
        "0:fc2.input:0",
        "0:fc1.input:0",
        "0:fc1.weight",
    ]
