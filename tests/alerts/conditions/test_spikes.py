from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.alerts.series import INF, NAN, PATIENT, block, feed, row
from trainermon.alerts.conditions import spikes_compiled
from trainermon.alerts.conditions.condition import ConditionVerdict
from trainermon.alerts.conditions.criteria import Direction, Spike
from trainermon.alerts.conditions.spikes import SpikeWatcher
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.values import Kind, SeriesKey

ALL = slice(None)
REFRESH = 16  # after so many values of its own a series has a new baseline


def spike(**changes: Any) -> Spike:
    return Spike(**{"score": 8.0, "clear": 4.0, "window": 32, "warmup": 16, "floor": 0.1, "adopt": 20, **changes})


class Series:
    """Some series of one watcher, fed by the values of the statistic itself."""

    def __init__(self, condition: Spike, statistic: str = "rms", size: int = 1) -> None:
        self.watcher = SpikeWatcher(condition, statistic)
        self.watcher.grow(size)
        self.size = size

    def feed(self, *values: float | list[float], restless: bool | None = None) -> ConditionVerdict:
        """Show the elements of each series; a bad one counts as restless, unless it is said which is."""
        moments = np.array([row(value) for value in values]).T
        with np.errstate(all="ignore"):
            verdict = self.watcher.judge(ALL, moments)
            mask = verdict.bad if restless is None else np.full(self.size, restless)
            self.watcher.learn(ALL, mask if mask.any() else None)
        return verdict

    def state(self) -> tuple[bytes, bytes, bytes]:
        watcher = self.watcher
        return watcher._misses.window.tobytes(), watcher._level.values.tobytes(), watcher._misses.weight.tobytes()

    def baseline(self) -> list[float]:
        return self.watcher.baseline(np.arange(self.size)).tolist()


def steady(num: int, *, seed: int = 0, noise: float = 0.1) -> list[float]:
    return np.exp(np.random.default_rng(seed).normal(0.0, noise, num)).tolist()


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


def test_score_is_the_distance_from_level_and_trend_in_robust_deviations_of_the_logarithm() -> None:
    series, values = Series(spike(floor=0.001)), steady(3 * REFRESH)
    for value in values:
        series.feed(value)

    level, misses = float(np.median(np.log(values[:4]))), []  # of a quarter of the warm-up
    for value in values[4:]:
        misses.append(math.log(value) - level)
        level += misses[-1] / 8.0
    misses = misses[-32:]  # the window
    apart = np.abs(np.array(misses) - np.median(misses))
    deviation = max(1.4826 * np.median(apart), np.sort(apart)[29] / 1.96)  # 30 of 32 are within the latter
    expected = (math.log(7.0) - level - max(0.0, np.median(misses))) / deviation
    assert series.feed(7.0).score[0] == pytest.approx(expected, rel=1e-3)
    assert series.baseline()[0] == pytest.approx(math.exp(level), rel=1e-5)


@pytest.mark.parametrize("start", [[1e3], [1e3 * 10.0**number for number in range(6)], [1e-6] * 3])
@pytest.mark.parametrize("statistic", ["rms", "mean"])
def test_wild_start_is_forgotten_by_the_end_of_the_warm_up(start: list[float], statistic: str) -> None:
    series = Series(spike(window=128, warmup=64), statistic)
    for value in [*start, *steady(65 - len(start))]:
        series.feed(value)

    assert series.feed(1.0).bad.tolist() == [False]
    assert series.feed(100.0).bad.tolist() == [True]


def falling(num: int, *, rate: float = 0.02, seed: int = 0) -> np.ndarray:
    """Return a loss that falls steadily, with 3 % of noise."""
    noise = np.random.default_rng(seed).normal(0.0, 0.03, num)
    return 4.0 * np.exp(-rate * np.arange(num) + noise)


def test_rise_of_a_falling_loss_is_seen_although_it_stays_below_its_median() -> None:
    series = Series(spike(direction=Direction.UP, floor=0.05, window=128), "mean")
    values = falling(100)
    found = [bool(series.feed(value).bad[0]) for value in values]

    median = float(np.median(values))
    assert not any(found)
    assert 2.0 * values[-1] < median
    assert series.feed(2.0 * values[-1]).bad.all()


def test_trend_that_goes_on_or_ends_is_not_unusual() -> None:
    series = Series(spike(direction=Direction.BOTH, floor=0.05))
    values = falling(100)
    values = np.concatenate((values, values[-1] * np.exp(np.random.default_rng(1).normal(0.0, 0.03, 100))))

    assert not any(series.feed(value).bad.any() for value in values)


