"""The rules on accelerators fire on what a faulty one says for long enough, and on nothing that a sound one says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.alerts.series import block, feed
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.values import Alert, AlertState, Kind, SeriesKey

NAMES = ("accelerator_throttled", "accelerator_memory_ratio", "accelerator_utilization", "accelerator_power_watts")
KEYS = tuple(SeriesKey(Kind.STEP, name) for name in NAMES)
SOUND = (0.0, 0.97, 0.98, 690.0)


def alerts(steps: Sequence[tuple[float, ...]]) -> list[Alert]:
    rows = [dict(enumerate(values)) for values in steps]
    return feed(RuleEngine(load_rules()), KEYS, (block(step, row) for step, row in enumerate(rows)))


def firing(steps: Sequence[tuple[float, ...]]) -> list[tuple[str, int]]:
    return [(alert.rule, alert.step) for alert in alerts(steps) if alert.state is AlertState.FIRING]


def test_a_sound_accelerator_gives_no_alert() -> None:
    busy_now_and_then = [(0.0, 0.97, float(step % 7 > 0), 100.0 + 500 * (step % 7 > 0)) for step in range(200)]
    assert alerts([SOUND] * 50 + busy_now_and_then) == []


@pytest.mark.parametrize(
    ("place", "value", "rule", "steps"),
    [(0, 1.0, "accelerator-throttled", 10), (1, 0.995, "accelerator-memory-full", 20)],
)
def test_a_fault_that_lasts_is_told(place: int, value: float, rule: str, steps: int) -> None:
    bad = (*SOUND[:place], value, *SOUND[place + 1 :])
    assert firing([SOUND] * 30 + [bad] * (steps - 1) + [SOUND] * 30) == []
    assert firing([SOUND] * 30 + [bad] * (steps + 5)) == [(rule, 30 + steps - 1)]
