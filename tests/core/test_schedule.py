"""Which steps are collected."""

from hypothesis import given
from hypothesis import strategies as st

from trainermon.core.schedule import Schedule


@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 9))
def test_due_steps_are_an_arithmetic_progression(start, interval, times):
    schedule = Schedule(start, interval, times)

    due = [step for step in range(200) if schedule.due(step)]

    assert due == list(range(start, start + times * interval, interval))
