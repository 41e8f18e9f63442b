"""How an agent begins, who it belongs to, and when it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.agent.nodes import RANK_SCRIPT, expected, is_agent, wait_for
from trainermon.agent.lifecycle.lock import (
    DRAINING,
    FINISHED,
    RUNNING,
    AgentStatus,
    RunLock,
    claim,
    is_followed,
    write_status,
)
from trainermon.agent.lifecycle.release import is_needed, linger_s, remove_run_spool
from trainermon.core.errors import SpoolError
from trainermon.core.journal import JournalReader
from trainermon.core.launcher import agent_environment, start_agent
from trainermon.core.spool import RankLock, open_spool, remove_spool
from trainermon.exporters.store.segments import JournalPosition

STATUS = AgentStatus(pid=1, run_id="run", output="/out")


def environment_of(pid):
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in entries if entry)


def test_the_agent_is_no_part_of_the_rank_that_started_it(run):
    foreign = {
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.1",
        "CUDA_VISIBLE_DEVICES": "3",
        "NCCL_DEBUG": "INFO",
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "13",
        "HF_HOME": "/somewhere",
    }
    rank = run.rank(start_agent=True, environment=foreign)
    agent = psutil.Process(run.running()["pid"])

    assert agent.pid not in {child.pid for child in psutil.Process(rank.process.pid).children(recursive=True)}
    assert agent.pid not in {child.pid for child in psutil.Process().children(recursive=True)}
    assert os.getsid(agent.pid) not in (os.getsid(rank.process.pid), os.getsid(0))
    assert agent.cwd() == "/"
    assert agent.nice() == psutil.Process(rank.process.pid).nice() + 5
    assert os.readlink(f"/proc/{agent.pid}/fd/0") == "/dev/null"
    for descriptor in (1, 2):
        assert os.readlink(f"/proc/{agent.pid}/fd/{descriptor}") == str(run.spool / "agent.stderr")
    environment = environment_of(agent.pid)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["HF_HOME"] == "/somewhere"
    assert not set(foreign) - {"OMP_NUM_THREADS", "HF_HOME"} & set(environment)


def test_the_agent_of_a_pinned_rank_may_use_every_cpu(run):
    every = os.sched_getaffinity(0)
    if len(every) < 2:
        pytest.skip("on one CPU there is none that a pinned rank may not use")
    os.sched_setaffinity(0, {min(every)})
    try:
        run.rank(start_agent=True)
    finally:
        os.sched_setaffinity(0, every)

    assert os.sched_getaffinity(run.running()["pid"]) == every


def test_the_agent_survives_a_launcher_that_kills_every_descendant(run):
    """As DeepSpeed's launcher does: children(recursive=True), each killed."""
    others = psutil.Process().children(recursive=True)  # of this test process, as multiprocessing's resource tracker
    launcher = subprocess.Popen(["sleep", "1000"])  # a process tree of its own is the test's own here
    rank = run.rank(start_agent=True)
    rank.steps(0, 5)
    pid = run.running()["pid"]

    for child in psutil.Process().children(recursive=True):
        if child not in others:
            child.kill()
    launcher.wait()
    rank.wait()

    run.gone()
    assert run.stored() == expected(0, range(5))
    wait_for(lambda: not is_agent(pid), "the end of the agent")


def test_what_a_killed_rank_had_written_is_stored(make_run):
    run = make_run(flush_s=1000)
    rank = run.rank(start_agent=True)
    rank.steps(0, 7)
    rank.kill()

    run.gone()

    assert run.stored() == expected(0, range(7))


def test_the_agent_waits_for_every_rank(make_run):
    run = make_run(world_size=2)
    first, second = run.rank(0, start_agent=True), run.rank(1)
    first.steps(0, 3)
    first.end()
    wait_for(lambda: [r["alive"] for r in run.get_json("api/run")["ranks"]] == [False, True], "rank 0 seen as gone")
    second.steps(0, 4)
    assert run.status()["state"] == RUNNING
    second.end()

    run.gone()

    assert run.stored() == expected(0, range(3)) + expected(1, range(4))


