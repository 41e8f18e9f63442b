"""The rank's side of the journal."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.core.journals import file_of, make_block, make_header, make_keys, open_writer, read_all, steps
from trainermon.core.errors import SpoolError
from trainermon.core.events import WarningEvent
from trainermon.core.journal import (
    Cursor,
    HeaderRecord,
    JournalReader,
    JournalWriter,
    SeriesRecord,
    list_files,
    remove_before,
)

FLOATS = st.floats(width=64)


def test_every_file_begins_with_the_series_so_far(tmp_path):
    writer = open_writer(tmp_path, file_bytes=2000, budget_bytes=1 << 20)
    for step in range(20):
        assert writer.append_block(make_block(step))
        if step % 5 == 0:
            writer.add_series(make_keys(2, f"late{step}."), [None] * 2)
    writer.close()

    known = 0
    assert len(list_files(tmp_path, 0)) > 3
    for number in list_files(tmp_path, 0):
        reader = JournalReader(tmp_path, 0, Cursor(number, 0))
        first, *others = reader.poll(max_bytes=1) + reader.poll(max_bytes=1)
        assert isinstance(first, HeaderRecord)
        assert len(first.header.series) >= known
        known = len(first.header.series) + sum(len(r.keys) for r in others if isinstance(r, SeriesRecord))
        reader.close()
    assert read_all(tmp_path) == list(range(20))


def test_files_are_private_end_at_their_size_and_are_closed_in_other_programs(tmp_path):
    writer = open_writer(tmp_path, file_bytes=2000, budget_bytes=1 << 20)
    for step in range(50):
        writer.append_block(make_block(step))

    sizes = [file_of(tmp_path, index).stat().st_size for index in range(len(list_files(tmp_path, 0)))]
    assert max(sizes) <= 2000
    assert min(sizes[:-1]) > 2000 - 300, "a file ends only when the next record does not fit"
    assert sum(sizes) == writer.bytes_written
    assert file_of(tmp_path).stat().st_mode & 0o777 == 0o600
    assert fcntl.fcntl(writer._descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert writer.cursor == Cursor(list_files(tmp_path, 0)[-1], sizes[-1])
    writer.close()


def test_a_record_is_one_system_call(tmp_path, monkeypatch):
    writer = open_writer(tmp_path)
    calls = []
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, buffers: calls.append(buffers) or real(descriptor, buffers))
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("the rank must not wait for the disk"))

    writer.append_block(make_block(1))
    writer.append_event(WarningEvent(message="x"))

    assert len(calls) == 2
    writer.close()


def test_a_record_larger_than_a_file_is_written_alone(tmp_path):
    writer = open_writer(tmp_path, num_series=100, file_bytes=1000, budget_bytes=1 << 20)

    for step in range(3):
        assert writer.append_block(make_block(step, 100))
    writer.close()

    assert read_all(tmp_path) == [0, 1, 2]


def test_the_budget_removes_the_oldest_files(tmp_path):
    writer = open_writer(tmp_path, file_bytes=2000, budget_bytes=10_000)
    for step in range(200):
        assert writer.append_block(make_block(step))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000

    files = list_files(tmp_path, 0)
    assert writer.dropped_files == files[0] % 1_000_000
    assert files == list(range(files[0], files[0] + len(files))), "only the oldest ones go"
    assert len(files) >= 4, "no more than necessary"
    remaining = read_all(tmp_path)
    assert remaining == list(range(remaining[0], 200))
    writer.close()


def test_the_budget_counts_the_files_of_earlier_attempts(tmp_path):
    for attempt in range(3):
        writer = JournalWriter(tmp_path, make_header(attempt=attempt), file_bytes=2000, budget_bytes=6000)
        writer.add_series(make_keys(3), [None] * 3)
        for step in range(50):
            writer.append_block(make_block(step))
        writer.close()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 6000
    assert len(list_files(tmp_path, 0)) == 3


def test_a_file_that_cannot_be_removed_does_not_stop_the_journal(tmp_path, monkeypatch):
    writer = open_writer(tmp_path, file_bytes=2000, budget_bytes=6000)

    def refuse(path, missing_ok=False):
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert all(writer.append_block(make_block(step)) for step in range(50))
    assert writer.dropped_files == 0
    writer.close()


def test_cutting_keeps_the_newest_file_so_that_numbers_go_on(tmp_path):
    writer = open_writer(tmp_path, file_bytes=2000, budget_bytes=1 << 20)
    for step in range(50):
        writer.append_block(make_block(step))
    writer.close()
    files = list_files(tmp_path, 0)

    assert remove_before(tmp_path, 0, Cursor(files[2], 0)) == 2
    assert list_files(tmp_path, 0) == files[2:]
    assert remove_before(tmp_path, 0, Cursor(files[-1] + 5, 0)) == len(files) - 3
    assert list_files(tmp_path, 0) == files[-1:]

    open_writer(tmp_path).close()
    assert list_files(tmp_path, 0) == [files[-1], files[-1] + 1]


def test_a_new_attempt_never_touches_an_old_file(tmp_path):
    open_writer(tmp_path).close()
    old = file_of(tmp_path)
    content = old.read_bytes()

    writer = JournalWriter(tmp_path, make_header(attempt=2))
    writer.append_event(WarningEvent(message="x"))
    writer.close()

    assert old.read_bytes() == content
    assert len(list_files(tmp_path, 0)) == 2


class SlowDisk:
    """A clock, and a disk that makes it advance."""

    def __init__(self, monkeypatch) -> None:
        self.now_s = 100.0
        self.delay_s = 0.0
        real = os.writev

        def writev(descriptor, buffers):
            self.now_s += self.delay_s
            return real(descriptor, buffers)

        monkeypatch.setattr(os, "writev", writev)

    def __call__(self) -> float:
        return self.now_s


def test_after_a_slow_write_records_are_skipped_for_twenty_times_as_long(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    writer = open_writer(tmp_path, slow_write_s=0.25, clock=disk)

    disk.delay_s = 0.25
    assert writer.append_block(make_block(0)), "not slow yet"
    assert writer.append_block(make_block(1))
    disk.delay_s = 0.5
    assert writer.append_block(make_block(2)), "a slow record is a written one"
    disk.delay_s = 0.0
    disk.now_s += 9.9
    assert not writer.append_block(make_block(3))
    assert not writer.append_event(WarningEvent(message="x"))
    disk.now_s += 0.2
    assert writer.append_block(make_block(4))
    writer.close()

    assert writer.skipped == 2
    reader = JournalReader(tmp_path, 0)
    assert steps(reader.poll()) == [0, 1, 2, 4]
    assert (reader.lost_records, reader.corrupt, reader.torn_tails) == (2, 0, 0)
    reader.close()


def test_a_slow_rotation_counts_too(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    writer = open_writer(tmp_path, file_bytes=2000, budget_bytes=1 << 20, slow_write_s=0.25, clock=disk)
    real = os.open

    def slow_open(*args, **kwargs):
        disk.now_s += 1.0
        return real(*args, **kwargs)

    monkeypatch.setattr(os, "open", slow_open)
    written = [writer.append_block(make_block(step)) for step in range(30)]

    assert not all(written)
    assert written.index(False) > 3
    monkeypatch.undo()


def test_series_that_were_skipped_are_in_the_next_header(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    writer = open_writer(tmp_path, clock=disk)
    disk.delay_s = 1.0
    writer.append_block(make_block(0))
    disk.delay_s = 0.0

    assert writer.add_series(make_keys(2, "late"), [None] * 2) == 3
    disk.now_s += 21
    assert writer.append_block(make_block(1, num_series=5))
    writer.close()

    reader = JournalReader(tmp_path, 0)
    records = reader.poll()
    assert steps(records) == [0, 1]
    headers = [record.header for record in records if isinstance(record, HeaderRecord)]
    assert [len(header.series) for header in headers] == [0, 5]
    assert (reader.lost_records, reader.corrupt) == (1, 0)
    reader.close()


@pytest.mark.parametrize("failing", ["error", "short"])
@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_a_failed_write_skips_that_record_and_the_next_goes_to_a_new_file(tmp_path, monkeypatch, failing, num_failures):
    writer = open_writer(tmp_path)
    writer.append_block(make_block(0))
    real = os.writev
    left = num_failures

    def writev(descriptor, buffers):
        nonlocal left
        if not left:
            return real(descriptor, buffers)
        left -= 1
        if failing == "error":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, [b"".join(map(bytes, buffers))[:40]])

    monkeypatch.setattr(os, "writev", writev)
    before = list_files(tmp_path, 0)
    written = [writer.append_block(make_block(step)) for step in range(1, 6)]
    writer.close()

    assert written == [False] * num_failures + [True] * (5 - num_failures)
    assert writer.skipped == num_failures
    assert list_files(tmp_path, 0) == [*before, before[0] + 1], "what failed without a header leaves no number behind"
    reader = JournalReader(tmp_path, 0)
    assert steps(reader.poll()) == [0, *range(1 + num_failures, 6)]
    assert reader.lost_records == num_failures
    assert (reader.torn_tails, reader.lost_files, reader.corrupt) == (int(failing == "short"), 0, 0)
    reader.close()


def test_long_trouble_is_logged_ever_more_rarely(tmp_path, monkeypatch, caplog):
    writer = open_writer(tmp_path)

    def refuse(descriptor, buffers):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "writev", refuse)
    with caplog.at_level(logging.WARNING):
        for step in range(100):
            assert not writer.append_block(make_block(step))
    monkeypatch.undo()
    writer.close()

    assert writer.skipped == 100
    assert len(caplog.messages) == 7
    assert caplog.messages[-1] == "journal of rank 0: 64 records skipped: [Errno 5] Input/output error"


def test_a_spool_that_vanished_skips_records(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    writer = open_writer(directory, file_bytes=1000, budget_bytes=1 << 20)
    shutil.rmtree(directory)

    written = [writer.append_block(make_block(step)) for step in range(20)]

    assert not any(written[10:])
    assert writer.skipped == written.count(False)
    writer.close()


def test_a_file_that_somebody_removed_is_told_and_the_next_record_goes_to_a_new_one(tmp_path, caplog):
    now_s = [0.0]
    writer = open_writer(tmp_path, clock=lambda: now_s[0])
    assert writer.append_block(make_block(0))
    file_of(tmp_path).unlink()
    now_s[0] = 0.021

    assert not writer.append_block(make_block(1))
    assert writer.append_block(make_block(2))
    writer.close()

    assert read_all(tmp_path) == [2]
    assert writer.skipped == 1
    assert "somebody removed the file from the spool" in caplog.text


def test_a_first_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(
        SpoolError, match=r"cannot write to the spool at .*rank00000\.\*\.jnl: No such file.*TRAINERMON_SPOOL"
    ):
        JournalWriter(tmp_path / "missing", make_header())


LIMITED = """
import array, resource, sys
from pathlib import Path
from trainermon.core.journal import Header, JournalWriter
from trainermon.core.values import Coordinates, Kind, SeriesKey, StatBlock
writer = JournalWriter(Path(sys.argv[1]), Header(
    run_id="run", attempt=1, coordinates=Coordinates(), host="node", pid=1, started_s=0.0))
