"""`trainermon node`: every run of the node has one agent, whoever started it, and nothing is lost when it ends."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.agent.nodes import expected, wait_for
from tests.ports import free_port
from trainermon.agent.lifecycle import service
from trainermon.agent.lifecycle.lock import FINISHED, SETTINGS_FILE
from trainermon.agent.lifecycle.service import FAILING, NodeService
from trainermon.core.launcher import SERVICE_FILE, is_served
from trainermon.exporters.store.store import open_run


@pytest.fixture
def start_node(tmp_path):
    """Start the service on the spool folder of the test's runs; it has ended with the test."""
    started = []

    def start(*options):
        command = [sys.executable, "-m", "trainermon", "node", "--spool", str(tmp_path / "spool"), *options]
        with (tmp_path / "stderr").open("wb") as stderr:
            started.append(subprocess.Popen(command, stderr=stderr))
        wait_for(lambda: started[-1].poll() is not None or is_up(tmp_path), "the service")
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def is_up(tmp_path):
    return check(tmp_path) == 0


def command_of(tmp_path, option):
    return [sys.executable, "-m", "trainermon", "node", option, "--spool", str(tmp_path / "spool")]


def check(tmp_path, option="--check"):
    return subprocess.run(command_of(tmp_path, option), check=False).returncode


def test_a_run_is_followed_where_the_site_says_and_stored(make_run, start_node):
    port = free_port()
    start_node("--host", "127.0.0.2", "--port", str(port), "--allow-host", "127.0.0.2", "--node-name", "gpu-7")
    run = make_run()
    rank = run.rank()

    rank.steps(0, 5)

    assert run.running()["url"] == f"http://127.0.0.2:{port}/"
    assert b"trainermon_step{" in run.get("metrics")
    rank.end()
    run.gone()
    assert run.stored() == expected(0, range(5))
    assert [path.name for path in (run.output / "nodes").iterdir()] == ["gpu-7"]


def test_sigterm_waits_until_a_run_without_ranks_is_stored(make_run, start_node):
    run = make_run(linger_s=600, flush_s=1000)
    rank = run.rank()
    node = start_node()
    run.running()
    rank.steps(0, 200)
    rank.kill()

    node.send_signal(signal.SIGTERM)

    assert node.wait(30) == 0
    assert run.stored() == expected(0, range(200))


def test_sigterm_does_not_wait_for_living_ranks(make_run, start_node):
    run = make_run()
    rank = run.rank()
    node = start_node()
    run.running()

    node.send_signal(signal.SIGTERM)

    assert node.wait(30) == 0
    assert rank.process.poll() is None
    assert run.spool.exists()


