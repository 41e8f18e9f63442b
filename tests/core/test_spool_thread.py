"""The thread that writes to a spool on a disk: a disk that hangs holds up the thread alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.core.journals import file_of, make_block, make_header, make_keys, open_writer, read_all
from trainermon.core.control import ControlPage, ControlReader, Phase
from trainermon.core.journal import EndRecord, JournalReader, JournalWriter, SeriesRecord, list_files
from trainermon.core.journal.spool_thread import SpoolThread

PATIENCE_S = 900.0


class Disk:
    """Stands for a disk: while it hangs, no call that writes to it returns."""

    def __init__(self, monkeypatch):
        self.goes = threading.Event()
        self.goes.set()
        self.is_asked = threading.Event()
        for name in ("writev", "pwrite"):
            monkeypatch.setattr(os, name, self._slow(getattr(os, name)))

    def _slow(self, real):
        def call(*arguments):
            if threading.current_thread() is not threading.main_thread():
                self.is_asked.set()
                assert self.goes.wait(PATIENCE_S)
            else:
                assert self.goes.is_set(), "the step itself writes to a disk that hangs"
            return real(*arguments)

        return call

    def hang(self):
        self.is_asked.clear()
        self.goes.clear()


def wait_for(thread):
    is_done = threading.Event()
    thread.take(is_done.set)
    assert is_done.wait(PATIENCE_S)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(monkeypatch)
    yield disk
    disk.goes.set()


def test_records_wait_while_the_disk_hangs_and_follow_in_order(tmp_path, disk):
    thread = SpoolThread()
    writer = open_writer(tmp_path, thread=thread)
    disk.hang()
    taken = [writer.append_block(make_block(step)) for step in range(50)]
    disk.goes.set()
    writer.close()

    assert thread.close(PATIENCE_S)
    assert all(taken)
    assert writer.skipped == 0
    assert read_all(tmp_path) == list(range(50))


def test_rows_are_those_of_their_step_though_their_memory_is_used_again(tmp_path, disk):
    thread = SpoolThread()
    writer = open_writer(tmp_path, thread=thread)
    disk.hang()
    block = make_block(0)
    expected = block.values.copy()
    writer.append_block(block)
    block.values[:] = -1
    disk.goes.set()
    writer.close()
    assert thread.close(PATIENCE_S)

    (found,) = (r.block for r in JournalReader(tmp_path, 0).poll() if hasattr(r, "block"))
    assert (found.values == expected).all()


def test_what_is_too_much_is_given_up_counted_told_and_seen_by_the_reader(tmp_path, disk, caplog):
    thread = SpoolThread(max_waiting_bytes=2000)
    writer = open_writer(tmp_path, thread=thread)
    assert writer.append_block(make_block(0))
    disk.hang()
    taken = [writer.append_block(make_block(step)) for step in range(1, 40)]
    first_id = writer.add_series(make_keys(1, "late"), [None])  # what explains later rows is always taken
    disk.goes.set()
    writer.close()
    assert thread.close(PATIENCE_S)

    written = [0, *(step for step, is_taken in enumerate(taken, 1) if is_taken)]
    assert 1 < len(written) < 40
    assert read_all(tmp_path) == written
    assert writer.skipped == 40 - len(written)
    assert "records skipped: the disk of the spool hangs" in caplog.text
    reader = JournalReader(tmp_path, 0)
    records = reader.poll()
    assert [record.first_id for record in records if isinstance(record, SeriesRecord)] == [0, first_id]
    assert isinstance(records[-1], EndRecord)
    assert reader.lost_records == writer.skipped


def test_an_error_in_the_thread_skips_that_record_and_the_next_goes_to_a_new_file(tmp_path, monkeypatch):
    thread = SpoolThread()
    writer = open_writer(tmp_path, thread=thread)
    wait_for(thread)
    real, failures = os.writev, [None, OSError(28, "No space left on device"), None, None, None, None]

    def write(*arguments):
        if failure := failures.pop(0):
            raise failure
        return real(*arguments)

    monkeypatch.setattr(os, "writev", write)
    for step in range(4):
        assert writer.append_block(make_block(step)), "taken, whatever becomes of it"
    writer.close()

    assert thread.close(PATIENCE_S)
    assert writer.skipped == 1
    assert read_all(tmp_path) == [0, 2, 3]
    assert len(list_files(tmp_path, 0)) == 2


def test_a_slow_disk_makes_no_pause_for_a_thread(tmp_path):
    times = iter(range(10_000))
    thread = SpoolThread()
    writer = JournalWriter(tmp_path, make_header(), clock=lambda: float(next(times)), slow_write_s=0.1, thread=thread)
    writer.add_series(make_keys(3), [None] * 3)
    for step in range(5):
        writer.append_block(make_block(step))
    writer.close()

    assert thread.close(PATIENCE_S)
    assert read_all(tmp_path) == [0, 1, 2, 3, 4]


def test_of_beats_that_wait_for_the_disk_the_newest_is_sent(tmp_path, disk):
    thread = SpoolThread()
    page, reader = ControlPage(tmp_path, 0, thread), ControlReader(tmp_path, 0)
    disk.hang()
    for step in range(1000):
        page.beat(step, Phase.STEP, 1.0)
        assert page.epoch() == 0
    page.beat(1000, Phase.CLOSED, 2.0)
    waiting = thread._work.qsize()
    page.close()
    disk.goes.set()
    assert thread.close(PATIENCE_S)

    beat = reader.heartbeat()
    assert (beat.step, beat.phase) == (1000, Phase.CLOSED)
    assert waiting <= 2, "beats do not pile up"
    reader.close()


def test_a_close_while_the_disk_hangs_does_not_wait_for_it(tmp_path, disk):
    thread = SpoolThread()
    writer = open_writer(tmp_path, thread=thread)
    disk.hang()
    writer.append_block(make_block(0))
    assert disk.is_asked.wait(PATIENCE_S)
    writer.close()

    assert not thread.close(0.0)
    assert not writer.append_block(make_block(1))
    disk.goes.set()
    assert thread.close(PATIENCE_S)
    assert read_all(tmp_path) == [0]


def test_work_that_fails_does_not_end_the_thread(caplog):
    thread, done = SpoolThread(), []
    thread.take(lambda: 1 / 0)
    thread.take(lambda: done.append(1))

    assert thread.close(PATIENCE_S)
    assert done == [1]
    assert "could not write to the spool" in caplog.text


def test_a_forked_child_writes_nothing_and_ends_while_the_disk_hangs(tmp_path, disk):
    thread = SpoolThread()
    writer, page = open_writer(tmp_path, thread=thread), ControlPage(tmp_path, 0, thread)
    disk.hang()
    writer.append_block(make_block(0))
    assert disk.is_asked.wait(PATIENCE_S)
    pid = os.fork()
    if not pid:
        is_written = writer.append_block(make_block(1))
        page.beat(1, Phase.STEP, 1.0)
        writer.close()
        page.close()
        os._exit(is_written)
    _, status = os.waitpid(pid, 0)
    disk.goes.set()
    writer.close()
    page.close()

    assert os.waitstatus_to_exitcode(status) == 0
    assert thread.close(PATIENCE_S)
    assert read_all(tmp_path) == [0]


KILLED = """
import os, pathlib, signal, sys, threading
from tests.core.journals import make_block, open_writer
from trainermon.core.journal.spool_thread import SpoolThread
thread = SpoolThread()
writer = open_writer(pathlib.Path(sys.argv[1]), thread=thread)
written = threading.Event()
writer.append_block(make_block(0))
thread.take(written.set)
written.wait()
real, asked = os.writev, threading.Event()
def hang(*arguments):
    asked.set()
    threading.Event().wait()
os.writev = hang
writer.append_block(make_block(1))
writer.append_block(make_block(2))
asked.wait()
{end}
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"])
def test_of_a_process_that_ends_while_the_disk_hangs_only_what_waited_is_lost(tmp_path, end):
    ended = subprocess.run([sys.executable, "-c", KILLED.format(end=end), tmp_path], timeout=PATIENCE_S, check=False)

    assert ended.returncode == (3 if "exit" in end else -9)
    assert read_all(tmp_path) == [0]
    assert file_of(tmp_path).exists()
