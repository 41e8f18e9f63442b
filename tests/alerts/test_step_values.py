"""The default rules on loss scales and skipped steps as frameworks have them: a search at the start is no alarm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from tests.alerts.series import block, feed
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.values import Alert, Kind, SeriesKey

KEYS = tuple(SeriesKey(Kind.STEP, name) for name in ("loss_scale", "skipped"))


def scales(overflows: Iterable[int], *, num_steps: int, first: float, window: int = 1000) -> list[tuple[float, float]]:
    """Return scale and skipped or not per step: halved after an overflow, doubled after `window` steps without one."""
    scale, clean, told = first, 0, []
    overflowing = set(overflows)
    for step in range(num_steps):
        told.append((scale, float(step in overflowing)))
        clean = 0 if step in overflowing else clean + 1
        scale = max(1.0, scale / 2) if step in overflowing else scale * 2 if clean % window == 0 else scale
    return told


def alerts(told: Sequence[tuple[float, float]]) -> list[Alert]:
    return feed(RuleEngine(load_rules()), KEYS, (block(step, dict(enumerate(row))) for step, row in enumerate(told)))


@pytest.mark.parametrize(
    "told",
    [
        scales(range(18), num_steps=400, first=2.0**32),
        scales([*range(16), *range(70, 900, 60)], num_steps=1000, first=2.0**32, window=50),
        scales([], num_steps=300, first=1.0, window=10**9),
        scales([100, 101], num_steps=300, first=2.0**16),
    ],
    ids=["search", "up and down", "static", "two in a row"],
)
def test_a_loss_scale_that_works_gives_no_alert(told: list[tuple[float, float]]) -> None:
    assert alerts(told) == []


def test_a_scale_that_falls_and_falls_is_told_within_six_steps() -> None:
    (began, *_) = alerts(scales(range(200, 210), num_steps=220, first=2.0**16))

    assert (began.rule, began.first_step) == ("loss-scale-collapse", 203)
    assert began.step <= 205
    assert began.baseline == pytest.approx(2.0**16, rel=1e-6)


def test_steps_that_are_skipped_without_end_are_told_from_the_start_of_a_run_on() -> None:
    (began,) = alerts(scales(range(60), num_steps=60, first=2.0**16))

    assert (began.rule, began.first_step, began.step) == ("steps-skipped", 0, 23)
    assert "skipped 24 steps in a row" in began.message


def with_gradient(told: Sequence[tuple[float, float]]) -> list[Alert]:
    """Return the alerts of a run whose gradient is infinite on the steps that are skipped."""
    keys = (*KEYS, SeriesKey(Kind.GRAD_REDUCED, "w"), SeriesKey(Kind.ACTV_GRAD, "h", "output.0"))
    rows = ({0: scale, 1: skipped, 2: [1.0, bad], 3: bad} for scale, skipped in told for bad in (_gradient(skipped),))
    return feed(RuleEngine(load_rules()), keys, (block(step, row) for step, row in enumerate(rows)))


def _gradient(skipped: float) -> float:
    return float("inf") if skipped else 0.5


@pytest.mark.parametrize(
    "told",
    [
        scales(range(18), num_steps=400, first=2.0**32),
        scales([*range(16), *range(70, 900, 60)], num_steps=1000, first=2.0**32, window=50),
    ],
    ids=["search", "up and down"],
)
def test_gradients_of_steps_that_a_scaler_skipped_as_it_is_meant_to_are_no_alert(
    told: list[tuple[float, float]],
) -> None:
    assert with_gradient(told) == []


def test_gradient_that_is_lost_without_a_skip_is_told_also_where_there_is_a_scaler() -> None:
    told = scales([5, 6], num_steps=20, first=2.0**16)
    keys = (*KEYS, SeriesKey(Kind.GRAD_REDUCED, "w"))
    rows = [
        {0: scale, 1: skipped, 2: float("nan") if step == 12 else 1.0} for step, (scale, skipped) in enumerate(told)
    ]

    found = feed(RuleEngine(load_rules()), keys, (block(step, row) for step, row in enumerate(rows)))

    assert [(alert.rule, alert.first_step) for alert in found][:1] == [("gradient-nonfinite", 12)]


@pytest.mark.parametrize("scale", [1.0, None], ids=["nothing left to lower", "no scaler"])
def test_step_that_was_skipped_without_a_scale_to_lower_is_a_lost_one(scale: float | None) -> None:
    keys = (KEYS[1], SeriesKey(Kind.GRAD_REDUCED, "w"), KEYS[0])
    rows: dict[int, float] = {0: 1.0, 1: float("nan")} | ({} if scale is None else {2: scale})

    (found,) = feed(RuleEngine(load_rules()), keys, [block(7, rows)])

    assert (found.rule, found.first_step) == ("gradient-nonfinite", 7)


def test_too_many_skipped_steps_are_told_although_each_of_them_was_meant() -> None:
    found = with_gradient([(2.0**10, float(step % 3 == 0)) for step in range(120)])

    assert [(alert.rule, alert.step) for alert in found] == [("steps-skipped-often", 99)]
    assert found[0].message.startswith("steps-skipped-often: the framework skips 34 % of the steps, step 99")


def ratios(values: Sequence[float]) -> list[Alert]:
    key = SeriesKey(Kind.STEP, "clip_ratio")
    return feed(RuleEngine(load_rules()), (key,), (block(step, {0: value}) for step, value in enumerate(values)))


def test_clipping_that_suddenly_leaves_next_to_nothing_is_told_on_the_third_step() -> None:
    (alert,) = ratios([1.0] * 110 + [0.002] * 20)

    assert (alert.rule, alert.first_step, alert.step) == ("clipping-collapse", 110, 112)
    assert "clipping leaves 0.002 of the gradients" in alert.message


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * 110 + [0.1] * 20,
        [1.0] * 110 + [0.002, 0.002, 1.0] * 20,
        [0.02, 1.0, 0.1, 0.5] * 40 + [0.01] * 20,
        [1.0] * 10 + [0.01] * 200,
        [float("nan")] * 100 + [0.5] * 50,
    ],
    ids=["a tenth", "two in a row", "always up and down", "early", "no gradient"],
)
def test_clipping_of_what_is_larger_now_and_then_gives_no_alert(values: Sequence[float]) -> None:
    assert ratios(values) == []
