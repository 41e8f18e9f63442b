"""On which steps histograms are taken."""

from types import SimpleNamespace
from typing import Any

import pytest

from trainermon.core.config.schema import HistogramsConfig
from trainermon.core.schedule import Schedule
from trainermon.core.values import Kind
from trainermon.monitor.taps.histograms import ChosenHistograms

TABLE: Any = SimpleNamespace(keys=())


@pytest.mark.parametrize("first", [0, 1, 99, 100, 153, 1007])
@pytest.mark.parametrize(("step_interval", "histogram_interval"), [(1, 100), (10, 100), (7, 50), (30, 20)])
def test_of_the_collected_steps_the_first_in_each_interval_is_due(first, step_interval, histogram_interval):
    config = HistogramsConfig(kinds=(str(Kind.GRAD_REDUCED),), step_interval=histogram_interval)
    chosen = ChosenHistograms(config, TABLE, first=first, step_interval=step_interval)
    schedule = Schedule(first, step_interval)
    collected = [step for step in range(first, first + 1000) if schedule.due(step)]
    intervals: dict[int, int] = {}
    for step in collected:
        intervals.setdefault(step // histogram_interval, step)

    assert [step for step in collected if chosen.is_due(step)] == list(intervals.values())
