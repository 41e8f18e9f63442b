"""Conditions on the long run: gradients that vanish slowly, losses that do not fall."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.alerts.series import INF, NAN, block, feed, grad, rules
from trainermon.alerts.engine import RuleEngine
from trainermon.core.values import Alert, AlertState, Kind, SeriesKey

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED
LOSS = SeriesKey(Kind.LOSS, "loss")

VANISHING = """
rules:
  - name: vanishing
    severity: warning
    on: {kind: grad_reduced, statistic: rms}
    when: {vanishing: {share: 1e-3, warmup: 16}}
    for: 3
    keep: {steps: 2}
    summary: "{worst} {value}, {usual} at first"
"""
NOT_DECREASING = """
rules:
  - name: stuck
    severity: info
    on: {kind: loss, statistic: mean}
    when: {not_decreasing: {steps: 50, improvement: IMPROVEMENT}}
    for: 2
    keep: {steps: 1}
    summary: "{value}, {usual} before"
"""

FROZEN = """
rules:
  - name: frozen
    severity: warning
    on: {kind: actv, names: ["*.input.0"]}
    when: {frozen: {steps: 4, lived: 6}}
    keep: {steps: 1}
    summary: "{worst}"
"""


def run(tmp_path: Path, text: str, key: SeriesKey, values: list[float] | np.ndarray) -> list[Alert]:
    engine = RuleEngine(rules(tmp_path, text.replace("IMPROVEMENT", "0")))
    return feed(engine, [key], (block(step, {0: float(value)}) for step, value in enumerate(values)))


def states(alerts: list[Alert]) -> list[tuple[AlertState, int]]:
    return [(alert.state, alert.step) for alert in alerts]


def test_decline_so_slow_that_no_spike_sees_it_is_found_at_the_share(tmp_path: Path) -> None:
    decline = np.exp(-0.01 * np.arange(1000))  # a thousandth of the first level after 690 + 8 steps

    found = run(tmp_path, VANISHING, grad("a"), decline)

    assert [alert.state for alert in found] == [FIRING]
    assert 695 <= found[0].first_step <= 702
    assert found[0].step == found[0].first_step + 2
    assert found[0].baseline == pytest.approx(np.exp(-0.01 * 7.5), rel=1e-6)  # geometric mean of the first 16


def test_input_that_changed_on_every_step_and_stands_still_is_the_same_batch(tmp_path: Path) -> None:
    ids = SeriesKey(Kind.ACTV, "embed", "input.0")
    values = [*range(10), *[7] * 6, 8]

    assert states(run(tmp_path, FROZEN, ids, values)) == [(FIRING, 14), (RESOLVED, 16)]


@pytest.mark.parametrize(
    "values",
    [[3.0] * 40, [*[1, 2] * 3, *[5] * 3] * 8, [*range(10), *[0] * 9]],
    ids=["positions", "now and then", "dead"],
)
def test_input_that_never_changed_on_every_step_may_stand_still(tmp_path: Path, values: list[float]) -> None:
    assert run(tmp_path, FROZEN, SeriesKey(Kind.ACTV, "embed", "input.0"), values) == []


def test_gradient_that_comes_back_is_resolved(tmp_path: Path) -> None:
    values = [1.0] * 20 + [1e-4] * 5 + [0.5] * 5

    assert states(run(tmp_path, VANISHING, grad("a"), values)) == [(FIRING, 22), (RESOLVED, 26)]


@pytest.mark.parametrize("value", [0.0, NAN, INF])
def test_zero_and_what_is_not_finite_neither_vanish_nor_interrupt_what_does(tmp_path: Path, value: float) -> None:
    assert run(tmp_path, VANISHING, grad("a"), [1.0] * 20 + [value] * 20) == []

    values = [value] * 5 + [1.0] * 20 + [1e-4, value, 1e-4, value, 1e-4]
    assert states(run(tmp_path, VANISHING, grad("a"), values)) == [(FIRING, 29)]


def test_what_is_left_beside_elements_that_are_not_finite_is_not_judged(tmp_path: Path) -> None:
    engine, values = RuleEngine(rules(tmp_path, VANISHING)), [[1.0]] * 20 + [[1e-9, NAN], [1e-9, INF]] * 10

    assert feed(engine, [grad("a")], (block(step, {0: value}) for step, value in enumerate(values))) == []


def test_gradient_that_falls_as_gradients_do_in_training_is_quiet(tmp_path: Path) -> None:
    steps = np.arange(5000)
    usual = (
        (1.0 + 9.0 * np.exp(-steps / 50)) * np.exp(np.random.default_rng(0).normal(0, 0.3, 5000)) / (1 + steps / 500)
    )

    assert run(tmp_path, VANISHING, grad("a"), usual) == []


def test_loss_that_stays_is_found_after_two_means(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0.0, 0.2, 600)
    falling = 2.0 + 3.0 * np.exp(-np.arange(600) / 60)

    assert run(tmp_path, NOT_DECREASING, LOSS, falling[:250] + noise[:250]) == []
    found = run(tmp_path, NOT_DECREASING, LOSS, np.r_[falling[:150], np.full(200, 2.3)])
    assert states(found) == [(FIRING, 299)]  # the mean of 150 to 199 is the best, the two after it are no better
    assert (found[0].value, found[0].baseline) == (pytest.approx(2.3), pytest.approx(2.3))


def test_loss_that_rises_is_found_and_one_that_falls_again_is_over(tmp_path: Path) -> None:
    values = np.r_[np.full(50, 3.0), np.linspace(3.0, 4.0, 150), np.full(50, 2.9)]

    assert states(run(tmp_path, NOT_DECREASING, LOSS, values)) == [(FIRING, 149), (RESOLVED, 249)]


def test_noisy_but_falling_loss_is_quiet_for_ten_thousand_steps(tmp_path: Path) -> None:
    steps = np.arange(10_000)
    loss = 2.0 + 8.0 * (1.0 + steps / 30.0) ** -0.3
    noise = np.random.default_rng(1).normal(0.0, 0.02, len(steps))

    engine = RuleEngine(rules(tmp_path, NOT_DECREASING.replace("IMPROVEMENT", "0").replace("50", "500")))
    assert feed(engine, [LOSS], (block(n, {0: float(value)}) for n, value in enumerate(loss + noise))) == []


def test_nan_losses_do_not_enter_a_mean(tmp_path: Path) -> None:
    values = [NAN if step % 2 else 3.0 for step in range(400)]

    assert states(run(tmp_path, NOT_DECREASING, LOSS, values)) == [(FIRING, 298)]


def test_less_improvement_than_is_asked_for_is_none(tmp_path: Path) -> None:
    values = 3.0 * 0.9999 ** np.arange(300)  # half a percent from mean to mean
    quiet, loud = (NOT_DECREASING.replace("IMPROVEMENT", share) for share in ("0.001", "0.01"))

    assert feed(RuleEngine(rules(tmp_path, quiet)), [LOSS], (block(n, {0: v}) for n, v in enumerate(values))) == []
    found = feed(RuleEngine(rules(tmp_path, loud)), [LOSS], (block(n, {0: v}) for n, v in enumerate(values)))
    assert [alert.state for alert in found] == [FIRING]
