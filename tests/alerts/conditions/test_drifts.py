"""Conditions on where a value has come to: too slowly for a spike, or beyond all that it ever was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.alerts.series import NAN, block, feed, grad, rules
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.values import Alert, AlertState, Kind, SeriesKey

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED
LOSS = SeriesKey(Kind.LOSS, "loss")
RATE = SeriesKey(Kind.STEP, "learning_rate", "0")
DRIFT = """
rules:
  - name: drift
    severity: warning
    on: {kind: [loss, grad_reduced], statistic: STATISTIC}
    when: {drift: {SETTINGS}}
    keep: {steps: 1}
    summary: "{worst} {value}, {usual} before"
"""
EXCEEDS = """
rules:
  - name: exceeds
    severity: warning
    on: {kind: step, statistic: mean}
    when: {exceeds: {times: 5, warmup: 16, adopt: 30}}
    summary: "{value}, {times} times {usual}"
"""


def noisy(level: object, *, noise: float = 0.03, seed: int = 0) -> np.ndarray:
    values = np.asarray(level, np.float64)
    return values * np.exp(np.random.default_rng(seed).normal(0.0, noise, len(values)))


def run(tmp_path: Path, text: str, key: SeriesKey, values: object) -> list[Alert]:
    engine = RuleEngine(rules(tmp_path, text))
    return feed(engine, [key], (block(step, {0: value}) for step, value in enumerate(values)))  # type: ignore[arg-type]


def drift(tmp_path: Path, values: object, *, statistic: str = "mean", **settings: object) -> list[Alert]:
    given = {"factor": 1.25, **settings}
    written = ", ".join(f"{key}: {value}" for key, value in given.items())
    key = LOSS if statistic == "mean" else grad("a")
    return run(tmp_path, DRIFT.replace("STATISTIC", statistic).replace("SETTINGS", written), key, values)


DECLINE = 2.7 + 2.0 * np.exp(-np.arange(200) / 30.0)


def test_loss_that_creeps_up_is_found_within_its_forty_steps(tmp_path: Path) -> None:
    values = noisy([*DECLINE, *np.linspace(2.7, 3.7, 40), *[3.7] * 60])

    found = drift(tmp_path, values)

    assert found[0].state is FIRING
    assert 200 < found[0].step <= 255
    assert found[0].value > 1.25 * found[0].baseline
    assert found[0].baseline == pytest.approx(2.7, rel=0.05)


def test_spike_rules_do_not_see_it() -> None:
    engine = RuleEngine([rule for rule in load_rules() if "drift" not in rule.name])
    values = noisy([*DECLINE, *np.linspace(2.7, 3.7, 40)])

    assert feed(engine, [LOSS], (block(step, {0: value}) for step, value in enumerate(values))) == []


@pytest.mark.parametrize(
    "values",
    [
        noisy(DECLINE),
        noisy(np.full(400, 2.0), noise=0.2),
        noisy([*DECLINE, *[2.9] * 100]),
        [8.0 if step % 7 == 0 else 2.0 for step in range(400)],
    ],
    ids=["falling", "noisy", "a little more", "outliers"],
)
def test_what_is_no_drift_is_quiet(tmp_path: Path, values: object) -> None:
    assert drift(tmp_path, values) == []


def test_everything_may_move_at_the_start(tmp_path: Path) -> None:
    values = noisy([*np.exp(np.arange(64) / 8.0), *[np.exp(8.0)] * 100])

    assert drift(tmp_path, values, statistic="rms", factor=8) == []


def test_slow_growth_of_a_norm_is_found_and_over_when_it_ends(tmp_path: Path) -> None:
    values = noisy([*[1.0] * 160, *1.05 ** np.arange(100), *[1.05**100] * 200])

    found = drift(tmp_path, values, statistic="rms", factor=8, score=1)

    assert [alert.state for alert in found] == [FIRING, RESOLVED]
    assert 160 < found[0].step < 230


def test_fall_is_found_where_it_is_asked_for(tmp_path: Path) -> None:
    values = noisy([*[1.0] * 160, *0.95 ** np.arange(100)])

    assert drift(tmp_path, values, statistic="rms", factor=8, score=1) == []
    assert drift(tmp_path, values, statistic="rms", factor=8, score=1, direction="down")


def test_loss_that_swings_is_told_of_its_first_rise_alone(tmp_path: Path) -> None:
    swings = 1.0 + 0.5 * np.sin(np.arange(900) / 40.0)

    found = drift(tmp_path, noisy(swings), score=1)

    assert [alert.state for alert in found].count(FIRING) <= 1


def test_near_zero_a_share_of_the_first_level_is_needed(tmp_path: Path) -> None:
    values = noisy([*(2.3 * np.exp(-np.arange(100) / 20.0)), *[0.02] * 100, *[0.05] * 60])

    assert drift(tmp_path, values)
    assert drift(tmp_path, values, share_of_first=0.1) == []


@pytest.mark.parametrize(("converged", "found"), [(1e-3, False), (1.0, True)])
def test_magnitude_that_stays_below_what_it_was_at_first_does_not_matter(
    tmp_path: Path, converged: float, *, found: bool
) -> None:
    decline = np.exp(np.log(converged) * np.minimum(1.0, np.arange(200) / 150.0))
    values = noisy([*decline, *np.linspace(converged, 20.0 * converged, 60)])

    assert drift(tmp_path, values, statistic="rms", factor=10, score=1)
    assert bool(drift(tmp_path, values, statistic="rms", factor=10, score=1, share_of_first=1.0)) is found


def test_fall_matters_by_where_it_comes_from(tmp_path: Path) -> None:
    values = noisy([*[1.0] * 160, *0.95 ** np.arange(100)])

    assert drift(tmp_path, values, statistic="rms", factor=8, score=1, direction="down", share_of_first=0.5)


def test_gradients_of_a_model_that_has_learned_its_task_may_grow_from_next_to_nothing() -> None:
    engine = RuleEngine([rule for rule in load_rules() if rule.name == "gradient-drift"])
    sunk = [*np.exp(-np.arange(200) / 30.0), *[2e-3] * 60, *[4e-2] * 60]

    assert feed(engine, [grad("a")], (block(step, {0: value}) for step, value in enumerate(noisy(sunk)))) == []
    assert feed(engine, [grad("a")], (block(step, {0: 3.0}) for step in range(320, 420)))


def test_rate_of_many_times_the_largest_is_told_at_once_and_learned_at_last(tmp_path: Path) -> None:
    warm = [*np.linspace(0.0, 1e-3, 40), *[1e-3] * 20]

    found = run(tmp_path, EXCEEDS, RATE, [*warm, *[0.1] * 60])

    assert [(alert.state, alert.step) for alert in found] == [(FIRING, 60), (RESOLVED, 60 + 30 + 4)]
    assert found[0].message == "exceeds: 0.1, 100 times 0.001"


def test_warm_up_restarts_and_decay_of_the_rate_are_no_jumps(tmp_path: Path) -> None:
    cosine = 5e-4 * (1.0 + np.cos(np.pi * (np.arange(400) % 100) / 100.0))
    zero_and_nan = [0.0, NAN, 1e-3]

    assert run(tmp_path, EXCEEDS, RATE, [*np.linspace(0.0, 1e-3, 50), *cosine, *zero_and_nan]) == []


def test_rules_of_the_rate_tell_a_jump_and_a_standstill() -> None:
    engine = RuleEngine([rule for rule in load_rules() if rule.name.startswith("learning-rate")])
    values = [1e-3] * 40 + [0.2] * 10 + [1e-3] * 10 + [0.0] * 12

    found = feed(engine, [RATE], (block(step, {0: value}) for step, value in enumerate(values)))

    assert [(alert.rule, alert.step) for alert in found if alert.state is FIRING] == [
        ("learning-rate-jump", 40),
        ("learning-rate-zero", 69),
    ]


def test_a_group_that_rests_is_no_fault() -> None:
    engine = RuleEngine([rule for rule in load_rules() if rule.name == "learning-rate-zero"])
    keys = [RATE, SeriesKey(Kind.STEP, "learning_rate", "1")]

    assert feed(engine, keys, (block(step, {0: 0.0, 1: 1e-3}) for step in range(40))) == []
