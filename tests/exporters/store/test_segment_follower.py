"""What was committed is read once, also across restarts and merges."""

import json
import shutil
import stat

import numpy as np
import pytest

from tests.exporters import recorded_run
from tests.exporters.recorded_run import GRADIENTS, KEYS, commit
from trainermon.core.errors import StoreError
from trainermon.core.values import STATISTICS
from trainermon.exporters.store.retention import RetentionPolicy, compact
from trainermon.exporters.store.segment_follower import SegmentFollower


@pytest.fixture
def segments(tmp_path):
    return tmp_path / "segments"


def follower_of(segments):
    return SegmentFollower(segments, segments.parent / "state.json")


def read_all(follower):
    """Return (rank, attempt, step) of everything that waits, and note it as done."""
    found = []
    for segment in follower.waiting():
        found += [(header.coordinates.rank, header.attempt, block.step) for header, block in follower.read(segment)]
        follower.done(segment)
    return found


def places(steps, *, attempt=1, ranks=(0, 1)):
    return {(rank, attempt, step) for step in steps for rank in ranks}


def test_every_step_comes_once_in_order_and_with_its_numbers(segments):
    commit(segments, range(3))
    commit(segments, range(3, 5))
    follower = follower_of(segments)

    first, second = follower.waiting()
    blocks = follower.read(first)

    assert [(header.coordinates.rank, block.step) for header, block in blocks] == [
        (rank, step) for step in range(3) for rank in range(2)
    ]
    for header, block in blocks:
        table = follower.table(header.coordinates.rank)
        expected = recorded_run.block(header.coordinates.rank, block.step)
        found = {table[place].key: column.tolist() for place, column in zip(block.series, block.values.T, strict=True)}
        assert found == {key: expected.values[:, number].tolist() for number, key in enumerate(KEYS)}
        assert block.time_s == expected.time_s
    follower.done(first)
    assert follower.waiting() == [second]
    assert follower.waiting_bytes() == second.path.stat().st_size


def test_a_restart_goes_on_after_what_was_done(segments):
    commit(segments, range(3))
    first = follower_of(segments)
    assert set(read_all(first)) == places(range(3))

    commit(segments, range(3, 5))
    second = follower_of(segments)
    assert set(read_all(second)) == places(range(3, 5))
    assert follower_of(segments).waiting() == []


def test_what_was_read_but_not_done_comes_again_with_the_same_table(segments):
    commit(segments, range(3))
    interrupted = follower_of(segments)
    interrupted.read(*interrupted.waiting())

    again = follower_of(segments)
    blocks = again.read(*again.waiting())

    assert len(blocks) == 6
    assert again.table(1) == interrupted.table(1)
    assert [row.placement.in_global_norm for row in again.table(1)] == [False] * len(KEYS)
    assert {row.num_elements for row in again.table(0) if row.key in GRADIENTS} == {30}


def test_a_table_is_remembered_although_no_segment_has_all_of_it(segments):
    commit(segments, [0])
    follower = follower_of(segments)
    read_all(follower)
    before = follower.table(0)[:]
    shutil.rmtree(segments)

    commit(segments, [1], ranks=[1])
    commit(segments, [2])
    again = follower_of(segments)
    read_all(again)

    assert again.table(0) == before


def test_a_merge_of_done_and_new_segments_gives_the_new_steps_only(segments):
    for first in range(0, 24, 2):
        commit(segments, range(first, first + 2))
    follower = follower_of(segments)
    for segment in follower.waiting()[:4]:
        follower.read(segment)
        follower.done(segment)

    compact(segments, RetentionPolicy(), now_s=recorded_run.FIRST_TIME_S)
    assert len(follower.waiting()) == 1

    assert set(read_all(follower)) == places(range(8, 24))


def test_steps_of_a_later_attempt_come_although_they_are_smaller(segments):
    commit(segments, range(5, 8))
    follower = follower_of(segments)
    read_all(follower)

    commit(segments, range(6, 8), attempt=2)

    assert set(read_all(follower)) == places(range(6, 8), attempt=2)


def test_a_segment_that_is_gone_is_an_error_and_the_next_look_finds_what_took_its_place(segments):
    commit(segments, range(2))
    follower = follower_of(segments)
    (segment,) = follower.waiting()
    segment.path.rename(segments / "0000000001-0000000003.parquet")

    with pytest.raises(StoreError, match="0000000001-0000000001"):
        follower.read(segment)

    assert set(read_all(follower)) == places(range(2))


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', '{"format": 1, "last": "x"}'])
def test_a_state_that_cannot_be_read_is_refused_with_what_to_do(segments, text):
    (segments.parent / "state.json").write_text(text)

    with pytest.raises(StoreError, match=r"state\.json.*remove it to send everything again"):
        follower_of(segments)


def test_the_state_is_private_and_small_beside_a_segment(segments):
    commit(segments, range(2))
    read_all(follower_of(segments))

    state = segments.parent / "state.json"
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert json.loads(state.read_text())["newest"] == {"0": [1, 1], "1": [1, 1]}
    assert [path.name for path in segments.parent.iterdir() if path.name.startswith(".")] == []


def test_rows_of_no_element_have_a_place_too(segments):
    commit(segments, [0])
    follower = follower_of(segments)

    ((header, block), *_) = follower.read(*follower.waiting())

    assert np.asarray(block.values).shape == (len(STATISTICS), len(KEYS))
    assert (np.asarray(block.series) >= 0).all()
    assert header.coordinates.rank == 0


def test_a_file_system_without_locks_is_followed_all_the_same(segments, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)

    assert follower_of(segments).waiting() == []
    assert "cannot be locked" in caplog.text
