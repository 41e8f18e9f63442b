"""On steps of milliseconds a scheduler makes any rank late now and then: none is called a straggler for it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.alerts.across_ranks.test_across import DURATION, FIRING, WAIT, Job, places, straggler_rule


@given(st.integers(0, 2**32), st.floats(0.002, 0.03), st.integers(2, 4))
@settings(max_examples=5, deadline=None)
def test_what_a_scheduler_does_to_short_steps_makes_no_rank_a_straggler(seed: int, work_s: float, num: int) -> None:
    random, job = np.random.default_rng(seed), Job(straggler_rule(), places(num), [DURATION, WAIT])
    late: list[int] = []  # the rank that shares its core, for a while

    def rows(number: int) -> dict[int, dict[int, float]]:
        if len(late) <= number:
            late.extend([int(random.integers(num))] * int(random.integers(5, 80)))
        own_s = work_s * random.lognormal(0.0, 0.05, num)
        own_s[late[number]] += random.uniform(0.015, 0.024)
        whole_s = own_s.max() + 0.001
        return {rank: {0: whole_s, 1: whole_s - own_s[rank]} for rank in range(num)}

    assert job.run(range(200), rows) == []


@given(st.integers(0, 2**32), st.floats(0.005, 0.015), st.integers(2, 4))
@settings(max_examples=5, deadline=None)
def test_ranks_that_share_too_few_cores_in_turns_are_no_stragglers(seed: int, work_s: float, num: int) -> None:
    random, job = np.random.default_rng(seed), Job(straggler_rule(), places(num), [DURATION, WAIT])
    times = 6  # as slow is a process that gets a sixth of a core
    turns: list[int] = []  # which rank is the slow one, for about a second each

    def rows(number: int) -> dict[int, dict[int, float]]:
        while len(turns) <= number:
            slow = (turns[-1] + 1) % num if turns else 0
            turns.extend([slow] * int(random.uniform(0.5, 1.2) / (times * work_s)))
        own_s = work_s * random.lognormal(0.0, 0.05, num)
        own_s[turns[number]] *= times
        whole_s = own_s.max() + 0.001
        return {rank: {0: whole_s, 1: whole_s - own_s[rank]} for rank in range(num)}

    assert job.run(range(200), rows) == []


def test_a_rank_that_is_slow_for_longer_than_a_scheduler_lets_wait_is_named_on_short_steps_too() -> None:
    job = Job(straggler_rule(), places(4), [DURATION, WAIT])

    def rows(number: int) -> dict[int, dict[int, float]]:
        own_s = [0.02, 0.02, 0.02, 0.02 if number < 50 else 0.05]
        return {rank: {0: 0.051, 1: 0.051 - own} for rank, own in enumerate(own_s)}

    assert [(alert.rank, alert.state) for alert in job.run(range(100), rows)] == [(3, FIRING)]
