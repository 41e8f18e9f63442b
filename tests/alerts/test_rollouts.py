"""The rules on rollouts fire on what `trainermon.rl` records of a fault, and on nothing that a sound run records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from tests.alerts.series import block, feed
from tests.rl.policies import Step
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.values import Alert, Kind, SeriesKey
from trainermon.rl.causes import Limits
from trainermon.rl.judging import refuse
from trainermon.rl.steps import series_of
from trainermon.rl.tokens import NotComparableError
from trainermon.rl.values import Report, WeightCheck, WeightDifference

SOUND = WeightCheck(version=1, engines=("a",), equal=39)
ONE_TENSOR = dataclasses.replace(
    SOUND, differing=(WeightDifference(name="lm_head.weight", engine="a", found="other numbers"),)
)
SOUND_REPORTS = [Step(seed).report() for seed in range(3)]


def alerts(reports: Sequence[Report]) -> list[Alert]:
    numbers = [series_of(report, Limits()) for report in reports]
    keys = tuple(SeriesKey(Kind.STEP, name) for name in sorted({name for each in numbers for name in each}))
    rows = [{index: each[key.name] for index, key in enumerate(keys) if key.name in each} for each in numbers]
    return feed(RuleEngine(load_rules()), keys, (block(step, row) for step, row in enumerate(rows)))


def rules_of(reports: Sequence[Report]) -> set[str]:
    return {alert.rule for alert in alerts(reports)}


def test_a_sound_run_gives_no_alert() -> None:
    told = [dataclasses.replace(each, weights=SOUND, version_lag=1) for each in SOUND_REPORTS * 20]

    assert alerts(told) == []


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("raw log-probabilities", "rollout-bookkeeping"),
        ("top_p", "rollout-bookkeeping"),
        ("padding of its own", "rollout-bookkeeping"),
        ("old weights", "rollout-policy-differs"),
        ("stale cache", "rollout-policy-differs"),
        ("other context", "rollout-effective-samples-low"),
    ],
)
def test_a_fault_is_told_within_three_steps(fault: str, rule: str) -> None:
    told = alerts([*SOUND_REPORTS, *(Step(seed, fault).report() for seed in range(10, 13))])

    assert rule in {alert.rule for alert in told}
    assert all(alert.first_step >= len(SOUND_REPORTS) for alert in told)


def test_one_tensor_that_was_not_sent_is_told_at_once_and_alone() -> None:
    report = dataclasses.replace(SOUND_REPORTS[0], weights=ONE_TENSOR)

    (alert,) = alerts([*SOUND_REPORTS, report])

    assert alert.rule == "rollout-weights-differ"
    assert "`trainermon rl show` names them" in alert.message


def test_an_engine_that_falls_behind_is_told() -> None:
    assert rules_of([dataclasses.replace(SOUND_REPORTS[0], version_lag=2)] * 3) == {"rollout-stale"}


def test_tokens_that_cannot_be_paired_are_told() -> None:
    assert rules_of([refuse(0, NotComparableError("others"))] * 3) == {"rollout-not-comparable"}
