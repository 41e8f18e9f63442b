"""How readings become rows of steps: numpy says what the moments are."""

from __future__ import annotations

import numpy as np
import pytest

from trainermon.agent.accelerators.readings import AcceleratorReading
from trainermon.agent.accelerators.rows import AcceleratorRows
from trainermon.agent.follower import FollowedRecord
from trainermon.core.journal import START, BlockRecord, EndRecord, Header
from trainermon.core.values import STATISTICS, Coordinates, Kind, SeriesKey, StatBlock

KEYS = (SeriesKey(Kind.LOSS, "loss"), SeriesKey(Kind.STEP, "duration_seconds"))
LATER = SeriesKey(Kind.STEP, "accuracy")


def header(series=KEYS, *, rank=0, attempt=1):
    return Header(
        run_id="run",
        attempt=attempt,
        coordinates=Coordinates(rank=rank, world_size=2),
        host="node",
        pid=1,
        started_s=0.0,
        series=series,
        placements=(None,) * len(series),
    )


def step(number, about, *, ids=(0, 1), time_s=None):
    values = np.arange(8.0 * len(ids)).reshape(8, len(ids)) + 100 * number
    block = StatBlock(
        step=number, time_s=number if time_s is None else time_s, series=np.array(ids, np.uint32), values=values
    )
    return FollowedRecord(about, BlockRecord(cursor=START, block=block))


def reading(watt, **values):
    return AcceleratorReading(uuid="GPU-a", index=0, power_watts=watt, **values)


def rows(followed):
    """Return the moments of each series of a block by name."""
    about, record = followed
    block = record.block
    return {about.series[number].name: block.values[:, place] for place, number in enumerate(block.series)}


def test_a_step_has_the_readings_of_its_time():
    added = AcceleratorRows(max_age_s=10)
    for time_s, watt in ((0.5, 300.0), (1.2, 400.0), (1.6, 0.0), (2.5, 600.0)):
        added.note(0, time_s, reading(watt))
    added.note(0, 2.9, reading(700.0, utilization=0.5))
    about = header()

    found = [rows(added.extend(step(number, about))) for number in (1, 2, 3, 4)]

    for row, watts in zip(found, ([300.0], [400.0, 0.0], [600.0, 700.0], [700.0]), strict=True):
        told = dict(zip(STATISTICS, row["accelerator_power_watts"], strict=True))
        x = np.array(watts)
        expected = (len(x), x.min(), x.max(), x.sum(), (x**2).sum(), (x == 0).sum(), 0, 0)
        assert told == pytest.approx(dict(zip(STATISTICS, expected, strict=True)))
    assert ["accelerator_utilization" in row for row in found] == [False, False, True, True]


def test_what_the_rank_wrote_stays_as_it_is():
    added = AcceleratorRows(max_age_s=10)
    about = header()
    plain = step(1, about)
    assert added.extend(plain) is plain  # nothing was read yet
    added.note(0, 1.5, reading(300.0))
    extended = added.extend(step(2, about))
    grown = header((*KEYS, LATER))
    after = added.extend(step(3, grown, ids=(2, 0, 1)))
    names = [key.name for key in after.header.series]
    assert names == ["loss", "duration_seconds", "accelerator_power_watts", "accuracy"]
    assert extended.header.series == after.header.series[:3]  # a table only grows
    original = step(3, grown, ids=(2, 0, 1)).record.block
    for name, column in zip(("accuracy", "loss", "duration_seconds"), original.values.T, strict=True):
        np.testing.assert_array_equal(rows(after)[name], column)
    assert len(after.header.placements) == len(after.header.series)


def test_the_header_stays_the_same_object():
    added = AcceleratorRows(max_age_s=10)
    added.note(0, 0.5, reading(300.0))
    about, behind = header(), header()  # the store may follow with a reader of its own
    first, second = added.extend(step(1, about)).header, added.extend(step(1, behind)).header
    for number in (2, 3):
        assert added.extend(step(number, about)).header is first
        assert added.extend(step(number, behind)).header is second


def test_a_step_that_is_read_twice_is_the_same():
    added = AcceleratorRows(max_age_s=10)
    about = header()
    added.note(0, 0.5, reading(300.0))
    first = rows(added.extend(step(1, about)))
    added.note(0, 0.7, reading(900.0))
    again = rows(added.extend(step(1, about)))
    assert {name: row.tolist() for name, row in first.items()} == {name: row.tolist() for name, row in again.items()}


def test_old_readings_count_no_longer():
    added = AcceleratorRows(max_age_s=2)
    about = header()
    added.note(0, 1.0, reading(300.0))
    has_row = ["accelerator_power_watts" in rows(added.extend(step(number, about))) for number in (1, 2, 3, 4)]
    assert has_row == [True, True, True, False]


def test_ranks_and_attempts_are_apart():
    added = AcceleratorRows(max_age_s=10)
    added.note(0, 0.5, reading(300.0))
    other = step(1, header(rank=1))
    assert added.extend(other) is other
    assert len(added.extend(step(1, header())).header.series) == 3
    again = added.extend(step(1, header((LATER,), attempt=2), ids=(0,)))
    assert [key.name for key in again.header.series] == ["accuracy", "accelerator_power_watts"]
    end = FollowedRecord(header(attempt=2), EndRecord(cursor=START))
    assert added.extend(end).record is end.record
