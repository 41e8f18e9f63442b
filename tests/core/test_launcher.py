"""What an agent inherits from the rank that starts it, and what the two know of each other."""

import fcntl
import json
import os
import site
import string
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainermon
from trainermon.agent.lifecycle.lock import LOCK_FILE, STATUS_FILE
from trainermon.core.errors import ConfigError, SpoolError
from trainermon.core.launcher import (
    LAUNCHER_VARIABLE,
    LINGER_FILE,
    SERVICE_FILE,
    agent_environment,
    check_rules,
    deliver,
    is_served,
    register,
    start_agent,
)
from trainermon.core.outbox import Outbox
from trainermon.core.spool import open_spool

OF_A_RANK = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"]
OF_A_RANK += ["NCCL_DEBUG", "LD_PRELOAD", LAUNCHER_VARIABLE]
names = st.sampled_from([*OF_A_RANK, "OMP_NUM_THREADS", "HOME", "PATH", "LANG", "SLURM_JOB_ID"]) | st.text(
    string.ascii_uppercase
)


@pytest.fixture(autouse=True)
def started_by_hand(monkeypatch):
    monkeypatch.delenv(LAUNCHER_VARIABLE, raising=False)


@given(st.dictionaries(names, st.text(string.ascii_letters)))
def test_nothing_of_a_rank_reaches_the_agent_and_all_else_does(given_environment):
    made = agent_environment(given_environment)

    assert not made.keys() & set(OF_A_RANK)
    assert made["OMP_NUM_THREADS"] == "1"
    kept = {"HOME", "PATH", "LANG", "SLURM_JOB_ID"} & given_environment.keys()
    assert {name: made[name] for name in kept} == {name: given_environment[name] for name in kept}


def test_folders_of_the_import_path_mean_the_same_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    path = agent_environment({"PYTHONPATH": f"mine{os.pathsep}{os.pathsep}/absolute"})["PYTHONPATH"]

    assert path.split(os.pathsep)[:2] == [str(tmp_path / "mine"), "/absolute"]


def test_a_checkout_is_found_by_the_agent_and_an_installed_package_needs_no_path(tmp_path, monkeypatch):
    monkeypatch.setattr(trainermon, "__file__", str(tmp_path / "trainermon/__init__.py"))
    assert agent_environment({})["PYTHONPATH"] == str(tmp_path)
    assert agent_environment({"PYTHONPATH": str(tmp_path)})["PYTHONPATH"] == str(tmp_path)

    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    assert "PYTHONPATH" not in agent_environment({})


def test_the_launcher_and_the_agent_are_told_of_each_other(tmp_path, monkeypatch):
    spool, folder = tmp_path / "spool", tmp_path / "launcher"
    spool.mkdir()
    folder.mkdir()
    monkeypatch.setenv(LAUNCHER_VARIABLE, f"4711:{folder}")

    register(spool)

    assert json.loads((spool / LINGER_FILE).read_bytes()) == {"hold_pid": 4711}
    assert [path.read_text() for path in folder.iterdir()] == [str(spool)]


@pytest.mark.parametrize("launcher_is", ["", "4711", "x:.", "4711:gone"])
def test_without_a_launcher_an_agent_waits_for_none(tmp_path, monkeypatch, launcher_is):
    (tmp_path / LINGER_FILE).write_text("of a former start")
    monkeypatch.setenv(LAUNCHER_VARIABLE, launcher_is)

    register(tmp_path)

    assert not (tmp_path / LINGER_FILE).exists()


def test_a_node_is_served_as_long_as_somebody_holds_the_lock(tmp_path):
    assert not is_served(tmp_path)
    with (tmp_path / SERVICE_FILE).open("w") as service:
        assert not is_served(tmp_path)
        fcntl.flock(service, fcntl.LOCK_EX)
        assert is_served(tmp_path)
    assert not is_served(tmp_path)


def test_on_a_served_node_no_agent_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # starting one would fail
    spool = tmp_path / "run"
    spool.mkdir()
    with (tmp_path / SERVICE_FILE).open("w") as service:
        fcntl.flock(service, fcntl.LOCK_EX)
        start_agent(spool)

    with pytest.raises(SpoolError, match="the agent cannot be started by '/nowhere/python'"):
        start_agent(spool)


@pytest.mark.parametrize("lives", [True, False])
def test_what_an_agent_says_of_itself_is_forgotten_if_it_was_killed(tmp_path, monkeypatch, lives):
    monkeypatch.setattr("trainermon.core.launcher.is_served", lambda root: True)
    (tmp_path / STATUS_FILE).write_text('{"url": "http://127.0.0.1:9461/"}')
    with open(tmp_path / LOCK_FILE, "w") as lock:
        if lives:
            fcntl.flock(lock, fcntl.LOCK_EX)

        start_agent(tmp_path)

    assert (tmp_path / STATUS_FILE).exists() is lives


def test_an_agent_that_ends_at_its_start_is_quoted(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first line >&2\necho the reason >&2\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))

    with pytest.raises(SpoolError, match=r"ended at its start with status 3: the reason$"):
        start_agent(tmp_path)


def test_a_process_of_its_own_delivers_what_waits(tmp_path):
    spool, run = open_spool(tmp_path / "spool" / "run"), tmp_path / "output/run"
    parcel = Outbox(spool, run, 0).parcel("dumps/nan-1/attempt1/step7/rank0")
    parcel.content.mkdir(parents=True)
    (parcel.content / "dump.json").write_text("whole")
    parcel.send()

    assert deliver(spool, run, 60.0)

    assert (run / "dumps/nan-1/attempt1/step7/rank0/dump.json").read_text() == "whole"


def test_a_delivery_that_cannot_begin_is_not_done(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    assert not deliver(tmp_path, tmp_path / "run", 1.0)


def test_rules_that_the_agent_could_not_read_are_refused_in_its_words(tmp_path):
    check_rules(Path(trainermon.__file__).parent / "alerts/default_rules.yaml")
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules: 3\n")

    with pytest.raises(ConfigError, match=r"^rules: .*rules\.yaml.*found 3, expected a list that is not empty"):
        check_rules(rules)
