"""The default rules on loss scales and skipped steps as frameworks have them: a search at the start is no alarm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from tests.alerts.series import block, feed
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.monitor.values import Alert, Kind, SeriesKey

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