def test_a_rank_that_finds_the_service_starts_no_agent(make_run, start_node):
    node = start_node()
    run = make_run()

    run.rank(start_agent=True)

    parent = (Path("/proc") / str(run.running()["pid"]) / "stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) == node.pid


TRAINING = """
import torch
from trainermon import TrainerMon
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with TrainerMon({"run_id": "training"}) as monitor:
    monitor.set_monitor(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


def test_a_training_script_needs_no_change_for_the_service(start_node, tmp_path):
    port = free_port()
    node = start_node("--port", str(port))
    places = {"TRAINERMON_SPOOL": str(tmp_path / "spool"), "TRAINERMON_OUTPUT": str(tmp_path / "output")}

    done = subprocess.run(
        [sys.executable, "-c", TRAINING], env={**os.environ, **places}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    with contextlib.closing(open_run(tmp_path / "output" / "training")) as connection:
        steps = connection.execute("SELECT DISTINCT step FROM stats WHERE kind = 'grad_reduced' ORDER BY 1").fetchall()
    assert steps == [(0,), (1,), (2,), (3,)]
    node.terminate()
    assert node.wait(30) == 0
    assert (
        f"page http://127.0.0.1:{port}/" in next((tmp_path / "output").glob("training/nodes/*/agent.log")).read_text()
    )


def test_a_rank_does_not_rely_on_the_service_of_another_user(start_node, tmp_path, monkeypatch):
    start_node()
    assert is_served(tmp_path / "spool")

    monkeypatch.setattr(os, "getuid", lambda: 54321)

    assert not is_served(tmp_path / "spool")


def test_an_agent_that_was_killed_is_started_again(make_run, start_node):
    start_node()
    run = make_run()
    rank = run.rank()
    rank.steps(0, 3)
    first = run.running()["pid"]

    os.kill(first, signal.SIGKILL)

    run.running(other_than=first)
    rank.end()
    run.gone()
    assert run.stored() == expected(0, range(3))


def test_a_finished_run_gives_its_port_to_the_next(make_run, start_node):
    port = free_port()
    start_node("--port", str(port))
    old = make_run(run_id="old", linger_s=600)
    old.rank().end()
    wait_for(lambda: old.status().get("state") == FINISHED, "the end of the first run")

    new = make_run(run_id="new")
    new.rank()

    assert new.running()["url"].endswith(f":{port}/")
    old.gone()


def test_the_service_may_end_when_the_last_run_is_stored(make_run, start_node):
    run = make_run()
    rank = run.rank()
    node = start_node("--exit-when-idle", "0.1")
    rank.steps(0, 3)
    run.running()
    assert node.poll() is None

    rank.end()

    assert node.wait(20) == 0
    assert run.stored() == expected(0, range(3))


def test_a_run_that_comes_when_the_service_is_about_to_end_is_followed(make_run, tmp_path, monkeypatch):
    """It found the lock of the service still held, and its spool is there before the lock is released."""
    (tmp_path / "spool").mkdir(mode=0o700)
    idle, stopping = [], threading.Event()
    monkeypatch.setattr(service, "_work", lambda *_, **__: idle.append(0) if not idle else stopping.set())
    monkeypatch.setattr("threading.Event", lambda: stopping)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(service.NodeService, "stop", lambda *_: None if stopping.is_set() else make_run().rank())
    parser = argparse.ArgumentParser()
    service.add_arguments(parser)

    assert service.main(parser.parse_args(["--spool", str(tmp_path / "spool")])) == 0
    assert stopping.is_set()


def test_a_second_service_is_refused(start_node, tmp_path):
    start_node()

    second = start_node()

    assert second.wait(20) == 1
    assert "another `trainermon node` follows the runs in" in (tmp_path / "stderr").read_text()
    assert is_up(tmp_path)


def test_a_service_that_stands_still_is_not_taken_for_alive(start_node, tmp_path):
    assert check(tmp_path) == 1
    node = start_node()
    node.send_signal(signal.SIGSTOP)

    os.utime(tmp_path / "spool" / SERVICE_FILE, (time.time() - 60,) * 2)

    assert check(tmp_path) == 1


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--port", "99999"], 2, "argument --port: found '99999', expected a port from 0 to 65535"),
        (["--host", "203.0.113.7"], 1, "nobody can listen at 203.0.113.7 port 0 here: Cannot assign requested address"),
        (["--node-name", "a/b"], 1, "--node-name: found 'a/b', expected the name of a folder"),
    ],
)
def test_options_with_which_no_agent_starts_are_refused_before_ranks_wait(start_node, tmp_path, options, status, said):
    node = start_node(*options)

    assert node.wait() == status
    assert said in (tmp_path / "stderr").read_text()
    assert not (tmp_path / "spool" / SERVICE_FILE).exists()


def test_agents_that_do_not_stay_are_told_by_the_check(make_run, start_node, tmp_path):
    run = make_run()
    run.rank()
    settings = run.spool / SETTINGS_FILE
    good = settings.read_bytes()
    settings.write_text('{"run_id": 7}')
    start_node()

    wait_for(lambda: check(tmp_path) == FAILING, "three ends of the agent")
    said = subprocess.run(command_of(tmp_path, "--check"), capture_output=True, text=True, check=False).stdout
    assert said.startswith(f"{run.spool.name}: its agent has ended 3 times, the last time with status 2")
    assert check(tmp_path, "--check=service") == 0
    settings.write_bytes(good)


def test_rules_that_cannot_be_read_do_not_keep_runs_from_being_followed(make_run, start_node, tmp_path):
    start_node("--rules", str(tmp_path / "missing.yaml"), "--log-to-stderr")
    run = make_run()
    run.rank()

    assert run.get_json("api/run")["rules"] > 0
    said = (tmp_path / "stderr").read_text()
    assert "own rules instead of" in said
    assert "missing.yaml" in said


class Starts:
    """Stands in for the start of processes; those it starts have ended at once, with status 1."""

    def __init__(self):
        self.spools = []

    def __call__(self, command, **options):
        self.spools.append(command[3])
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"], **options)


def test_only_spools_of_this_user_are_followed(make_run, monkeypatch):
    run = make_run()
    run.rank()
    (run.spool.parent / "linked").symlink_to(run.spool)
    starts = Starts()

    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 54321)
        NodeService(run.spool.parent, (), start=starts).turn(0.0)
    assert starts.spools == []

    node = NodeService(run.spool.parent, (), start=starts)
    node.turn(0.0)
    node.stop(20)
    assert starts.spools == [str(run.spool)]


def test_a_run_that_has_its_own_agent_is_left_alone(make_run):
    run = make_run()
    run.rank(start_agent=True)
    run.running()
    starts = Starts()

    NodeService(run.spool.parent, (), start=starts).turn(0.0)

    assert starts.spools == []


def test_an_agent_that_fails_is_tried_again_ever_more_rarely(make_run):
    run = make_run()
    run.rank()
    starts = Starts()
    node = NodeService(run.spool.parent, (), start=starts)
    when = []

    for now_s in range(200):
        node.turn(float(now_s))
        node.stop(20)
        when += [now_s] * (len(starts.spools) - len(when))

    assert when[:6] == [0, 1, 3, 7, 15, 31]
    assert max(b - a for a, b in itertools.pairwise(when)) <= 60