def test_of_thirty_agents_one_stays(run):
    rank = run.rank()
    rank.steps(0, 3)
    agents = [
        subprocess.Popen([sys.executable, "-m", "trainermon.agent", str(run.spool)], stderr=subprocess.PIPE)
        for _ in range(30)
    ]
    try:
        wait_for(lambda: sum(agent.poll() is not None for agent in agents) == 29, "29 agents that left")
        (chosen,) = [agent for agent in agents if agent.poll() is None]
        assert run.running()["pid"] == chosen.pid
        assert all(agent.returncode == 0 for agent in agents if agent is not chosen)
        rank.end()
        assert chosen.wait(20) == 0
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
            agent.communicate()
    assert run.stored() == expected(0, range(3))


def test_two_jobs_on_a_node_have_an_agent_each(make_run):
    runs = [make_run(run_id=name) for name in ("one", "two")]
    ranks = [run.rank(start_agent=True) for run in runs]
    assert runs[0].running()["pid"] != runs[1].running()["pid"]
    for count, rank in enumerate(ranks, start=1):
        rank.steps(0, count)
        rank.end()
    for run in runs:
        run.gone()

    assert [len(run.stored()) for run in runs] == [1, 2]


def test_a_job_that_restarts_while_the_agent_lingers_keeps_it(make_run):
    run = make_run(linger_s=60)
    first = run.rank(start_agent=True)
    first.steps(0, 3)
    first.end()
    pid = wait_for(lambda: (s := run.status()).get("state") == FINISHED and s, "a finished first attempt")["pid"]

    second = run.rank(attempt=2, start_agent=True)
    wait_for(lambda: run.status()["state"] == RUNNING, "an agent that runs again")
    second.steps(2, 3)
    run.write_settings()
    position = second.end()

    status = wait_for(lambda: (s := run.status()).get("state") == FINISHED and s, "a finished second attempt")
    assert status["pid"] == pid
    assert status["flushed"]["0"] == position
    assert run.stored() == expected(0, range(3)) + expected(0, range(2, 5), attempt=2)


def test_no_attempt_is_left_without_an_agent(make_run):
    """Each attempt starts while the agent of the one before is on its way out."""
    run = make_run(linger_s=0)
    for attempt in range(1, 6):
        rank = run.rank(attempt=attempt, start_agent=True)
        rank.steps(attempt, 2)
        rank.end()
        time.sleep(0.15 * attempt)  # another moment of the leaving agent each time

    run.gone()

    found = [row for attempt in range(1, 6) for row in expected(0, (attempt, attempt + 1), attempt=attempt)]
    assert run.stored() == found


def test_a_killed_agent_loses_nothing_and_repeats_nothing(make_run):
    run = make_run(flush_s=0.3)
    rank = run.rank(start_agent=True)
    for round_number in range(4):
        status = run.running()
        rank.steps(11 * round_number, 10, nan=round_number == 1)
        time.sleep(0.1 * round_number)
        os.kill(status["pid"], signal.SIGKILL)
        rank.steps(11 * round_number + 10, 1)
        start_agent(run.spool)
        run.running(other_than=status["pid"])
    rank.end()
    run.gone()

    assert run.stored() == expected(0, range(44))
    alerts = [(alert["id"], alert["state"]) for alert in run.alerts()]
    assert len(alerts) == len(set(alerts))
    assert any(alert["rule"] == "gradient-nonfinite" for alert in run.alerts())


def test_sigterm_stores_what_there_is_and_leaves(make_run):
    run = make_run(flush_s=1000)
    rank = run.rank(start_agent=True)
    pid = run.running()["pid"]
    rank.steps(0, 4)

    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not is_agent(pid), "the end of the agent")

    assert run.stored() == expected(0, range(4))
    assert run.status()["state"] == DRAINING  # a rank lives, so the spool stays for the next agent
    rank.steps(4, 2)
    start_agent(run.spool)
    rank.end()
    run.gone()
    assert run.stored() == expected(0, range(6))


