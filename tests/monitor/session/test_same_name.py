"""Runs of one name in different output folders, on one node and at the same time."""

import contextlib
import json
import os
import signal

import pytest
import torch
from torch import nn

from tests.agent.nodes import wait_for
from tests.journal_rows import RankJournal
from trainermon import TrainerMon
from trainermon.exporters.node_agent import find_agent
from trainermon.exporters.store.query import run_query

NAME = "job-1"


@contextlib.contextmanager
def watched(output, loss, **agent):
    """Attach a monitor of a run called NAME; yield its run directory and a function that takes a step of that loss."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(1, 1)).sum().backward()
        monitor.record(loss=loss)
        optimizer.step()
        optimizer.zero_grad()

    with TrainerMon({"run_id": NAME, "output_dir": str(output), "agent": agent}) as monitor:
        monitor.set_monitor(model, optimizer)
        yield monitor.run_directory, step


@pytest.fixture
def agents(places):
    """Return a function that tells what the agents of this node say of themselves; end them after the test."""

    def told():
        return [json.loads(path.read_text()) for path in places[0].glob("*/agent.status.json")]

    yield told
    pids = [status["pid"] for status in told()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the end of the agents")


def test_rows_of_a_second_run_never_reach_the_store_of_the_first(places, agents):
    runs = {}
    for loss in (1.0, 2.0):  # the agent of the first lives on when the second begins
        with watched(places[1] / str(loss), loss, linger_s=600.0, wait_s=60.0) as (runs[loss], step):
            for _ in range(int(loss) + 2):
                step()

    for loss, run in runs.items():
        stored = run_query(run, "SELECT DISTINCT attempt, step, loss FROM steps ORDER BY step").rows
        assert stored == [(1, number, loss) for number in range(int(loss) + 2)]
    assert sorted(status["output"] for status in agents()) == sorted(map(str, runs.values()))
    assert [find_agent(run).run_dir for run in runs.values()] == [*runs.values()]
    assert find_agent(NAME) is None  # which of the two is meant is not known


def test_runs_of_one_name_train_side_by_side(places):
    with (
        watched(places[1] / "a", 1.0, start=False) as (_, step_a),
        watched(places[1] / "b", 2.0, start=False) as (_, step_b),
    ):
        step_a()
        step_b()

    spools = [path for path in places[0].iterdir() if path.is_dir()]
    assert len(spools) == 2
    assert all(sorted(RankJournal(spool).rows) == [0] for spool in spools)


def test_a_run_directory_by_another_way_is_the_same_run(places):
    """Two agents would write to one store."""
    link = places[1].parent / "link"
    with watched(places[1], 1.0, start=False):
        pass
    link.symlink_to(places[1])
    with watched(link, 1.0, start=False):
        pass

    assert len([path for path in places[0].iterdir() if path.is_dir()]) == 1
