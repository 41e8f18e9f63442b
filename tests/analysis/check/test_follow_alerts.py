"""What a follower finds reaches the agent of the run: its API, its log, its metrics."""

import json
import shutil

import pytest

from tests.agent.nodes import Run, wait_for
from tests.analysis.check.test_follow import results, train
from trainermon.cli import main


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    return train(tmp_path_factory.mktemp("training") / "dumps", 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("run"), world_size=1)
    run.rank(0, start_agent=True).steps(0, 3)
    wait_for(lambda: (run.node_dir / "prometheus_sd.json").exists() and run.running(), "the agent's address")
    wait_for(lambda: run.get_json("api/run")["ranks"], "the rank")
    yield run
    run.close()


def state(run):
    return [(one["state"], one["rank"], one["first_step"]) for one in run.get_json("api/alerts")]


def test_a_wrong_step_is_an_alert_until_a_later_one_is_right(tmp_path, dumps, run):
    folder = shutil.copytree(dumps, tmp_path / "dumps", copy_function=shutil.copy2)
    later = folder / "step3"
    shutil.move(later, tmp_path / "later")
    command = ["check", "follow", str(folder), "--once", "--run", str(run.output)]

    assert main(command) == 0
    wait_for(lambda: run.alerts(), "the alert in the log")
    metrics = run.get("metrics").decode()
    [alert] = run.get_json("api/alerts")
    assert main(command) == 0  # told once
    told = len(run.alerts())
    shutil.move(tmp_path / "later", later)
    assert main(command) == 0

    assert (alert["rule"], alert["state"], alert["rank"], alert["first_step"]) == ("kernel-inaccurate", "firing", 0, 2)
    assert "first Functional.linear.0.forward: not finite" in alert["message"]
    assert "trainermon_alert_first_step{" in metrics
    assert 'rule="kernel-inaccurate"' in metrics
    assert told == 1
    wait_for(lambda: [one["state"] for one in run.alerts()] == ["firing", "resolved"], "its end")


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"rank": 7}, 409, "rank 7 is none of this node's: [0]"),
        ({"rule": "hang"}, 400, "rule"),
        ({"step": -1}, 400, "step"),
        ({"detail": "x" * 501}, 400, "at most 500 characters"),
        ({"more": 1}, 400, "unknown key"),
    ],
)
def test_what_is_no_finding_is_refused(run, change, status, reason):
    finding = {"rule": "kernel-inaccurate", "rank": 0, "step": 3, "holds": True} | change

    answered, answer = run.post("api/findings", finding)

    assert answered == status
    assert reason in answer["detail"]


def test_the_token_is_needed(run):
    assert run.post("api/findings", {}, token="another")[0] == 401


def test_what_no_agent_takes_is_told_later(tmp_path, dumps, capsys):
    folder = shutil.copytree(dumps, tmp_path / "dumps", copy_function=shutil.copy2)
    node = tmp_path / "run" / "nodes" / "here"
    node.mkdir(parents=True)

    assert main(["check", "follow", str(folder), "--once", "--run", str(tmp_path / "run")]) == 0

    assert "the agent does not know yet of step2, rank 0: no agent is up in" in capsys.readouterr().err
    lines = (folder / "checked" / "followed_steps.jsonl").read_text()
    assert not any("told" in json.loads(line) for line in lines.splitlines())
    assert len(results(folder)) == 4
