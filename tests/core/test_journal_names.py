"""Whether names have changed in a folder, told without a listing: held against listings."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.journals import make_block, open_writer, steps
from trainermon.core.journal import JournalReader
from trainermon.core.journal.names import FolderNames

LONG_AGO = (1_000_000_000, 1_000_000_000)


@pytest.fixture
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, which only a test moves."""
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


@settings(max_examples=50, deadline=None)
@given(turns=st.lists(st.sampled_from(["create", "remove", "rename", "write", "nothing"]), max_size=12))
def test_no_change_of_names_is_missed(turns: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("names")
    (folder / "first").touch()
    names = FolderNames(folder)
    names.look()
    for number, turn in enumerate(turns):
        before, version = sorted(os.listdir(folder)), names.version
        if turn == "create":
            (folder / f"new{number}").touch()
        elif turn == "remove" and before:
            (folder / before[-1]).unlink()
        elif turn == "rename" and before:
            (folder / before[-1]).rename(folder / f"moved{number}")
        elif turn == "write" and before:
            (folder / before[0]).write_text("more")
        names.look()
        if sorted(os.listdir(folder)) != before:
            assert names.version != version, f"{turn} was missed"


def test_a_folder_in_which_nothing_happens_keeps_its_version(tmp_path: Path, standing_clock: list[float]) -> None:
    (tmp_path / "file").touch()
    os.utime(tmp_path, LONG_AGO)
    names = FolderNames(tmp_path)
    names.look()
    version = names.version
    for _ in range(3):
        (tmp_path / "file").write_text("more")  # no name changes by it
        names.look()
    assert names.version == version
    standing_clock[0] += 1.0
    names.look()
    assert names.version != version, "once a second names count as changed, whatever the file system says"


def test_a_folder_that_is_removed_and_made_again_has_changed(tmp_path: Path, standing_clock: list[float]) -> None:
    folder = tmp_path / "spool"
    names = FolderNames(folder)
    seen = []
    for is_there in (False, True, False, True):
        if is_there:
            folder.mkdir()
            os.utime(folder, LONG_AGO)
        elif folder.exists():
            folder.rmdir()
        names.look()
        seen.append(names.version)
    assert sorted(set(seen)) == seen


def test_readers_that_share_names_find_the_next_file_at_the_next_look(
    tmp_path: Path, standing_clock: list[float]
) -> None:
    names = FolderNames(tmp_path)
    reader = JournalReader(tmp_path, 0, names=names)
    for step in (1, 2):  # each in a file of its own
        writer = open_writer(tmp_path)
        writer.append_block(make_block(step))
        writer.close()
        os.utime(tmp_path, (step, step))
        names.look()
        records = [record for _ in range(4) for record in reader.poll()]
        assert steps(records) == [step]
    reader.close()


def test_a_name_that_comes_within_the_same_tick_of_the_clock_is_not_missed(
    tmp_path: Path, standing_clock: list[float]
) -> None:
    names, now_ns = FolderNames(tmp_path), time.time_ns()
    seen = []
    for name in ("first", "second"):
        (tmp_path / name).touch()
        os.utime(tmp_path, ns=(now_ns, now_ns))  # as a coarse clock has it
        names.look()
        seen.append(names.version)
    assert seen[0] != seen[1]
