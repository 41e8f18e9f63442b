"""For how long a rank may be silent: least limits by phase, and what is learnt."""

import math

import pytest

from trainermon.agent.hang.limits import WINDOW, HangLimits
from trainermon.core.config import HangConfig
from trainermon.core.control import Phase
from trainermon.core.errors import ConfigError

SETTINGS = HangConfig(step_s=10, checkpoint_s=100, evaluation_s=50, setup_s=1000, factor=5, max_s=400)


def learnt(*silences_s, phase=Phase.STEP):
    limits = HangLimits(SETTINGS)
    for silent_s in silences_s:
        limits.learn(0, phase, silent_s)
    return limits


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [
        (Phase.SETUP, 1000),
        (Phase.STEP, 10),
        (Phase.OPTIMIZER, 10),
        (Phase.CHECKPOINT, 100),
        (Phase.EVALUATION, 50),
        (Phase.REPLAY, 100),
        (Phase.DUMP, 100),
        (Phase.CLOSED, math.inf),
        (Phase.DETACHED, math.inf),
        (Phase.FAILED, math.inf),
    ],
)
def test_before_anything_is_known_the_least_limit_of_the_phase_holds(phase, limit_s):
    assert HangLimits(SETTINGS).limit_s(0, phase) == limit_s


def test_every_phase_has_a_limit():
    assert all(HangLimits(SETTINGS).limit_s(0, phase) > 0 for phase in Phase)


def test_long_steps_raise_the_limit_of_steps_only_and_of_this_rank_only():
    limits = learnt(30, 30)

    assert limits.limit_s(0, Phase.STEP) == 150
    assert limits.limit_s(0, Phase.EVALUATION) == 50
    assert limits.limit_s(1, Phase.STEP) == 10


def test_one_standstill_that_ended_by_itself_does_not_become_usual():
    assert learnt(1, 1, 1, 300).limit_s(0, Phase.STEP) == 10
    assert learnt(1, 1, 60, 300).limit_s(0, Phase.STEP) == 300  # twice is usual


def test_limit_is_capped_but_leaves_room_above_what_is_usual():
    assert learnt(90, 90).limit_s(0, Phase.STEP) == 400
    assert learnt(300, 300).limit_s(0, Phase.STEP) == 600


def test_what_was_usual_is_forgotten():
    assert learnt(60, 60, *[1.0] * WINDOW).limit_s(0, Phase.STEP) == 10


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match=r"hang.step_s: found 0, expected a number of seconds above 0"):
        HangConfig(step_s=0)
    with pytest.raises(ConfigError, match=r"hang.factor: found 0.5, expected 1 or more"):
        HangConfig(factor=0.5)
