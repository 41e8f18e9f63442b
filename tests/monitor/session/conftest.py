"""A place of its own for what a test's monitor writes, and no agent unless a test wants one."""

import tempfile
import threading
from pathlib import Path

import pytest


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Return (spool root, output root), both empty and told to the monitor through the environment.

    The spool is in memory, as by default: on a disk a thread writes to it, and a test would have to wait for that.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        spool, output = Path(folder, "spool"), tmp_path / "output"
        monkeypatch.setenv("TRAINERMON_SPOOL", str(spool))
        monkeypatch.setenv("TRAINERMON_OUTPUT", str(output))
        yield spool, output


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Fail a test whose monitor left a thread behind."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