writer.add_series([SeriesKey(Kind.LOSS, str(i)) for i in range(100)], [None] * 100)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
for step in range(30):
    block = StatBlock(step=step, time_s=0.0, series=array.array("I", range(100)), values=array.array("d", [step] * 800))
    print(step, int(writer.append_block(block)))
writer.close()
print("skipped", writer.skipped)
"""


def test_a_real_short_write_loses_one_record_and_begins_a_new_file(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, check=True, timeout=900
    )

    *lines, last = (line.split() for line in result.stdout.splitlines())
    written = [int(step) for step, ok in lines if ok == "1"]
    assert 0 < len(written) < 30
    assert last == ["skipped", str(30 - len(written))]
    reader = JournalReader(tmp_path, 0)
    assert steps(reader.poll()) == written
    assert reader.lost_records == 30 - len(written)
    assert reader.torn_tails == 30 - len(written)
    assert "only " in result.stderr
    assert " bytes could be written" in result.stderr
    reader.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "trainermon-test", str(directory)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_loses_only_what_did_not_fit_and_comes_back(small_disk):
    writer = open_writer(small_disk, num_series=3000, file_bytes=1 << 20)
    reader = JournalReader(small_disk, 0)

    first = [step for step in range(30) if writer.append_block(make_block(step, 3000))]
    assert 10 < len(first) < 16
    found = steps(reader.poll())
    assert found == first
    remove_before(small_disk, 0, reader.cursor)  # as the agent does after a commit
    second = [step for step in range(30, 35) if writer.append_block(make_block(step, 3000))]
    writer.close()

    assert len(second) >= 4
    assert steps(reader.poll()) == second
    assert writer.skipped == 35 - len(first) - len(second)
    assert reader.lost_records == writer.skipped
    assert (reader.corrupt, reader.lost_files) == (0, 0)
    reader.close()


def test_a_forked_child_writes_nothing(tmp_path):
    writer = open_writer(tmp_path)
    writer.append_block(make_block(0))
    content = file_of(tmp_path).read_bytes()

    child = os.fork()
    if child == 0:
        silent = not writer.append_block(make_block(1)) and not writer.append_event(WarningEvent(message="x"))
        writer.add_series(make_keys(1, "child"), [None])
        writer.close()
        os._exit(0 if silent else 1)
    assert os.waitpid(child, 0)[1] == 0

    assert file_of(tmp_path).read_bytes() == content
    assert list_files(tmp_path, 0) == [writer.cursor.file]
    assert writer.append_block(make_block(2))
    writer.close()
    assert read_all(tmp_path) == [0, 2]


def test_after_close_nothing_is_written(tmp_path):
    writer = open_writer(tmp_path)
    writer.close()
    content = file_of(tmp_path).read_bytes()

    assert not writer.append_block(make_block(1))
    writer.close()

    assert file_of(tmp_path).read_bytes() == content
