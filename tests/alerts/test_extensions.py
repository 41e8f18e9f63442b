"""Conditions of other packages are found by entry point; they and built-in ones are kept from doing harm."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.alerts.series import block, feed, grad, header, rules
from trainermon.alerts import extensions
from trainermon.alerts.across_ranks.copies import DiffersComparison
from trainermon.alerts.conditions import ConditionVerdict, ConditionWatcher, Slots
from trainermon.alerts.conditions.criteria import Threshold
from trainermon.alerts.engine import RuleEngine
from trainermon.core.derived import DERIVED, Array
from trainermon.core.errors import RuleError
from trainermon.core.values import AlertState

RULES = """
rules:
  - name: theirs
    severity: warning
    on: {kind: grad_reduced, statistic: STATISTIC}
    when: {NAME: SETTINGS}
    keep: {steps: 1}
    summary: "{worst} {value}"
  - name: ours
    severity: warning
    on: {kind: grad_reduced, statistic: mean}
    when: {threshold: {above: 100}}
    keep: {steps: 1}
    summary: "{value}"
"""


class Odd(ConditionWatcher):
    """The statistic is an odd multiple of `of`."""

    def __init__(self, settings: Mapping[str, Any], statistic: str) -> None:
        self._of = settings["of"]
        self._derive = DERIVED[statistic]

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:
        value = self._derive(moments)
        bad = (value / self._of) % 2 == 1
        return ConditionVerdict(value, value, bad, ~bad)


class Moody(Odd):
    """Raises on the value 13, and spoils its input."""

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:
        if (moments[3] == 13).any():
            raise RuntimeError("no")
        verdict = super().judge(slots, moments)
        moments[:] = np.nan
        return verdict


class Shapeless(Odd):
    """Returns one verdict for all series."""

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:
        yes = np.array([True])
        return ConditionVerdict(np.array([1.0]), np.array([1.0]), yes, ~yes)


class Most(ConditionWatcher):
    """Most of the series that are judged together are 1."""

    def __init__(self, settings: Mapping[str, Any], statistic: str) -> None: ...

    def judge(self, slots: Slots, moments: Array) -> ConditionVerdict:
        value = DERIVED["mean"](moments)
        bad = np.full(len(value), (value == 1.0).mean() > 0.5)
        return ConditionVerdict(value, value, bad, ~bad)


def not_a_watcher(settings: Mapping[str, Any], statistic: str) -> object:
    return object()


POINTS = {
    "odd": "tests.alerts.test_extensions:Odd",
    "moody": "tests.alerts.test_extensions:Moody",
    "shapeless": "tests.alerts.test_extensions:Shapeless",
    "most": "tests.alerts.test_extensions:Most",
    "nothing": "tests.alerts.test_extensions:not_a_watcher",
    "gone": "no_such_package:Condition",
}


@pytest.fixture(autouse=True)
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def found(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return [importlib.metadata.EntryPoint(name, value, group) for name, value in POINTS.items()]

    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    extensions._entry_points.cache_clear()
    yield
    extensions._entry_points.cache_clear()


def engine(tmp_path: Path, name: str, settings: str = "{of: 1}") -> RuleEngine:
    text = RULES.replace("NAME", name).replace("SETTINGS", settings).replace("STATISTIC", "mean")
    return RuleEngine(rules(tmp_path, text))


def test_condition_of_another_package_makes_alerts(tmp_path: Path) -> None:
    found = feed(
        engine(tmp_path, "odd", "{of: 2}"), [grad("a"), grad("b")], [block(n, {0: 2.0 * n, 1: 4.0}) for n in range(3)]
    )

    assert [(alert.rule, alert.state, alert.step) for alert in found] == [
        ("theirs", AlertState.FIRING, 1),
        ("theirs", AlertState.RESOLVED, 2),
    ]
    assert found[0].message == "theirs: a 2"


def test_condition_that_raises_is_told_once_and_switched_off_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    watched = engine(tmp_path, "moody")

    before = feed(watched, [grad("a")], [block(0, {0: 3.0})])
    after = feed(watched, [grad("a")], [block(n, {0: 13.0 if n < 5 else 101.0}) for n in range(1, 20)])
    other_rank = feed(watched, [grad("a")], [block(n, {0: 3.0}) for n in range(5)], rank=1)

    assert [alert.rule for alert in before] == ["theirs"]
    assert [(alert.rule, alert.step) for alert in after] == [("ours", 5)]
    assert other_rank == []
    assert watched.faults == {"theirs": "RuntimeError: no"}
    assert [record.getMessage() for record in caplog.records] == [
        "rule theirs is switched off, as its condition failed"
    ]


def test_built_in_condition_that_raises_costs_only_its_own_rule(tmp_path: Path) -> None:
    first, ours = rules(tmp_path, RULES.replace("NAME: SETTINGS", "threshold: {above: 1}").replace("STATISTIC", "mean"))
    impossible = Threshold(above=1.0, over=10**13)  # a file may not say so
    watched = RuleEngine([dataclasses.replace(first, when=impossible), ours])

    found = feed(watched, [grad("a")], [block(n, {0: 101.0}) for n in range(3)])

    assert [(alert.rule, alert.step) for alert in found] == [("ours", 0)]
    assert list(watched.faults) == ["theirs"]
    assert "MemoryError" in watched.faults["theirs"]


def test_comparison_of_ranks_that_raises_costs_only_its_own_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no")

    text = RULES.replace("NAME: SETTINGS", "differs: true").replace("STATISTIC", "mean")
    watched = RuleEngine(rules(tmp_path, text))
    monkeypatch.setattr(DiffersComparison, "judge", fail)

    found = feed(watched, [grad("a")], [block(n, {0: 101.0}) for n in range(3)])

    assert [(alert.rule, alert.step) for alert in found] == [("ours", 0)]
    assert watched.faults == {"theirs": "RuntimeError: no"}


def test_summary_that_cannot_be_worded_loses_no_alert(tmp_path: Path) -> None:
    text = RULES.replace("NAME: SETTINGS", "threshold: {above: 1}").replace("STATISTIC", "mean")
    first, ours = rules(tmp_path, text)
    watched = RuleEngine([dataclasses.replace(first, summary="{value!r:d}"), ours])

    found = feed(watched, [grad("a")], [block(0, {0: 101.0})])

    assert [alert.message for alert in found] == ["theirs: {value!r:d}", "ours: 101"]


def test_condition_cannot_spoil_what_other_rules_see(tmp_path: Path) -> None:
    found = feed(engine(tmp_path, "moody"), [grad("a")], [block(0, {0: 102.0})])

    assert [(alert.rule, alert.value) for alert in found] == [("ours", 102.0)]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("shapeless", "{of: 1}", "ValueError: found an array of shape .1,., expected one value for each of 2 series"),
        ("nothing", "true", "TypeError: condition 'nothing' made <object"),
        ("odd", "true", "KeyError: 'of'"),
        ("gone", "{of: 1}", "RuleError: condition 'gone' of no_such_package:Condition cannot be loaded"),
    ],
)
def test_condition_that_is_none_costs_only_its_own_rule(tmp_path: Path, name: str, settings: str, said: str) -> None:
    watched = engine(tmp_path, name, settings)

    found = feed(watched, [grad("a"), grad("b")], [block(0, {0: 101.0, 1: 1.0})])

    assert [alert.rule for alert in found] == ["ours"]
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(watched.faults["theirs"])


def test_name_that_no_package_has_is_an_error_that_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        RuleError, match=r"when\.od: unknown key; did you mean 'odd'\? Known: nonfinite, .*, odd, moody"
    ):
        engine(tmp_path, "od")


def test_settings_that_are_no_mapping_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"when\.odd: found 3, expected true or a mapping"):
        engine(tmp_path, "odd", "3")


def test_condition_of_another_package_sees_one_rank_at_a_time(tmp_path: Path) -> None:
    ranks = engine(tmp_path, "most", "{}")
    for rank, values in enumerate([(1.0, 1.0, 0.0), (0.0, 0.0, 1.0)]):
        ranks.take(header(rank), [grad(name) for name in "abc"], block(0, dict(enumerate(values))))

    assert [(alert.rank, alert.num_series) for alert in ranks.settle()] == [(0, 3)]
