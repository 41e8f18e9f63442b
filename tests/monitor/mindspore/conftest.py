"""A place of its own for what a test's monitor writes."""

import pytest


@pytest.fixture
def spool(tmp_path, monkeypatch):
    """Return the spool root, empty and told to the monitor through the environment, as the output root is."""
    monkeypatch.setenv("TRAINERMON_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("TRAINERMON_OUTPUT", str(tmp_path / "output"))
    return tmp_path / "spool"
