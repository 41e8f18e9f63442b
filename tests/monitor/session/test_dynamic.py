"""`DYNAMIC_MONITOR`: a monitor that waits, is started by an edit, and stops after `collect_times`."""

from tests.monitor.session.test_containment import STEPS, assert_same_run, train
from tests.monitor.session.test_reconfigure import kinds_by_step, send

QUIET = {"agent": {"start": False}}


def test_it_waits_until_it_is_started_and_stops_by_itself(places, monkeypatch):
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    started = {**QUIET, "dynamic_on": True, "collect_times": 1}

    watched = train(QUIET, before_step=lambda step: send(places, 2, started) if step == 0 else None)

    graded = [step for step, kinds in kinds_by_step(places).items() if "grad_reduced" in kinds]
    assert graded == [2]
    assert STEPS > 3
    monkeypatch.delenv("DYNAMIC_MONITOR")
    assert_same_run(watched, train(None, before_step=lambda step: None))


def test_an_edit_that_does_not_say_on_stops_it(places, monkeypatch):
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")

    train({**QUIET, "dynamic_on": True}, before_step=lambda step: send(places, 2, QUIET) if step == 0 else None)

    graded = [step for step, kinds in kinds_by_step(places).items() if "grad_reduced" in kinds]
    assert graded == [0, 1]


def test_without_the_variable_it_collects_from_the_start(places):
    train({**QUIET, "dynamic_on": True}, before_step=lambda step: None)

    assert all("grad_reduced" in kinds for kinds in kinds_by_step(places).values())
