from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.alerts.series import INF, NAN, PATIENT, row
from trainermon.alerts.conditions.condition import ConditionWatcher, NonFiniteWatcher, RelativeToMeanWatcher
from trainermon.alerts.conditions.criteria import Direction, Flat, NonFinite, RelativeToMean, Threshold
from trainermon.alerts.conditions.limits import ThresholdWatcher
from trainermon.alerts.conditions.trends import FlatWatcher
from trainermon.core.catalogue import STATISTICS
from trainermon.core.derived import DERIVED
from trainermon.core.values import Moments

ELEMENTS = st.lists(
    st.one_of(st.floats(-1e6, 1e6), st.sampled_from([NAN, INF, -INF, 0.0, -0.0])), min_size=0, max_size=8
)
ALL = slice(None)


def judge(watcher: ConditionWatcher, *elements: list[float]) -> list[bool | None]:
    """Return for each of several series: bad, clear (False), or nothing can be said (None)."""
    with np.errstate(all="ignore"):
        verdict = watcher.judge(ALL, np.array([row(each) for each in elements]).T)
    blind = np.zeros_like(verdict.bad) if verdict.blind is None else verdict.blind
    assert not (verdict.bad & verdict.clear).any()
    assert not (blind & (verdict.bad | verdict.clear)).any()
    return [None if hidden else bool(bad) for bad, hidden in zip(verdict.bad, blind, strict=True)]


def test_every_published_statistic_can_be_watched() -> None:
    assert set(STATISTICS) <= set(DERIVED)


@PATIENT
@given(st.lists(ELEMENTS, min_size=1, max_size=5))
def test_statistics_equal_their_scalar_form(elements: list[list[float]]) -> None:
    rows = [row(each) for each in elements]
    with np.errstate(all="ignore"):
        found = {name: derive(np.array(rows).T) for name, derive in DERIVED.items()}

    for place, moments in enumerate(Moments(*each) for each in rows):
        for name, values in found.items():
            if name == "absmax":
                expected = max(abs(moments.min), abs(moments.max)) if moments.finite else NAN
            elif name in ("min", "max") and not moments.finite:
                expected = NAN
            else:
                expected = getattr(moments, name)
            assert values[place] == pytest.approx(expected, rel=1e-12, abs=1e-9, nan_ok=True), name


def test_one_bad_element_is_enough() -> None:
    watcher = NonFiniteWatcher(NonFinite())
    watcher.grow(5)

    assert judge(watcher, [1.0, NAN], [INF, 2.0], [-INF], [0.0, 1.0], []) == [True, True, True, False, False]


def test_score_is_the_share_of_bad_elements() -> None:
    watcher = NonFiniteWatcher(NonFinite())
    watcher.grow(1)

    assert watcher.judge(ALL, np.array([row([NAN, 1.0, INF, 2.0])]).T).score[0] == 0.5


def test_inf_that_was_there_from_the_start_is_allowed_but_nan_is_not() -> None:
    watcher = NonFiniteWatcher(NonFinite(allow_initial_inf=True))
    watcher.grow(3)

    assert judge(watcher, [-INF, 0.0], [1.0, 2.0], [NAN, INF]) == [False, False, True]
    assert judge(watcher, [-INF, -INF], [1.0, INF], [1.0, INF]) == [False, True, True]
    assert judge(watcher, [-INF, NAN], [1.0, 2.0], [1.0, 2.0]) == [True, False, False]

    watcher.reset()
    assert judge(watcher, [1.0], [INF], [1.0]) == [False, False, False]
    assert judge(watcher, [INF], [INF], [1.0]) == [True, False, False]


def test_threshold_has_two_sides_and_no_opinion_on_nothing() -> None:
    watcher = ThresholdWatcher(Threshold(above=2.0, below=-1.0), "mean")
    watcher.grow(5)

    assert judge(watcher, [2.5], [-1.5], [2.0], [], [NAN]) == [True, True, False, None, None]


def test_threshold_on_max_ignores_what_is_not_finite() -> None:
    watcher = ThresholdWatcher(Threshold(above=2.0), "max")
    watcher.grow(3)

    assert judge(watcher, [1.0, INF], [3.0, NAN], [INF]) == [False, True, None]


def test_flat_compares_with_one_value_so_that_a_slow_drift_is_no_standstill() -> None:
    watcher = FlatWatcher(Flat(relative_change=0.01), "mean")
    watcher.grow(1)

    found = [judge(watcher, [value])[0] for value in (100.0, 100.5, 101.0, 101.5, 101.6, NAN, 101.5)]

    assert found == [False, True, True, False, True, None, True]


@PATIENT
@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12),
    st.sampled_from(Direction),
    st.sampled_from([0.0, 0.1]),
)
def test_a_value_is_compared_with_the_mean_of_the_magnitudes_before_it(
    values: list[float], direction: Direction, floor: float
) -> None:
    condition = RelativeToMean(threshold=0.5, beta=0.75, direction=direction, floor=floor)
    watcher = RelativeToMeanWatcher(condition, "mean")
    watcher.grow(1)
    mean = 0.0
    for value in values:
        magnitude = max(abs(value), floor * abs(value))  # of one element the rms is the magnitude
        sides = {Direction.UP: magnitude > 1.5 * mean, Direction.DOWN: mean > 1.5 * magnitude}
        sides[Direction.BOTH] = any(sides.values())
        edge = magnitude == pytest.approx(1.5 * mean) or mean == pytest.approx(1.5 * magnitude)

        (found,) = judge(watcher, [value])
        watcher.learn(ALL, None)

        assert edge or found == (mean > 0.0 and sides[direction])
        mean = 0.75 * mean + 0.25 * magnitude if mean > 0.0 else magnitude
        usual = watcher.baseline(np.array([0]))[0]
        assert usual == pytest.approx(mean if mean > 0.0 else NAN, nan_ok=True)


def test_a_mean_around_zero_is_judged_by_a_share_of_the_rms() -> None:
    close, strict = (RelativeToMeanWatcher(RelativeToMean(threshold=1.0, floor=floor), "mean") for floor in (0.1, 0.0))
    for watcher in (close, strict):
        watcher.grow(1)
        judge(watcher, [-1.0, 1.001])
        watcher.learn(ALL, None)

    assert (judge(close, [-1.0, 1.1]), judge(strict, [-1.0, 1.1])) == ([False], [True])


def test_what_is_not_finite_is_neither_judged_nor_learned() -> None:
    watcher = RelativeToMeanWatcher(RelativeToMean(threshold=1.0), "mean")
    watcher.grow(1)

    found = []
    for elements in ([1.0], [NAN], [INF, 1.0], [1.5], [9.0]):
        found += judge(watcher, elements)
        watcher.learn(ALL, None)

    assert found == [False, None, None, False, True]
