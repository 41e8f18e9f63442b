"""The agent's side of the journal."""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from pathlib import Path

import pytest

from tests.core.journals import append_warning, file_of, make_block, make_header, make_keys, open_writer, steps
from trainermon.core.errors import JournalError
from trainermon.core.journal import (
    START,
    BlockRecord,
    Cursor,
    EndRecord,
    EventRecord,
    HeaderRecord,
    JournalWriter,
    SeriesRecord,
    list_files,
)

HEAD_BYTES = 32


def frame_offsets(path: Path) -> list[int]:
    """Return where the frames of an undamaged file begin, and where the last one ends."""
    content = path.read_bytes()
    offsets = [0]
    while offsets[-1] < len(content):
        offsets.append(offsets[-1] + HEAD_BYTES + struct.unpack_from("<I", content, offsets[-1] + 16)[0])
    return offsets


def cut(path: Path, length: int) -> None:
    os.truncate(path, length)


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def write_three_files(directory: Path) -> None:
    """Leave three finished files that hold steps 0-3, 4-7 and 8-11 and a fourth, empty one."""
    for attempt in range(3):
        writer = JournalWriter(
            directory, make_header(attempt=attempt, series=tuple(make_keys(3)), placements=(None,) * 3)
        )
        for step in range(4 * attempt, 4 * attempt + 4):
            writer.append_block(make_block(step))
        writer.close()
    JournalWriter(directory, make_header(attempt=3)).close()


def test_nothing_is_there_before_the_rank_starts(tmp_path, open_reader):
    assert open_reader().poll() == []
    assert open_reader(directory=tmp_path / "gone").poll() == []


def test_records_come_as_they_are_written(tmp_path, open_reader):
    reader = open_reader()
    writer = open_writer(tmp_path)
    assert [type(record) for record in reader.poll()] == [HeaderRecord, SeriesRecord]
    assert reader.poll() == []

    for step in range(5):
        writer.append_block(make_block(step))
        assert steps(reader.poll()) == [step]
        assert reader.poll() == []
        assert reader.cursor == writer.cursor

    append_warning(writer)
    writer.close()
    assert [type(record) for record in reader.poll()] == [EventRecord, EndRecord]
    assert reader.cursor == writer.cursor


def test_cursors_are_ordered_and_stand_behind_their_record(tmp_path, open_reader):
    writer = open_writer(tmp_path, file_bytes=1000, budget_bytes=1 << 20)
    ends = []
    for step in range(20):
        writer.append_block(make_block(step))
        ends.append(writer.cursor)
    writer.close()

    records = open_reader().poll()

    assert [record.cursor for record in records if isinstance(record, BlockRecord)] == ends
    assert all(first.cursor < second.cursor for first, second in itertools.pairwise(records))
    assert ends[0] > START


def test_a_reader_goes_on_from_any_cursor_with_the_series_known_there(tmp_path, open_reader):
    writer = open_writer(tmp_path, file_bytes=1500, budget_bytes=1 << 20)
    for step in range(20):
        writer.append_block(make_block(step))
        if step % 3 == 0:
            writer.add_series(make_keys(1, f"late{step}."), [None])
    writer.close()
    records = open_reader().poll()
    known = 0

    for index, record in enumerate(records):
        if isinstance(record, HeaderRecord):
            known = len(record.header.series)
        elif isinstance(record, SeriesRecord):
            known += len(record.keys)
        first, *others = open_reader(record.cursor).poll() or [None]
        assert isinstance(first, HeaderRecord), "the table comes first"
        assert first.cursor == record.cursor
        assert len(first.header.series) == len(first.header.placements) == known
        assert [other.cursor for other in others] == [other.cursor for other in records[index + 1 :]]


