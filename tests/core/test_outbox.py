"""What a rank writes for the run directory is delivered whole, once, and by whoever is there."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trainermon.core import outbox
from trainermon.core.outbox import Outbox, deliver, num_deliverable
from trainermon.core.private_files import make_private_folder
from trainermon.core.spool import RankLock, open_spool, remove_spool

PLACE = "dumps/nan-1/attempt1/step7/rank3"


@pytest.fixture
def spool(tmp_path):
    return open_spool(tmp_path / "spool" / "run")


@pytest.fixture
def run(tmp_path):
    return tmp_path / "output/run"


def written(spool, run, place=PLACE, text="whole"):
    parcel = Outbox(spool, run, 3).parcel(place)
    (parcel.content / "tensors").mkdir(parents=True)
    (parcel.content / "dump.json").write_text(text)
    (parcel.content / "tensors/a.pt").write_bytes(b"x" * 1000)
    os.link(parcel.content / "tensors/a.pt", parcel.content / "tensors/b.pt")
    return parcel


def test_a_folder_comes_to_its_place_with_all_names_of_a_file(spool, run):
    written(spool, run).send()
    assert not Outbox(spool, run, 3).is_empty()
    assert Outbox(spool, run, 4).is_empty()

    assert deliver(spool, run) == []

    assert (run / PLACE / "dump.json").read_text() == "whole"
    assert (run / PLACE / "tensors/a.pt").stat().st_ino == (run / PLACE / "tensors/b.pt").stat().st_ino
    assert Outbox(spool, run, 3).is_empty()
    folders = [run, *(path for path in run.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o022 for path in folders} == {0}
    assert remove_spool(spool, lambda: True)


def test_a_folder_is_made_while_the_emptied_outbox_is_taken_away(spool, run, monkeypatch):
    parcel = Outbox(spool, run, 3).parcel(PLACE)
    make = Path.mkdir
    taken = []

    def mkdir(path, *args, **kwargs):
        if path == parcel.content and len(taken) < 3:
            taken.append(deliver(spool, run))
            assert not path.parent.exists()
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    make_private_folder(parcel.content)

    assert taken == [[], [], []]
    assert parcel.content.is_dir()


def test_an_unfinished_folder_waits_for_its_rank_until_that_is_gone(spool, run):
    lock = RankLock(spool, 3)
    written(spool, run)
    assert (num_deliverable(spool), deliver(spool, run)) == (0, [])
    assert not (run / PLACE).exists()

    lock.close()

    assert num_deliverable(spool) == 1
    assert deliver(spool, run) == []
    assert (run / PLACE / "dump.json").read_text() == "whole"


def test_a_later_folder_of_the_same_place_replaces_the_earlier_one(spool, run):
    written(spool, run, text="first").send()
    deliver(spool, run)
    (run / PLACE / "left over").write_text("")

    written(spool, run, text="second").send()
    deliver(spool, run)

    assert sorted(path.name for path in (run / PLACE).iterdir()) == ["dump.json", "tensors"]
    assert (run / PLACE / "dump.json").read_text() == "second"


@pytest.mark.parametrize("call", ["rename", "copytree", "rmtree"])
def test_a_delivery_that_fails_anywhere_leaves_it_to_the_next(spool, run, monkeypatch, call):
    written(spool, run).send()
    owner = Path if call == "rename" else shutil

    def fail(*_args, **_kwargs):
        raise OSError(5, "the file system is gone")

    monkeypatch.setattr(owner, call, fail)
    assert "the file system is gone" in "".join(deliver(spool, run))
    monkeypatch.undo()

    assert deliver(spool, run) == []
    assert (run / PLACE / "dump.json").read_text() == "whole"
    assert [path.name for path in (run / PLACE).parent.iterdir()] == ["rank3"]


def test_a_place_that_is_not_below_the_run_directory_is_refused(spool, run):
    folder = spool / "outbox" / f"rank00003.{'0' * 16}...~..~elsewhere.ready"
    folder.mkdir(parents=True)

    assert "tells no place below the run directory" in deliver(spool, run)[0]
    assert not (run.parent.parent / "elsewhere").exists()


def test_a_run_directory_of_others_gets_nothing(spool, run):
    run.mkdir(parents=True)
    run.chmod(0o777)
    written(spool, run).send()

    assert "expected no write permission" in deliver(spool, run)[0]
    assert list(run.iterdir()) == []


def test_many_processes_at_once_deliver_everything_once(spool, run):
    for step in range(20):
        written(spool, run, place=f"dumps/a/attempt1/step{step}/rank3", text=str(step)).send()
    command = [sys.executable, "-m", "trainermon.core.outbox", spool, run]

    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]

    assert {process.communicate()[1] for process in processes} == {""}
    assert deliver(spool, run) == []
    for step in range(20):
        assert (run / f"dumps/a/attempt1/step{step}/rank3/dump.json").read_text() == str(step)
    assert not list(run.rglob(".*"))


def test_a_parcel_may_take_a_quarter_of_what_is_free(spool, run, monkeypatch):
    status = os.statvfs(spool)
    free = status.f_bavail * status.f_frsize

    assert Outbox(spool, run, 0).room(1000) == 1000
    assert Outbox(spool, run, 0).room(1 << 60) <= 1.01 * free / 4
    monkeypatch.setattr(outbox, "available_memory_bytes", lambda: 4000)
    assert Outbox(spool, run, 0).room(1 << 60) == 1000
    assert Outbox(spool / "gone/further", run, 0).room(1000) == 0


def test_parcels_that_cannot_be_delivered_are_told_of(spool, run):
    written(spool, run).send()
    run.mkdir(parents=True)
    run.chmod(0o777)

    ended = subprocess.run(
        [sys.executable, "-m", "trainermon.core.outbox", spool, run], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 1
    assert ended.stderr.startswith("not delivered: ")


def test_a_dropped_parcel_is_never_delivered(spool, run):
    parcel = written(spool, run)

    parcel.delete()
    parcel.send()

    assert Outbox(spool, run, 3).is_empty()
    assert deliver(spool, run) == []
    assert not run.exists()


def test_free_memory_is_what_the_kernel_says(monkeypatch, tmp_path):
    assert 0 < outbox.available_memory_bytes() < sys.maxsize
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(outbox, "Path", lambda _: meminfo)

    assert outbox.available_memory_bytes() == sys.maxsize
    meminfo.write_text("MemTotal:       8 kB\nMemAvailable:       3 kB\n")
    assert outbox.available_memory_bytes() == 3 * 1024
    meminfo.write_text("MemTotal:       8 kB\n")
    assert outbox.available_memory_bytes() == sys.maxsize
