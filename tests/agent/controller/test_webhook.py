"""The controller's way in, over HTTP: who is refused and how; what changes nothing; how many are followed."""

from __future__ import annotations

import json
import subprocess
import time

import pytest

from tests.agent.controller.simulation import Job
from tests.agent.nodes import wait_for
from tests.agent.notifications import alert, notification
from tests.server_programs import find_program

ALERTS = "api/v1/alerts"


@pytest.fixture(scope="module")
def job():
    job = Job(2, 2).ready()
    yield job
    job.close()


@pytest.fixture
def controller(job, make_controller):
    job.orders.clear()
    return make_controller(discovery={"agents": job.addresses}, limits={"max_per_hour": 2}).ready()


def test_what_is_wrong_with_a_post_is_told_by_its_status(controller, job):
    good = notification(alert())
    large = json.dumps({**good, "receiver": "x" * (1 << 20)}).encode()

    assert controller.post(ALERTS, good, token="wrong")[0] == 401
    assert controller.post(ALERTS, good, token=None)[0] == 401
    assert controller.post(ALERTS, b"{not json")[0] == 400
    assert controller.post(ALERTS, b"[" * 100_000)[0] == 400
    assert controller.post(ALERTS, {**good, "version": "3"})[0] == 400
    assert controller.post(ALERTS, notification(alert(run="half \ud800")))[0] == 400
    assert controller.post(ALERTS, notification(*(alert(run=f"run{number}") for number in range(101))))[0] == 400
    assert controller.post(ALERTS, large)[0] == 413
    assert controller.get_json("api/v1/escalations") == []
    assert not job.orders


def test_a_repetition_changes_nothing_not_even_after_a_restart(controller, job, make_controller):
    body = notification(alert())
    first = controller.post(ALERTS, body)
    wait_for(lambda: (controller.escalation() or {})["outcome"], "the end of the escalation")
    again = controller.post(ALERTS, body)
    assert controller.terminate() == 0
    restarted = make_controller(discovery={"agents": job.addresses}).ready()
    third = restarted.post(ALERTS, body)

    assert (first[0], first[1]["status"]) == (202, "accepted")
    assert (again[0], again[1]["status"]) == (200, "duplicate")
    assert (third[0], third[1]["status"]) == (200, "duplicate")
    assert [order["agent"] for order in job.orders] == [0, 1]
    assert restarted.escalation()["outcome"] == "done"
    assert restarted.escalation()["coverage"] == {str(rank): "written" for rank in range(4)}


def test_too_many_are_suppressed_and_stay_so(controller, job):
    bodies = [notification(alert(f"A{number}")) for number in range(3)]
    statuses = [controller.post(ALERTS, body)[1]["status"] for body in bodies]
    again = controller.post(ALERTS, bodies[2])

    assert statuses == ["accepted", "accepted", "suppressed"]
    assert (again[0], again[1]["status"]) == (200, "duplicate")
    assert len(controller.get_json("api/v1/escalations")) == 2


def test_a_group_that_grows_asks_only_for_what_is_new(controller, job):
    first = alert(rank=0)
    controller.post(ALERTS, notification(first))
    controller.post(ALERTS, notification(first, alert(rank=3)))
    wait_for(lambda: len(job.orders) == 2, "two orders")

    assert sorted((order["agent"], order["ranks"]) for order in job.orders) == [(0, [0]), (1, [3])]


def test_where_there_is_one_run_its_name_may_be_missing(controller, job):
    controller.post(ALERTS, notification(alert(run=None, rank=1)))
    wait_for(lambda: job.orders, "the order")

    assert (job.orders[0]["run"], job.orders[0]["ranks"]) == ("run", [1])


def test_a_person_may_ask_too(controller, job):
    order = {"id": "by-hand", "ranks": [2], "task": "tensor", "num_steps": 2, "reason": "curious"}
    first, again = controller.post("api/v1/escalations", order), controller.post("api/v1/escalations", order)
    wrong = controller.post("api/v1/escalations", {**order, "id": "../x"})
    wait_for(lambda: job.orders, "the order")

    assert (first[0], again[0], wrong[0]) == (202, 200, 400)
    assert {key: job.orders[0][key] for key in ("id", "ranks", "task", "num_steps", "reason")} == order


def test_an_escalation_of_a_run_that_nobody_knows_fails_and_says_so(make_controller, job):
    limits = {"give_up_s": 0.2}
    controller = make_controller(discovery={"agents": job.addresses}, limits=limits).ready()
    controller.post(ALERTS, notification(alert(run="another")))
    wait_for(lambda: controller.escalation()["outcome"], "the end of the escalation")

    assert controller.escalation()["outcome"] == "failed"
    assert controller.escalation()["detail"] == "no rank of run 'another' was found to live"


@pytest.mark.server
def test_metrics_are_clean_and_count_what_happens(controller, job, tmp_path):
    asking = alert()
    controller.post(ALERTS, notification(asking, alert(escalate=None)))
    controller.post(ALERTS, notification(asking))
    wait_for(lambda: controller.escalation()["outcome"], "the end of the escalation")

    text = controller.get("metrics").decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    expected = {
        "agents": 2,
        "agents_up": 2,
        "living_ranks": 4,
        "received_alerts_total": 3,
        "ignored_alerts_total": 1,
        "duplicate_alerts_total": 1,
        "escalations_total": 1,
        "open_escalations": 0,
        "errors_total": 0,
    }
    assert {name: float(values[f"trainermon_controller_{name}"]) for name in expected} == expected
    assert abs(float(values["trainermon_controller_last_discovery_timestamp_seconds"]) - time.time()) < 60
    checked = subprocess.run([find_program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