def test_heavy_tails_are_a_part_of_the_usual_spread() -> None:
    random = np.random.default_rng(0)
    values = 1.0 + 0.01 * random.standard_t(2, 2000)
    plain = np.abs(values - np.median(values)) / (1.4826 * np.median(np.abs(values - np.median(values))))
    series = Series(spike(window=128, floor=1e-6, adopt=10**6), "mean")

    found = sum(bool(series.feed(value).bad[0]) for value in values)

    assert found < 0.6 * np.count_nonzero(plain > 8.0)
    assert series.feed(2.0).bad.all()


@pytest.mark.parametrize(("single", "bad"), [(0.8, False), (2.4, True)])
def test_single_hard_sample_does_not_matter_to_a_loss_that_came_close_to_zero(single: float, bad: bool) -> None:
    series = Series(spike(direction=Direction.UP, score=12.0, floor=0.05, share_of_first=0.5), "mean")
    for value in [*(2.3 * np.exp(-0.05 * np.arange(100))), *(0.05 * np.array(steady(100)))]:
        assert not series.feed(value).bad.any()

    assert series.feed(single).bad.tolist() == [bad]
    assert not series.feed(0.05).bad.any()


def test_distance_counts_where_the_level_is_negative() -> None:
    series = Series(spike(direction=Direction.UP, floor=0.05, share_of_first=0.5), "mean")
    for value in [*np.linspace(10.0, -50.0, 60), *(-50.0 * np.array(steady(60, noise=0.01)))]:
        assert not series.feed(value).bad.any()

    assert series.feed(-20.0).bad.all()  # negative still, but 30 above its level


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

    assert series.feed(3.0 * math.exp(0.81)).bad.all()
    assert not series.feed(3.0 * math.exp(0.79)).bad.any()


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

    for values in bad:
        verdict = series.feed(values)
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


@pytest.mark.parametrize(("peak", "found"), [(0.3, False), (30.0, True)])
def test_updates_of_a_model_that_has_learned_its_task_may_grow_from_little(peak: float, *, found: bool) -> None:
    engine = RuleEngine([rule for rule in load_rules() if rule.name == "update-spike"])
    sunk = [*np.exp(-np.arange(200) / 50.0), *[0.018] * 60] * np.array(steady(260))
    values = [*sunk, *(peak * 0.9 ** np.arange(12))]  # one hard sample, which Adam's first moment remembers

    alerts = feed(engine, [SeriesKey(Kind.UPDATE, "a")], (block(step, {0: value}) for step, value in enumerate(values)))

    assert bool(alerts) is found


@pytest.mark.skipif(spikes_compiled._library() is None, reason="there is no compiled library to compare with")
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    statistic=st.sampled_from(["rms", "mean"]),
    limits=st.sampled_from([{}, {"window": 8, "warmup": 3, "adopt": 3}, {"share_of_first": 0.5, "direction": "up"}]),
)
def test_the_library_learns_the_same_to_the_last_bit(seed: int, statistic: str, limits: dict[str, Any]) -> None:
    condition = spike(**{**limits, "direction": Direction(limits.get("direction", "both"))})
    both = [SpikeWatcher(condition, statistic) for _ in range(2)]
    rng, size = np.random.default_rng(seed), 5
    for watcher in both:
        watcher.grow(size)
    both[1]._compiled = None
    for _ in range(60):
        values = rng.normal(1.0, 0.2, size) * np.where(rng.random(size) < 0.05, 30.0, 1.0)
        values[rng.random(size) < 0.05] = rng.choice([NAN, INF, 0.0])
        moments = np.array([row(value) for value in values]).T
        shown = np.sort(rng.choice(size, rng.integers(1, size + 1), replace=False))
        slots = ALL if len(shown) == size else shown
        restless = rng.random(len(shown)) < rng.choice([0.0, 0.2])
        found = []
        for watcher in both:
            with np.errstate(all="ignore"):
                verdict = watcher.judge(slots, moments[:, shown])
                watcher.learn(slots, restless if restless.any() else None)
            found.append([verdict.value, verdict.score, verdict.bad, verdict.clear, *arrays_of(watcher)])
        for mine, theirs in zip(*found, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def arrays_of(watcher: SpikeWatcher) -> list[np.ndarray]:
    memory = watcher._memory()
    kept = [getattr(memory, field.name) for field in dataclasses.fields(memory)]
    return [value for value in (*kept, watcher._misses.trend, watcher._outside) if isinstance(value, np.ndarray)]


def test_a_copy_learns_for_itself() -> None:
    series = Series(spike())
    for value in steady(40):
        series.feed(value)
    other = copy.deepcopy(series)
    before = series.state()

    for value in steady(10, seed=1):
        other.feed(value)
    assert series.state() == before
    for value in steady(10, seed=1):
        series.feed(value)
    assert series.state() == other.state()