def test_an_agent_that_was_stopped_starts_its_timers_anew(make_run):
    run = make_run(linger_s=3)
    rank = run.rank(start_agent=True)
    rank.steps(0, 3)
    rank.end()
    pid = wait_for(lambda: (s := run.status()).get("state") == FINISHED and s, "a finished run")["pid"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    os.kill(pid, signal.SIGCONT)
    resumed_s = time.monotonic()

    run.gone()

    assert time.monotonic() - resumed_s > 2.5
    assert "stood still" in run.log()


def test_an_agent_whose_spool_was_removed_by_somebody_ends(run):
    rank = run.rank(start_agent=True)
    rank.steps(0, 3)
    pid = run.running()["pid"]
    wait_for(lambda: len(run.stored()) == 3, "three stored steps")

    shutil.rmtree(run.spool)

    wait_for(lambda: not is_agent(pid), "the end of the agent")


def test_an_agent_leaves_a_spool_that_was_removed_and_made_again_to_the_next_one(make_run):
    run = make_run(linger_s=60)
    first = run.rank(start_agent=True)
    first.steps(0, 3)
    old = run.running()["pid"]
    wait_for(lambda: len(run.stored()) == 3, "three stored steps")
    first.kill()

    run.spool.rename(run.spool.with_name("removed"))
    run.write_settings(linger_s=60)
    second = run.rank(attempt=2)
    run.launch_agent()

    new = run.running(other_than=old)["pid"]
    wait_for(lambda: not is_agent(old), "the end of the first agent")
    second.steps(3, 2)
    wait_for(lambda: len(run.stored()) == 5, "the steps of the second attempt")
    assert run.stored() == sorted(expected(0, range(3)) + expected(0, range(3, 5), attempt=2))
    assert is_agent(new)
    assert run.status()["pid"] == new


def test_lost_race_against_a_leaving_agent_is_run_again(tmp_path):
    lock = RunLock.try_acquire(tmp_path)
    write_status(tmp_path, AgentStatus(pid=1, run_id="run", output="/out", state=FINISHED))
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            lock.close()

    assert claim(tmp_path, sleep=sleep) is not None
    assert len(slept) == 3


def test_a_running_agent_makes_others_leave(tmp_path):
    lock = RunLock.try_acquire(tmp_path)
    write_status(tmp_path, STATUS)

    assert claim(tmp_path, sleep=lambda _: None) is None

    lock.close()


def test_the_last_word_of_a_killed_agent_makes_nobody_leave(tmp_path):
    write_status(tmp_path, STATUS)

    assert claim(tmp_path) is not None


def test_no_lock_is_made_in_a_spool_that_is_being_taken_away(tmp_path):
    spool = open_spool(tmp_path / "run")
    found = []

    def meanwhile():
        found.append((RunLock.try_acquire(spool), list(spool.iterdir())))
        return True

    assert remove_spool(spool, meanwhile)
    assert found == [(None, [])]
    with pytest.raises(FileNotFoundError):
        RunLock.try_acquire(spool)


def test_a_spool_that_is_gone_needs_no_agent(tmp_path):
    assert claim(tmp_path / "nowhere") is None


def test_looking_whether_a_spool_is_followed_leaves_nothing_in_it(tmp_path):
    assert not is_followed(tmp_path)
    assert not is_followed(tmp_path / "nowhere")
    assert not list(tmp_path.iterdir())

    lock = RunLock.try_acquire(tmp_path)
    assert is_followed(tmp_path)
    lock.close()
    assert not is_followed(tmp_path)


@pytest.mark.parametrize(("name", "named"), [("nowhere", "it does not exist"), ("", "there is no agent.json in it")])
def test_a_folder_that_is_no_spool_is_refused_and_left_alone(tmp_path, name, named):
    done = subprocess.run(
        [sys.executable, "-m", "trainermon", "agent", tmp_path / name],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr.startswith(f"trainermon agent: {tmp_path / name} is not the spool of a run: {named}")
    assert not list(tmp_path.iterdir())


def test_a_spool_with_a_living_rank_is_not_taken_away(tmp_path):
    spool = tmp_path / "run"
    spool.mkdir()
    lock = RankLock(spool, 0)

    assert not remove_run_spool(spool, {})
    assert is_needed(spool, {})
    lock.close()
    assert not is_needed(spool, {})
    assert remove_run_spool(spool, {})

    assert list(tmp_path.iterdir()) == []


def test_a_spool_is_taken_away_only_when_every_journal_is_stored_to_its_end(run):
    for attempt in (1, 2):
        rank = run.rank(attempt=attempt)
        rank.steps(0, 1)
        rank.end()
    *places, end = [JournalPosition(1, record.cursor) for record in JournalReader(run.spool, 0).poll()]
    assert len(places) == 5

    for stored in ({}, {1: end}, *({0: place} for place in places)):
        assert not remove_run_spool(run.spool, stored)
        assert is_needed(run.spool, stored)
    with (run.spool / f"rank00000.{end.cursor.file}.jnl").open("ab") as journal:
        journal.write(b"torn")

    assert not is_needed(run.spool, {0: end})
    assert remove_run_spool(run.spool, {0: end})


LEAVING = f"""
import subprocess, sys
from pathlib import Path
from trainermon.agent.lifecycle import release
from trainermon.agent import daemon

remove = release.remove_run_spool

def remove_after_another_attempt(spool, stored):
    release.remove_run_spool = remove
    rank = [sys.executable, "{RANK_SCRIPT}", spool, "run", "0", "2", "1"]
    subprocess.run(rank, input="steps 5 2\\nend\\n", text=True, stdout=subprocess.DEVNULL, check=True)
    return remove(spool, stored)

release.remove_run_spool = remove_after_another_attempt
sys.argv[1:] = [sys.argv[1]]
sys.exit(daemon.run_command_line())
"""


def test_what_an_attempt_wrote_after_the_last_look_is_stored_by_the_same_agent(run):
    """It has come and gone while the agent was leaving, and nobody has started another agent."""
    rank = run.rank()
    rank.steps(0, 3)
    rank.end()

    done = subprocess.run([sys.executable, "-c", LEAVING, run.spool], timeout=900, check=False)

    assert done.returncode == 0
    assert not run.spool.exists()
    assert run.stored() == expected(0, range(3)) + expected(0, (5, 6), attempt=2)
    assert "it is followed too" in run.log()


def test_how_long_to_linger(tmp_path):
    assert linger_s(tmp_path, 60) == 60
    for text, seconds in (
        ('{"hold_pid": null}', 0),
        (f'{{"hold_pid": {os.getpid()}}}', float("inf")),
        ('{"hold_pid": 4194303}', 60),
        ("{", 60),
        ("[]", 60),
    ):
        (tmp_path / "agent.linger").write_text(text)
        assert linger_s(tmp_path, 60) == seconds


def test_an_agent_that_cannot_start_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(SpoolError, match="cannot be started by '/nonexistent/python'"):
        start_agent(tmp_path)

    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SpoolError, match="ended at its start with status 1: no message"):
        start_agent(tmp_path)


def test_the_import_path_means_the_same_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    path = agent_environment({"PYTHONPATH": "lib:/opt/x:"})["PYTHONPATH"].split(":")

    assert path[:2] == [str(tmp_path / "lib"), "/opt/x"]
    assert all(Path(folder).name != "site-packages" for folder in path)


def test_the_agent_never_loads_torch(run):
    run.rank(start_agent=True)
    run.running()
    maps = Path(f"/proc/{run.status()['pid']}/maps").read_text()

    assert "libtorch" not in maps
    assert "/torch/" not in maps
