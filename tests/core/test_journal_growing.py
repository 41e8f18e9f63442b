"""A journal that grows, and whose files change, while it is read loses nothing."""

from __future__ import annotations

import os
import random

import pytest

from tests.core.journals import file_of, make_block, make_header, open_writer, steps
from trainermon.core.journal import BlockRecord, EndRecord, HeaderRecord, JournalWriter


def test_a_file_behind_one_that_somebody_removed_is_found(tmp_path, open_reader, monkeypatch):
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr("trainermon.core.journal.reader.time.monotonic", lambda: next(clock))
    writer = open_writer(tmp_path, file_bytes=1)
    writer.append_block(make_block(0))
    reader = open_reader()
    assert steps(reader.poll()) == [0]

    writer.append_block(make_block(1))
    file_of(tmp_path, -1).unlink()
    writer.append_block(make_block(2))

    assert steps(reader.poll()) == [2]


def test_what_was_written_between_the_last_look_and_the_new_file_is_read(tmp_path, open_reader, monkeypatch):
    writer = open_writer(tmp_path)
    reader = open_reader()
    reader.poll()
    real = os.path.lexists

    def write_meanwhile(path):
        monkeypatch.setattr(os.path, "lexists", real)
        writer.append_block(make_block(0))  # after the reader looked at the file, before it asks for a newer one
        writer.close()
        JournalWriter(tmp_path, make_header(attempt=2)).close()
        return real(path)

    monkeypatch.setattr(os.path, "lexists", write_meanwhile)

    assert [type(record) for record in reader.poll()] == [BlockRecord, EndRecord, HeaderRecord, EndRecord]
    assert (reader.torn_tails, reader.lost_records) == (0, 0)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("window_bytes", [1, 1 << 20])
def test_a_file_that_grows_while_it_is_looked_at_loses_nothing(tmp_path, open_reader, monkeypatch, seed, window_bytes):
    """What is incomplete at one system call may be whole, with more behind it, at the next."""
    written, live = tmp_path / "written", tmp_path / "live"
    written.mkdir()
    live.mkdir()
    writer = open_writer(written)
    for step in range(6):
        writer.append_block(make_block(step))
    writer.close()
    content = file_of(written).read_bytes()
    growing = live / file_of(written).name
    growing.write_bytes(b"")
    source = random.Random(seed)

    def and_grow(call):
        def called(*arguments):
            found = call(*arguments)
            size = growing.stat().st_size
            with growing.open("ab") as file:
                file.write(content[size : size + source.choice([1, 20, 600])])
            return found

        return called

    for name in ("pread", "fstat"):
        monkeypatch.setattr(os, name, and_grow(getattr(os, name)))
    reader = open_reader(directory=live, window_bytes=window_bytes)
    found = []
    while not found or not isinstance(found[-1], EndRecord):
        found += reader.poll()

    assert steps(found) == list(range(6))
    assert (reader.corrupt, reader.lost_records) == (0, 0)
