from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.alerts.series import INF, NAN, PATIENT, row
from trainermon.alerts.conditions import Verdict
from trainermon.alerts.criteria import Direction, Spike
from trainermon.alerts.spikes import SpikeWatcher, median_and_deviation

ALL = slice(None)
REFRESH = 16  # after so many steps every baseline has been computed anew


def spike(**changes: Any) -> Spike:
    return Spike(**{"score": 8.0, "clear": 4.0, "window": 32, "warmup": 16, "floor": 0.1, "adopt": 20, **changes})


class Series:
    """Some series of one watcher, fed by the values of the statistic itself."""

    def __init__(self, condition: Spike, statistic: str = "rms", size: int = 1) -> None:
        self.watcher = SpikeWatcher(condition, statistic)
        self.watcher.grow(size)
        self.size = size

    def feed(self, *values: float | list[float], restless: bool | None = None) -> Verdict:
        """Show the elements of each series; a bad one counts as restless, unless it is said which is."""
        moments = np.array([row(value) for value in values]).T
        with np.errstate(all="ignore"):
            verdict = self.watcher.judge(ALL, moments)
            mask = verdict.bad if restless is None else np.full(self.size, restless)
            self.watcher.learn(ALL, mask if mask.any() else None)
        return verdict

    def state(self) -> tuple[bytes, bytes, bytes]:
        watcher = self.watcher
        return watcher._window.tobytes(), watcher._level.tobytes(), watcher._weight.tobytes()

    def baseline(self) -> list[float]:
        return self.watcher.baseline(np.arange(self.size)).tolist()


def steady(num: int, *, seed: int = 0, noise: float = 0.1) -> list[float]:
    return np.exp(np.random.default_rng(seed).normal(0.0, noise, num)).tolist()


