"""A real agent with real ranks takes a controller's escalations, and in a one-node job Alertmanager's posts."""

from __future__ import annotations

import json
import time

import pytest

from tests.agent.nodes import wait_for
from tests.agent.notifications import alert, notification


@pytest.fixture
def pair(make_run):
    """A run of two ranks at step 10."""
    run = make_run(world_size=2, escalation={"max_per_hour": 2})
    run.first, run.second = run.rank(0), run.rank(1)
    run.launch_agent()
    for rank in (run.first, run.second):
        rank.steps(0, 11)
    wait_for(lambda: [rank["step"] for rank in run.get_json("api/v1/ranks")["ranks"]] == [10, 10], "both ranks seen")
    return run


def order(**changes):
    return {"id": "Spike-1", "run": "run", "attempt": 1, "first_step": 20, "ranks": [0, 1], **changes}


def test_states_tell_what_a_controller_plans_with(pair):
    states = pair.get_json("api/v1/ranks")

    assert {key: states[key] for key in ("run_id", "attempt", "world_size")} == {
        "run_id": "run",
        "attempt": 1,
        "world_size": 2,
    }
    assert [rank["alive"] for rank in states["ranks"]] == [True, True]
    assert states["steps_per_s"] >= 0


def test_an_escalation_is_carried_out_once_however_often_it_comes(pair):
    status, answer = pair.post("api/v1/escalations", order())
    again = pair.post("api/v1/escalations", order())

    assert (status, answer["status"], answer["ranks"]) == (202, "accepted", [0, 1])
    assert (again[0], again[1]["status"], again[1]["ranks"]) == (200, "duplicate", [0, 1])
    assert pair.first.commands()[1] == ["Spike-1"]
    assert pair.second.commands()[1] == ["Spike-1"]


def test_a_late_rank_is_left_out_and_named(pair):
    pair.second.steps(11, 15)
    wait_for(lambda: pair.get_json("api/v1/ranks")["ranks"][1]["step"] == 25, "the second rank at step 25")

    answer = pair.post("api/v1/escalations", order())[1]
    late = pair.post("api/v1/escalations", order(id="Spike-2", ranks=[1]))

    assert (answer["ranks"], answer["late"]) == ([0], [1])
    assert (late[0], late[1]["status"]) == (200, "late")
    assert pair.second.commands()[1] == []


REFUSED = (
    ({"run": "other"}, 409, "this is the agent of 'run'"),
    ({"attempt": 2}, 409, "attempt: found 2"),
    ({"ranks": [7]}, 409, "none of the ranks [7]"),
    ({"ranks": ["0"]}, 400, "ranks[0]"),
    ({"id": "../x"}, 400, "id"),
    ({"num_steps": 0}, 400, "num_steps"),
    ({"nonsense": 1}, 400, "nonsense"),
)


def test_what_cannot_be_done_is_refused_by_name(pair):
    for change, status, named in REFUSED:
        answer = pair.post("api/v1/escalations", order(**change))

        assert answer[0] == status, change
        assert named in answer[1]["detail"]
    assert pair.first.commands()[1] == []


def test_limits_hold_and_are_remembered_by_the_next_agent(pair):
    pair.post("api/v1/escalations", order(id="a"))
    pair.post("api/v1/escalations", order(id="b"))
    third = pair.post("api/v1/escalations", order(id="c"))
    pid = pair.running()["pid"]
    pair.post("api/stop")
    wait_for(lambda: not pair.status().get("url") or pair.status()["state"] != "running", "the agent's end")
    pair.launch_agent()
    pair.running(other_than=pid)
    again = pair.post("api/v1/escalations", order(id="a"))
    fourth = pair.post("api/v1/escalations", order(id="d"))

    assert (third[0], third[1]["status"]) == (200, "suppressed")
    assert "2 dumps in the last hour" in third[1]["reason"]
    assert again[1]["status"] == "duplicate"
    assert fourth[1]["status"] == "suppressed"


def test_alertmanager_may_post_to_the_agent_of_a_one_node_job(pair):
    body = notification(alert(rank=1, escalate="tensor"))
    status, answer = pair.post("api/v1/alerts", body)
    again = pair.post("api/v1/alerts", body)

    assert (status, answer["status"], answer["ranks"]) == (202, "accepted", [1])
    assert answer["first_step"] > 10
    assert (again[0], again[1]["status"]) == (200, "duplicate")
    assert pair.second.commands()[1] == [answer["id"]]
    assert pair.first.commands()[1] == []
    book = (pair.spool / "agent.commands.jsonl").read_text().split("\n")
    command = json.loads(next(line for line in book if line))["command"]
    assert (command["task"], command["reason"]) == ("tensor", "TrainermonGradSpike: TrainermonGradSpike on run")


def test_a_truncated_group_means_all_ranks(pair):
    answer = pair.post("api/v1/alerts", notification(alert(rank=1), truncatedAlerts=3))[1]
    assert answer["ranks"] == [0, 1]


def test_alerts_that_ask_for_nothing_here_are_told_why(pair):
    old = alert("Old", starts_s=time.time() - 3600)
    body = notification(alert("Other", run="another"), alert("Plain", escalate=None), alert(status="resolved"), old)
    status, answer = pair.post("api/v1/alerts", body)

    assert (status, answer["status"]) == (200, "ignored")
    for text in ("Plain: it has no label escalate", "resolved", "Old: it began 3600 s ago", "Other: it is of run"):
        assert text in "\n".join(answer["ignored"])
