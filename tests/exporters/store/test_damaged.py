"""Damage to segments costs what stood in them, and a fault of the file system costs nothing."""

import errno
import os

import duckdb
import pytest

from tests.exporters.store.test_retention import FOREVER, store
from trainermon.core.errors import StoreError
from trainermon.exporters.store import damaged
from trainermon.exporters.store.damaged import set_aside_truncated, set_aside_unreadable
from trainermon.exporters.store.retention import compact
from trainermon.exporters.store.segments import cover, last_number, read_metadata, read_newest
from trainermon.exporters.store.store import open_run
from trainermon.exporters.store.tables import add_run

STEPS = range(4)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def footer_of(content):
    """Return where the footer stands: its length is in the 4 bytes before the magic word at the end."""
    return slice(len(content) - 8 - int.from_bytes(content[-8:-4], "little"), len(content) - 8)


def scramble_footer(path):
    """Leave length and both ends as they are: only who parses the footer sees that it is none."""
    content = bytearray(path.read_bytes())
    place = footer_of(content)
    content[place] = b"\xff" * (place.stop - place.start)
    path.write_bytes(content)


def scramble_rows(path):
    """Leave the footer as it is: only who reads the rows sees that there are none."""
    content = bytearray(path.read_bytes())
    place = slice(4, footer_of(content).start)
    content[place] = b"\xff" * (place.stop - place.start)
    path.write_bytes(content)


def make_directory(path):
    path.unlink()
    path.mkdir()


@pytest.fixture
def segments(tmp_path):
    """A store with a segment for each step."""
    folder = tmp_path / "run/nodes/node/segments"
    for step in STEPS:
        store(folder, [step])
    return folder


def stored_steps(segments):
    with open_run(segments.parents[2]) as connection:
        return [step for (step,) in connection.execute("SELECT DISTINCT step FROM all_stats ORDER BY 1").fetchall()]


@pytest.mark.parametrize(("damage", "place"), [(truncate, 0), (empty, 1), (make_directory, 2), (truncate, 3)])
def test_a_segment_without_an_end_is_set_aside_and_no_other(segments, damage, place):
    path = cover(segments)[place].path
    damage(path)
    rest = [step for step in STEPS if step != place]
    assert stored_steps(segments) == rest  # who only reads leaves it out

    set_aside_truncated(segments)

    assert damaged.damaged(segments) == [path.with_name(f"{path.name}.damaged")]
    assert stored_steps(segments) == rest
    assert last_number(segments) == len(STEPS)  # its number is not given again


def test_the_newest_segments_are_set_aside_until_one_can_be_read(segments):
    for segment in cover(segments)[2:]:
        scramble_footer(segment.path)

    set_aside_truncated(segments)

    assert len(damaged.damaged(segments)) == 2
    assert read_newest(segments)[0] == 2


def test_with_every_segment_damaged_the_store_is_empty(segments):
    for segment in cover(segments):
        truncate(segment.path)

    set_aside_truncated(segments)

    assert cover(segments) == []
    assert stored_steps(segments) == []


def test_a_segment_whose_rows_cannot_be_read_is_set_aside_by_the_merge(segments):
    path = cover(segments)[1].path
    scramble_rows(path)
    more = range(len(STEPS), 12)  # enough for a merge
    for step in more:
        store(segments, [step])

    compact(segments, FOREVER, now_s=100.0)

    assert [file.name for file in damaged.damaged(segments)] == [f"{path.name}.damaged"]
    assert stored_steps(segments) == [0, 2, 3, *more]


def test_a_segment_of_another_release_is_left_as_it_is(segments):
    path = cover(segments)[-1].path
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (SELECT 1 AS a) TO '{path}' (FORMAT parquet, KV_METADATA {{trainermon: '{{\"format\": 9}}'}})"
        )

    with pytest.raises(StoreError, match="found format 9, expected 1"):
        set_aside_truncated(segments)

    assert damaged.damaged(segments) == []


def test_a_segment_that_was_merged_away_is_not_missed(segments):
    gone = cover(segments)[0].path
    gone.unlink()

    assert not set_aside_unreadable([gone])
    assert damaged.damaged(segments) == []


@pytest.mark.parametrize(("number", "is_set_aside"), [(errno.EIO, True), (errno.ESTALE, False)])
def test_a_bad_block_is_damage_and_a_file_system_that_does_not_answer_is_none(
    segments, monkeypatch, number, is_set_aside
):
    path = cover(segments)[-1].path

    def fail(wanted):
        raise StoreError(f"{wanted}: refused") from OSError(number, os.strerror(number))

    def no_bytes(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(type(path), "open", no_bytes)
    if is_set_aside:
        assert set_aside_unreadable([path], fail)
    else:
        with pytest.raises(StoreError, match="refused"):
            set_aside_unreadable([path], fail)

    assert path.exists() is not is_set_aside


def test_trouble_is_not_taken_for_damage(segments, monkeypatch):
    path = cover(segments)[0].path

    def stale(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(type(path), "open", stale)
    with pytest.raises(OSError, match="Stale"):
        set_aside_truncated(segments)
    with pytest.raises(StoreError, match=r"a segment cannot be read: .*Stale"):
        stored_steps(segments)
    assert damaged.damaged(segments) == []


def test_the_footers_of_a_run_are_checked_one_by_one_where_one_is_wrong(segments, caplog):
    path = cover(segments)[1].path
    scramble_footer(path)

    assert stored_steps(segments) == [0, 2, 3]
    assert f"{path} is damaged and left out" in caplog.text


def test_another_run_is_a_view_beside_the_first(segments, tmp_path):
    other = tmp_path / "other/nodes/node/segments"
    store(other, [7, 8])

    with open_run(segments.parents[2]) as connection:
        add_run(connection, tmp_path / "other", "theirs")
        with pytest.raises(StoreError, match="no such run directory"):
            add_run(connection, tmp_path / "gone", "nobodys")

        assert connection.execute("SELECT DISTINCT step FROM theirs ORDER BY 1").fetchall() == [(7,), (8,)]
        assert connection.execute("SELECT max(step) FROM stats").fetchall() == [(3,)]


def test_the_newest_segment_that_has_an_end_is_the_newest(segments):
    truncate(cover(segments)[-1].path)

    number, metadata = read_newest(segments)

    assert number == len(STEPS) - 1
    assert metadata == read_metadata(cover(segments)[2].path)