@PATIENT
@given(st.lists(st.lists(st.one_of(st.floats(-1e3, 1e3, width=32), st.just(NAN)), min_size=6, max_size=6), min_size=1))
def test_median_and_deviation_equal_numpy(rows: list[list[float]]) -> None:
    window = np.array(rows, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of rows without any value
        median = np.nanmedian(window, axis=1)
        deviation = np.nanmedian(np.abs(window - median[:, None]), axis=1)

    found = median_and_deviation(window)

    np.testing.assert_array_equal(found[0], median)
    np.testing.assert_array_equal(found[1], deviation)
    np.testing.assert_array_equal(found[2], (~np.isnan(window)).sum(axis=1))


@pytest.mark.parametrize(
    ("factor", "direction", "bad"),
    [
        (10.0, "both", True),
        (0.1, "both", True),
        (10.0, "up", True),
        (0.1, "up", False),
        (10.0, "down", False),
        (0.1, "down", True),
        (1.5, "both", False),
    ],
)
def test_tenfold_change_is_seen_on_the_side_that_is_watched(factor: float, direction: str, bad: bool) -> None:
    series = Series(spike(direction=Direction(direction)))
    for value in steady(60):
        assert not series.feed(value).bad.any()

    assert series.feed(factor).bad.tolist() == [bad]


def test_score_is_the_distance_in_robust_deviations_of_the_logarithm() -> None:
    series, values = Series(spike(floor=0.001)), steady(32)
    for value in values:
        series.feed(value)
    for _ in range(REFRESH):
        series.feed(NAN)

    logs = np.log(np.asarray(values))
    deviation = np.median(np.abs(logs - np.median(logs)))
    expected = abs(math.log(7.0) - np.median(logs)) / (1.4826 * deviation)
    assert series.feed(7.0).score[0] == pytest.approx(expected, rel=1e-4)
    assert series.baseline()[0] == pytest.approx(np.exp(np.median(logs)), rel=1e-5)


def test_signed_statistic_is_compared_as_it_is() -> None:
    series = Series(spike(direction=Direction.UP, floor=0.05), "mean")
    values = np.random.default_rng(0).normal(-2.0, 0.1, 60)
    for value in values:
        assert not series.feed(value).bad.any()

    assert series.feed(0.0).bad.all()
    assert not series.feed(-4.0).bad.any()


def test_nothing_is_judged_before_the_warm_up_is_over() -> None:
    series = Series(spike(warmup=16))
    for number in range(15):
        assert not series.feed(10.0 ** (number % 5)).bad.any()


def test_floor_is_the_least_spread_of_a_constant_series() -> None:
    series = Series(spike(score=8.0, floor=0.1))
    for _ in range(60):
        series.feed(3.0)

    assert not series.feed(3.0 * math.exp(0.79)).bad.any()
    assert series.feed(3.0 * math.exp(0.81)).bad.all()


@given(
    before=st.lists(st.floats(1e-6, 1e6), min_size=0, max_size=40),
    bad=st.lists(st.sampled_from([[NAN], [INF], [-INF], [0.0], [1e3, NAN], [1e-3, INF], []]), min_size=1, max_size=40),
)
@PATIENT
def test_what_is_not_finite_or_zero_never_enters_the_usual_range(before: list[float], bad: list[list[float]]) -> None:
    series = Series(spike(adopt=10**6))
    for value in before:
        series.feed(value)
    for _ in range(REFRESH):
        series.feed(NAN)
    known = series.state()

    for value in bad:
        verdict = series.feed(value)
        assert not verdict.bad.any()
        assert verdict.blind is not None

    assert series.state() == known


def test_spike_right_after_nan_is_seen() -> None:
    series = Series(spike())
    for value in steady(60):
        series.feed(value)
    for _ in range(100):
        series.feed(NAN)

    assert series.feed(20.0).bad.all()
    assert not series.feed(1.0).bad.any()


@given(scale=st.floats(1e-12, 1e12), values=st.lists(st.floats(0.1, 10.0), min_size=50, max_size=70))
@settings(PATIENT, max_examples=20)
def test_score_does_not_depend_on_the_scale(scale: float, values: list[float]) -> None:
    plain, scaled = Series(spike()), Series(spike())
    for value in values:
        expected = plain.feed(value, restless=False).score
        found = scaled.feed(scale * value, restless=False).score

        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_values_of_restless_series_are_not_learned() -> None:
    series = Series(spike())
    for value in steady(60):
        series.feed(value)
    for _ in range(REFRESH):
        series.feed(NAN)
    known = series.state()

    for _ in range(10):
        series.feed(1.0, restless=True)

    assert series.state() == known


def test_lasting_shift_is_learned_after_the_limit_and_then_judged_again() -> None:
    series = Series(spike(adopt=20, warmup=16))
    for value in steady(60):
        series.feed(value)

    found = [bool(series.feed(50.0 * value).bad[0]) for value in steady(80, seed=1)]

    assert found == [True] * 20 + [False] * 60
    assert series.baseline()[0] == pytest.approx(50.0, rel=0.1)
    assert series.feed(1.0).bad.all()


def test_short_excursions_do_not_add_up_to_a_lasting_shift() -> None:
    series = Series(spike(adopt=20))
    for number in range(400):
        verdict = series.feed(50.0 if number % 10 in (0, 1) and number > 60 else 1.0)
        assert verdict.bad.tolist() == [number % 10 in (0, 1) and number > 60]


def test_series_learn_apart_and_late_ones_start_their_own_warm_up() -> None:
    series = Series(spike(), size=2)
    for value in steady(60):
        series.feed(value, 1000.0 * value)
    series.watcher.grow(3)
    series.size = 3

    verdict = series.feed(1000.0, 1000.0, 5.0)

    assert verdict.bad.tolist() == [True, False, False]
    assert math.isnan(series.baseline()[2])


def test_series_that_is_not_shown_keeps_its_range() -> None:
    series = Series(spike(), size=2)
    for value in steady(60):
        series.feed(value, 1000.0 * value)
    for _ in range(200):
        with np.errstate(all="ignore"):
            series.watcher.judge(np.array([0]), np.array([row(1.0)]).T)
        series.watcher.learn(np.array([0]), None)

    assert series.baseline()[1] == pytest.approx(1000.0, rel=0.1)


def test_new_attempt_keeps_the_range() -> None:
    series = Series(spike())
    for value in steady(60):
        series.feed(value)

    series.watcher.reset()

    assert series.feed(10.0).bad.all()
