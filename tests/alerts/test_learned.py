"""While a task is as good as learned, a jump that one sample makes is no alert; before that it is one."""

import math

import numpy as np
import pytest

from tests.alerts.series import block, feed, grad, rules
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.learned import NUM_FIRST, SHARE
from trainermon.core.values import Alert, AlertState, Kind, SeriesKey

KEYS = (SeriesKey(Kind.LOSS, "loss"), grad("w"))
RULE = """
rules:
  - name: above
    severity: warning
    on: {kind: grad_reduced, statistic: absmax, learned: %s}
    when: {threshold: {above: 5}}
    summary: too large
"""


def alerts(tmp_path, losses, *, learned="false", jumps=()) -> list[Alert]:
    engine = RuleEngine(rules(tmp_path, RULE % learned))
    blocks = (block(step, {0: loss, 1: 10.0 if step in jumps else 1.0}) for step, loss in enumerate(losses))
    return feed(engine, KEYS, blocks)


def told(found: list[Alert]) -> list[tuple[AlertState, int]]:
    return [(alert.state, alert.step) for alert in found]


@pytest.mark.parametrize(
    ("last", "is_told"), [(2.3 * SHARE * 0.99, False), (2.3 * SHARE * 1.01, True), (math.nan, True)]
)
def test_a_jump_counts_unless_the_loss_is_below_the_share_of_its_first_values(tmp_path, last, is_told):
    losses = [2.3] * NUM_FIRST + [last] * 20

    assert bool(alerts(tmp_path, losses, jumps={NUM_FIRST + 5})) is is_told
    assert alerts(tmp_path, losses, jumps={NUM_FIRST + 5}, learned="true")


def test_an_alert_that_lasts_is_told_once_the_loss_is_up_again(tmp_path):
    losses = [2.3] * NUM_FIRST + [0.01] * 10 + [1.0] * 10
    jumps = range(NUM_FIRST + 5, NUM_FIRST + 15)

    found = alerts(tmp_path, losses, jumps=jumps)

    assert told(found)[0] == (AlertState.FIRING, NUM_FIRST + 10)
    assert found[0].first_step == NUM_FIRST + 5


def test_an_alert_that_was_told_ends_in_a_learned_task_too(tmp_path):
    losses = [2.3] * (NUM_FIRST + 8) + [0.01] * 20

    found = alerts(tmp_path, losses, jumps={NUM_FIRST + 7})

    assert [state for state, _ in told(found)] == [AlertState.FIRING, AlertState.RESOLVED]


@pytest.mark.parametrize(("first", "last"), [(0.0, 0.0), (-2.0, -0.002), (-2.0, -3.0), (2.0, -3.0)])
def test_a_loss_that_is_not_above_zero_is_never_learned(tmp_path, first, last):
    losses = [first] * NUM_FIRST + [last] * 20

    assert alerts(tmp_path, losses, jumps={NUM_FIRST + 5})


def test_one_bad_batch_among_the_first_does_not_count(tmp_path):
    losses = [1e6, *[2.3] * (NUM_FIRST - 1), *[1.0] * 20]

    assert alerts(tmp_path, losses, jumps={NUM_FIRST + 5})


def test_losses_are_added_up(tmp_path):
    keys = (*KEYS, SeriesKey(Kind.LOSS, "other"))
    engine = RuleEngine(rules(tmp_path, RULE % "false"))
    rng = np.random.default_rng(0)
    values = [(2.0, 2.0)] * NUM_FIRST + [(0.01, 1.0 + 0.1 * rng.random()) for _ in range(20)]

    jump = NUM_FIRST + 5
    blocks = (block(s, {0: one, 2: other, 1: 10.0 if s == jump else 1.0}) for s, (one, other) in enumerate(values))

    assert feed(engine, keys, blocks)