def test_a_poll_returns_about_as_much_as_asked_and_at_least_one_record(tmp_path, open_reader):
    writer = open_writer(tmp_path, num_series=100)
    for step in range(10):
        writer.append_block(make_block(step, 100))
    writer.close()
    reader = open_reader()

    sizes = []
    while records := reader.poll(max_bytes=1):
        sizes.append(len(records))
    assert sizes == [1] * 13

    reader = open_reader()
    assert steps(reader.poll(max_bytes=40_000)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("window_bytes", [1, 4, 5, 31, 33, 1000])
def test_a_window_smaller_than_a_frame_is_not_a_torn_tail(tmp_path, open_reader, window_bytes):
    write_three_files(tmp_path)

    reader = open_reader(window_bytes=window_bytes)

    assert steps(reader.poll()) == list(range(12))
    assert (reader.torn_tails, reader.corrupt, reader.lost_records) == (0, 0, 0)


def test_a_header_longer_than_the_window_works(tmp_path, open_reader):
    writer = open_writer(tmp_path, num_series=5000)
    writer.close()
    writer = JournalWriter(tmp_path, make_header(attempt=2, series=tuple(make_keys(5000)), placements=(None,) * 5000))
    writer.append_block(make_block(1, 5000))
    writer.close()

    reader = open_reader(window_bytes=4096)
    records = reader.poll(max_bytes=1) + reader.poll(max_bytes=1) + reader.poll()

    headers = [record.header for record in records if isinstance(record, HeaderRecord)]
    assert [len(header.series) for header in headers] == [0, 5000]
    assert frame_offsets(file_of(tmp_path))[1] > 100_000
    assert steps(records) == [1]


@pytest.mark.parametrize("missing", [1, 100, 227, 228, 229, 245, 259])
def test_an_incomplete_frame_in_the_newest_file_is_waited_for(tmp_path, open_reader, missing):
    writer = open_writer(tmp_path)
    writer.append_block(make_block(0))
    writer.append_block(make_block(1))
    content = file_of(tmp_path).read_bytes()
    cut(file_of(tmp_path), len(content) - missing)
    reader = open_reader()

    assert steps(reader.poll()) == [0]
    assert reader.poll() == []
    assert reader.torn_tails == 0

    file_of(tmp_path).write_bytes(content)
    assert steps(reader.poll()) == [1]
    assert (reader.torn_tails, reader.corrupt, reader.lost_records) == (0, 0, 0)
    writer.close()


@pytest.mark.parametrize("missing", [1, 100, 227, 228, 229, 245, 259])
def test_an_incomplete_frame_at_the_end_of_an_older_file_is_cut(tmp_path, open_reader, missing):
    writer = open_writer(tmp_path)
    writer.append_block(make_block(0))
    writer.append_block(make_block(1))
    cut(file_of(tmp_path), file_of(tmp_path).stat().st_size - missing)
    reader = open_reader()
    assert steps(reader.poll()) == [0]

    second = JournalWriter(tmp_path, make_header(attempt=2, series=tuple(make_keys(3)), placements=(None,) * 3))
    second.append_block(make_block(2))
    second.close()

    assert steps(reader.poll()) == [2]
    assert (reader.torn_tails, reader.corrupt) == (1, 0)


@pytest.mark.parametrize("num_bytes", [*range(1, 70), 5000])
def test_an_intact_frame_is_found_wherever_it_lies(tmp_path, open_reader, num_bytes):
    writer = open_writer(tmp_path)
    with open(file_of(tmp_path), "ab") as file:
        file.write(b"x" * num_bytes)
    writer.append_block(make_block(0))
    writer.close()

    reader = open_reader(window_bytes=1)

    assert steps(reader.poll()) == [0]
    assert (reader.corrupt, reader.lost_records) == (1, 0)


def test_a_frame_that_lost_bytes_does_not_hide_those_after_it(tmp_path, open_reader):
    writer = open_writer(tmp_path)
    writer.append_block(make_block(0))
    append_warning(writer)
    writer.close()
    path = file_of(tmp_path)
    begin = frame_offsets(path)[2]
    content = path.read_bytes()
    path.write_bytes(content[: begin + 40] + content[begin + 240 :])  # its length now reaches beyond the end
    JournalWriter(tmp_path, make_header(attempt=2)).close()

    reader = open_reader()

    kinds = [type(record) for record in reader.poll()]
    assert kinds == [HeaderRecord, SeriesRecord, EventRecord, EndRecord, HeaderRecord, EndRecord]
    assert (reader.corrupt, reader.torn_tails) == (1, 0)


@pytest.mark.parametrize("place", [0, 5, 9, 17, 22, 29, 32, 100])
def test_a_damaged_frame_is_skipped_and_counted(tmp_path, open_reader, place):
    write_three_files(tmp_path)
    damaged = file_of(tmp_path, 1)
    flip(damaged, frame_offsets(damaged)[2] + place)  # step 5

    reader = open_reader()

    assert steps(reader.poll()) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert (reader.corrupt, reader.lost_records, reader.torn_tails) == (1, 1, 0)


def test_a_damaged_last_frame_of_the_newest_file_is_skipped_when_something_follows(tmp_path, open_reader):
    writer = open_writer(tmp_path)
    writer.append_block(make_block(0))
    flip(file_of(tmp_path), frame_offsets(file_of(tmp_path))[2] + 50)
    reader = open_reader()
    assert steps(reader.poll()) == []
    assert reader.corrupt == 0

    with open(file_of(tmp_path), "ab"):
        writer.append_block(make_block(1))

    assert steps(reader.poll()) == [1]
    assert (reader.corrupt, reader.lost_records) == (1, 1)
    writer.close()


def test_nothing_is_given_out_whose_writer_is_not_known(tmp_path, open_reader):
    write_three_files(tmp_path)
    flip(file_of(tmp_path, 1), 40)

    reader = open_reader()
    records = reader.poll()

    assert steps(records) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert (reader.corrupt, reader.lost_records) == (6, 4)
    assert steps(open_reader(Cursor(list_files(tmp_path, 0)[1], 900)).poll()) == [8, 9, 10, 11]


def test_a_record_that_was_had_before_is_not_given_again(tmp_path, open_reader):
    writer = open_writer(tmp_path)
    for step in range(4):
        writer.append_block(make_block(step))
    path, content = file_of(tmp_path), file_of(tmp_path).read_bytes()
    offsets = frame_offsets(path)
    path.write_bytes(content + content[offsets[2] : offsets[4]])  # a stretch of the file stands there twice

    reader = open_reader()
    assert steps(reader.poll()) == [0, 1, 2, 3]
    assert (reader.corrupt, reader.lost_records) == (2, 0)


def test_blocks_whose_series_were_damaged_are_not_given_to_anybody(tmp_path, open_reader):
    writer = open_writer(tmp_path)
    writer.append_block(make_block(0))
    writer.add_series(make_keys(2, "late"), [None] * 2)
    writer.append_block(make_block(1, 5))
    writer.append_block(make_block(2, 3))
    writer.add_series(make_keys(2, "later"), [None] * 2)
    writer.close()
    flip(file_of(tmp_path), frame_offsets(file_of(tmp_path))[3] + 40)

    reader = open_reader()
    records = reader.poll()

    assert steps(records) == [0, 2], "ids that are known stay readable"
    assert sum(isinstance(record, SeriesRecord) for record in records) == 1
    assert reader.lost_records == 3


def test_files_that_are_gone_are_counted_and_skipped(tmp_path, open_reader):
    write_three_files(tmp_path)
    numbers = list_files(tmp_path, 0)
    inside = Cursor(numbers[0], frame_offsets(file_of(tmp_path, 0))[2])
    file_of(tmp_path, 0).unlink()
    file_of(tmp_path, 0).unlink()

    late = open_reader()
    assert steps(late.poll()) == [8, 9, 10, 11]
    assert late.lost_files == 2

    interrupted = open_reader(inside)
    assert steps(interrupted.poll()) == [8, 9, 10, 11]
    assert interrupted.lost_files == 2

    done = open_reader(Cursor(numbers[1] + 1, 0))
    assert steps(done.poll()) == [8, 9, 10, 11]
    assert done.lost_files == 0


def test_a_file_removed_while_it_is_read_is_read_to_its_end(tmp_path, open_reader):
    write_three_files(tmp_path)
    reader = open_reader()
    assert steps(reader.poll(max_bytes=700)) == [0]

    file_of(tmp_path, 0).unlink()
    file_of(tmp_path, 0).unlink()

    assert steps(reader.poll()) == [1, 2, 3, 8, 9, 10, 11]
    assert reader.lost_files == 1


def test_records_removed_by_the_budget_are_counted(tmp_path, open_reader):
    writer = open_writer(tmp_path, file_bytes=2000, budget_bytes=6000)
    reader = open_reader()
    for step in range(3):
        writer.append_block(make_block(step))
    assert steps(reader.poll()) == [0, 1, 2]
    for step in range(3, 100):
        writer.append_block(make_block(step))
    writer.close()

    found = steps(reader.poll())

    assert found[-1] == 99
    assert reader.lost_files == writer.dropped_files - 1, "the open one could still be read"
    assert len(found) + reader.lost_records == 97
    late = open_reader()
    assert len(steps(late.poll())) + late.lost_records == 101
    assert late.lost_files == writer.dropped_files


def test_a_reader_that_is_ahead_waits(tmp_path, open_reader):
    """A rank opened a new file, could not write its header for lack of space, and took it back."""
    writer = open_writer(tmp_path)
    writer.append_block(make_block(0))
    taken_back = tmp_path / f"rank00000.{writer.cursor.file + 1}.jnl"
    taken_back.write_bytes(b"\xb1TMJ")
    reader = open_reader()
    assert steps(reader.poll()) == [0]
    taken_back.unlink()
    assert reader.poll() == []
    assert open_reader(reader.cursor).poll() == []

    writer._open_next(writer._sequence)
    writer.append_block(make_block(1))
    writer.close()

    assert steps(reader.poll()) == [1]
    assert (reader.lost_files, reader.lost_records) == (0, 0)


def test_a_run_resumed_in_a_new_spool_is_read_from_its_beginning(tmp_path, open_reader, monkeypatch):
    write_three_files(tmp_path)
    reader = open_reader()
    reader.poll()
    for path in tmp_path.iterdir():
        path.unlink()
    assert open_reader(reader.cursor).poll() == []

    for now_s in (2e9, 1e9):  # also when the clock was set back meanwhile
        monkeypatch.setattr("time.time_ns", lambda now_s=now_s: int(now_s * 1e9))
        writer = open_writer(tmp_path)
        writer.append_block(make_block(7))
        writer.close()

        for resumed in (open_reader(reader.cursor), reader):
            assert steps(resumed.poll()) == [7]
            assert resumed.lost_files == 0
        for path in tmp_path.iterdir():
            path.unlink()


def with_version(content: bytes, version: int) -> bytes:
    head = content[:4] + struct.pack("<H", version) + content[6:28]
    return head + struct.pack("<I", zlib.crc32(head)) + content[32:]


def test_another_format_version_is_named_after_what_can_be_read(tmp_path, open_reader):
    writer = open_writer(tmp_path)
    writer.append_block(make_block(0))
    writer.close()
    newer = tmp_path / f"rank00000.{writer.cursor.file + 1}.jnl"
    newer.write_bytes(with_version(file_of(tmp_path).read_bytes(), 2))
    reader = open_reader()

    assert steps(reader.poll()) == [0]
    for _ in range(2):
        message = rf"{newer} has journal format version 2 at byte 0, expected 1: .*Install"
        with pytest.raises(JournalError, match=message):
            reader.poll()
    late = open_reader(Cursor(writer.cursor.file + 1, 200))
    for _ in range(2):
        with pytest.raises(JournalError, match="format version 2"):
            late.poll()


def test_a_head_that_promises_gigabytes_does_not_take_them(tmp_path, open_reader, monkeypatch):
    writer = open_writer(tmp_path)
    head = struct.pack("<4sHHQIII", b"\xb1TMJ", 1, 4, 1, 0xFFFFFFFF, 0, 0)
    with open(file_of(tmp_path), "ab") as file:
        file.write(head + struct.pack("<I", zlib.crc32(head)) + b"x" * 100)
    asked = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: asked.append(count) or real(fd, count, offset))

    reader = open_reader()
    assert len(reader.poll()) == 2
    JournalWriter(tmp_path, make_header(attempt=2)).close()
    assert len(reader.poll()) == 2
    assert reader.torn_tails == 1
    assert max(asked) <= 1 << 20
    writer.close()


def test_a_closed_reader_goes_on_where_it_was(tmp_path, open_reader):
    write_three_files(tmp_path)
    reader = open_reader()
    assert steps(reader.poll(max_bytes=700)) == [0]

    reader.close()
    reader.close()

    assert steps(reader.poll()) == list(range(1, 12))
    assert reader.lost_records == 0
