"""The state machine of an alert against a model that is written series by series, in plain Python."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.alerts.series import PATIENT
from trainermon.alerts.conditions.condition import ConditionVerdict
from trainermon.alerts.conditions.criteria import NonFinite
from trainermon.alerts.rules import AlertRule, SeriesSelection
from trainermon.alerts.state import RuleState, alert_id
from trainermon.core.values import Kind, Severity

BAD, CLEAR, BETWEEN, BLIND = "bad", "clear", "between", "blind"


def make_rule(*, for_steps: int, keep_steps: int, cooldown_steps: int = 0) -> AlertRule:
    return AlertRule(
        name="rule",
        severity=Severity.WARNING,
        on=SeriesSelection(kinds=(Kind.LOSS,)),
        when=NonFinite(),
        for_steps=for_steps,
        keep_steps=keep_steps,
        cooldown_steps=cooldown_steps,
        summary="",
        runbook="",
    )


def show(group: RuleState, step: int, shown: dict[int, str]) -> None:
    indices = np.array(list(shown), np.intp)
    seen = np.array(list(shown.values()))
    values = np.zeros(len(indices))
    blind = seen == BLIND
    verdict = ConditionVerdict(values, values, seen == BAD, seen == CLEAR, blind if blind.any() else None)
    group.advance(indices, verdict, step)
    group.record(indices, verdict, np.zeros((8, len(indices))), values)


@dataclasses.dataclass
class OneSeries:
    """What a series is after what it has shown, by the words of alerts/README.md."""

    shown: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    fires: bool = False

    def run(self, wanted: str) -> list[int]:
        """Return the steps of the unbroken run of `wanted` at the end; a blind value neither breaks nor counts."""
        steps: list[int] = []
        for step, what in reversed(self.shown):
            if what == wanted:
                steps.append(step)
            elif what != BLIND:
                break
        return steps[::-1]


class GroupMachine(RuleBasedStateMachine):
    SIZE = 3

    @initialize(for_steps=st.integers(1, 4), keep_steps=st.integers(1, 3), cooldown_steps=st.integers(0, 6))
    def start(self, for_steps: int, keep_steps: int, cooldown_steps: int) -> None:
        self.rule = make_rule(for_steps=for_steps, keep_steps=keep_steps, cooldown_steps=cooldown_steps)
        self.group = RuleState(self.rule)
        self.group.grow(self.SIZE)
        self.step = 0
        self.forget()

    def forget(self) -> None:
        self.series = [OneSeries() for _ in range(self.SIZE)]
        self.last_end = -(10**9)
        self.first_step = -1
        self.members: set[int] = set()
        self.first_steps: list[int] = []

    @rule(
        shown=st.dictionaries(st.integers(0, SIZE - 1), st.sampled_from([BAD, BAD, CLEAR, BETWEEN, BLIND]), min_size=1)
    )
    def advance(self, shown: dict[int, str]) -> None:
        self.step += 1
        show(self.group, self.step, shown)
        for index, what in shown.items():
            self.advance_one(self.series[index], what)
        firing = {index for index, each in enumerate(self.series) if each.fires}
        if firing and self.first_step < 0:
            begins = [self.series[index].run(BAD)[0] for index in firing]
            self.first_step = max(min(begins), self.last_end + 1)
            assert self.first_step not in self.first_steps, "two alerts would have one id"
            self.first_steps.append(self.first_step)
            self.members = set()
        elif not firing and self.first_step >= 0:
            self.first_step, self.last_end = -1, self.step
        self.members |= firing

    def advance_one(self, series: OneSeries, what: str) -> None:
        series.shown.append((self.step, what))
        cooled = self.first_step >= 0 or self.step > self.last_end + self.rule.cooldown_steps
        if what == BAD and len(series.run(BAD)) >= self.rule.for_steps and cooled:
            series.fires = True
        if series.fires and what != BAD and len(series.run(CLEAR)) >= self.rule.keep_steps:
            series.fires = False

    @rule()
    def skip_steps(self) -> None:
        self.step += 3

    @precondition(lambda self: self.SIZE < 6)
    @rule()
    def grow(self) -> None:
        self.SIZE += 1
        self.series.append(OneSeries())
        self.group.grow(self.SIZE)

    @rule()
    def new_attempt(self) -> None:
        self.group.reset()
        self.step = 0
        self.forget()

    @invariant()
    def group_equals_the_model(self) -> None:
        if not hasattr(self, "group"):
            return
        assert self.group.firing is (self.first_step >= 0)
        if self.group.firing:
            assert self.group.first_step == self.first_step
            assert set(np.flatnonzero(self.group.members)) == self.members
        restless = self.group.restless
        found = set() if restless is None else set(np.flatnonzero(restless))
        assert found == {index for index, each in enumerate(self.series) if each.fires or each.run(BAD)}


GroupMachine.TestCase.settings = settings(PATIENT, stateful_step_count=40)
TestGroup = GroupMachine.TestCase


def test_group_fires_after_for_steps_in_a_row_and_names_the_first() -> None:
    group = RuleState(make_rule(for_steps=3, keep_steps=2))
    group.grow(1)

    for step, what in enumerate([BAD, BAD, CLEAR, BAD, BAD]):
        show(group, step, {0: what})
        assert not group.firing
    assert group.pending_since() == 3
    show(group, 5, {0: BAD})

    assert (group.firing, group.first_step, group.pending_since()) == (True, 3, None)


def test_between_two_limits_an_alert_stays_but_none_begins() -> None:
    group = RuleState(make_rule(for_steps=2, keep_steps=2))
    group.grow(1)
    history = []
    for step, what in enumerate([BAD, BETWEEN, BAD, BAD, CLEAR, BETWEEN, CLEAR, BETWEEN, CLEAR, CLEAR]):
        show(group, step, {0: what})
        history.append(group.firing)

    assert history == [False, False, False, True, True, True, True, True, True, False]


def test_cooldown_delays_the_next_alert() -> None:
    group = RuleState(make_rule(for_steps=1, keep_steps=1, cooldown_steps=3))
    group.grow(1)
    firing = []
    for step in range(8):
        show(group, step, {0: CLEAR if step == 1 else BAD})
        firing.append(group.firing)

    assert firing == [True, False, False, False, False, True, True, True]
    assert group.first_step == 2


def show_scores(group: RuleState, step: int, *scores: float) -> None:
    found = np.array(scores)
    indices = np.arange(len(scores))
    verdict = ConditionVerdict(10 * found, found, found > 1, found <= 1)
    group.advance(indices, verdict, step)
    group.record(indices, verdict, np.full((8, len(scores)), float(step)), np.ones(len(scores)))


def test_worst_value_since_the_begin_is_kept() -> None:
    group = RuleState(make_rule(for_steps=1, keep_steps=5))
    group.grow(2)
    for step, score in enumerate([3.0, 9.0, 5.0]):
        show_scores(group, step, score, 4.0)

    assert group.peaks.value.tolist() == [90.0, 40.0]
    assert group.peaks.count.tolist() == [1.0, 0.0]
    assert group.worst_first(group.members).tolist() == [0, 1]


def test_new_alert_does_not_show_the_worst_value_of_the_one_before() -> None:
    group = RuleState(make_rule(for_steps=1, keep_steps=1))
    group.grow(1)
    for step, score in enumerate([9.0, 0.0, 3.0]):
        show_scores(group, step, score)

    assert group.peaks.value.tolist() == [30.0]


def test_equally_bad_series_come_in_their_order() -> None:
    group = RuleState(make_rule(for_steps=1, keep_steps=5))
    group.grow(50)
    show(group, 0, dict.fromkeys(range(50), BAD))

    assert group.worst_first(group.members).tolist() == list(range(50))


@pytest.mark.parametrize("changed", [{"rank": 1}, {"attempt": 1}, {"first_step": 8}])
def test_id_depends_on_rule_rank_attempt_and_first_step(changed: dict[str, int]) -> None:
    place = {"rank": 0, "attempt": 0, "first_step": 7}

    assert alert_id("a", **place) == alert_id("a", **place)
    assert alert_id("a", **place) != alert_id("b", **place)
    assert alert_id("a", **place) != alert_id("a", **(place | changed))
