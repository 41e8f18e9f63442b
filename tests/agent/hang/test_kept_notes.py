"""Notes of collectives that are read when the rank that kept them has let go of them."""

import json
import os

import pytest

from trainermon.agent.hang.kept_notes import KeptNotes
from trainermon.core.call_notes import MARK, NOTES_BYTES
from trainermon.core.spool import rank_path


@pytest.fixture
def kept(tmp_path):
    kept = KeptNotes(tmp_path)
    yield kept
    kept.close()


@pytest.fixture
def notes():
    """A rank's notes; the test closes them, as the kernel does those of a dead rank."""
    descriptor = os.memfd_create("calls")
    os.write(descriptor, MARK.ljust(NOTES_BYTES, b"\0"))
    return descriptor


def tell(spool, calls):
    plain = {"main_thread": 1, "signal": 0, "groups": [], "calls": calls}
    rank_path(spool, 0, "about").write_text(json.dumps(plain))


def test_notes_outlive_the_rank_with_what_it_wrote_last(tmp_path, kept, notes):
    tell(tmp_path, notes)
    kept.follow(0, os.getpid())
    os.pwrite(notes, b"last", NOTES_BYTES - 4)
    os.close(notes)

    assert kept.read(0, os.getpid()) == MARK.ljust(NOTES_BYTES - 4, b"\0") + b"last"
    assert kept.read(0, os.getpid() + 1) == b""  # another process has the rank since
    assert kept.read(1, os.getpid()) == b""


def test_notes_that_come_later_are_found_at_a_later_look(tmp_path, kept, notes):
    kept.follow(0, os.getpid())
    tell(tmp_path, -1)
    kept.follow(0, os.getpid())
    before = kept.read(0, os.getpid())
    tell(tmp_path, notes)
    kept.follow(0, os.getpid())
    os.close(notes)

    assert before == b""
    assert kept.read(0, os.getpid()).startswith(MARK)


def test_nothing_stays_open_and_a_process_without_notes_costs_nothing(tmp_path, notes):
    tell(tmp_path, notes)
    before = set(os.listdir("/proc/self/fd"))
    kept = KeptNotes(tmp_path)
    kept.follow(0, os.getpid())
    kept.follow(0, os.getpid())
    kept.follow(1, 0)
    opened = set(os.listdir("/proc/self/fd")) - before
    kept.close()
    os.close(notes)

    assert len(opened) == 1
    assert not opened & set(os.listdir("/proc/self/fd"))
