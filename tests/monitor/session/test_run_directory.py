"""The run directory may lie in a folder that others can write to, and its name can be guessed."""

import os
import stat

import pytest
import torch
from torch import nn

from trainermon import TrainerMon
from trainermon.core.errors import AttachError, ConfigError

STRANGER = 65534
WATCHED = {"run_id": "job-1", "print_struct": True, "agent": {"start": False}}


def watch_one_step():
    model = nn.Sequential(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(WATCHED) as monitor:
        monitor.set_monitor(model, optimizer)
        model(torch.full((1, 2), torch.nan)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("mask", [0, 0o002], ids=oct)
def test_every_directory_of_a_run_is_private_whatever_the_umask(places, mask):
    before = os.umask(mask)
    try:
        watch_one_step()
    finally:
        os.umask(before)

    run = places[1] / "job-1"
    folders = [run, *(path for path in run.rglob("*") if path.is_dir())]
    assert {path.name for path in folders} >= {"job-1", "ranks", "nodes", "dumps", "module_struct", "rank0"}
    assert {str(path): stat.S_IMODE(path.stat().st_mode) for path in folders} == {str(path): 0o700 for path in folders}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_a_run_directory_of_another_user_is_refused(places):
    (places[1] / "job-1").mkdir(parents=True, mode=0o777)
    os.chown(places[1] / "job-1", STRANGER, STRANGER)

    with pytest.raises(AttachError, match=f"job-1 belongs to user {STRANGER}, expected user 0"):
        watch_one_step()
    assert list((places[1] / "job-1").iterdir()) == []


def test_a_run_directory_that_others_may_write_to_is_refused(places):
    (places[1] / "job-1").mkdir(parents=True)
    (places[1] / "job-1").chmod(0o770)

    with pytest.raises(AttachError, match=r"job-1 has mode 0770.*chmod go-w"):
        watch_one_step()


def test_a_run_directory_that_is_a_link_is_refused(places):
    places[1].mkdir(exist_ok=True)
    (places[1] / "elsewhere").mkdir()
    (places[1] / "job-1").symlink_to("elsewhere")

    with pytest.raises(AttachError, match="job-1 is a link or a file"):
        watch_one_step()
    assert list((places[1] / "elsewhere").iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_nothing_is_read_in_a_run_directory_of_another_user(places):
    """A pipe without a writer would hold the training up for ever."""
    (places[1] / "job-1").mkdir(parents=True)
    os.mkfifo(places[1] / "job-1" / "run.json")
    os.chown(places[1] / "job-1", STRANGER, STRANGER)

    with pytest.raises(AttachError, match=f"job-1 belongs to user {STRANGER}"):
        watch_one_step()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("other.json")], ids=["pipe", "link"])
def test_a_description_of_the_run_that_is_a_pipe_or_a_link_is_refused(places, make):
    run = places[1] / "job-1"
    run.mkdir(parents=True, mode=0o700)
    (run / "other.json").write_text('{"attempt": 7}')
    make(run / "run.json")

    with pytest.raises(ConfigError, match=r"run\.json cannot be read .*: remove the folder or choose another run_id"):
        watch_one_step()
