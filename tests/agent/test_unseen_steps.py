"""Steps without any rows are an alert and a gap in the diagnosis, and are never taken for healthy."""

import pytest

from tests.agent.nodes import wait_for
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict
from trainermon.analysis.diagnosis.report import render_text

WHY = "the script steps another optimizer (SGD)"


def states(run):
    return [alert["state"] for alert in run.alerts() if alert["rule"] == "monitor-blind"]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            {"type": "gap", "first": 3, "last": None, "message": WHY},
            f"nothing is collected of rank 0 from step 3 on: {WHY}",
        ),
        ({"type": "detached", "message": "KeyError"}, "nothing is collected of rank 0 from step 3 on: KeyError"),
        (
            {"type": "gap", "first": 3, "last": None, "message": "ties are not looked for", "what": "ties"},
            "rank 0 from step 3 on: ties are not looked for",
        ),
    ],
)
def test_what_is_not_collected_any_more_is_an_alert_and_the_headline(make_run, event, said):
    run = make_run()
    rank = run.rank()
    run.launch_agent()
    rank.steps(0, 3)
    rank.event(**event)
    rank.steps(3, 1)  # a number that the script records, perhaps
    wait_for(lambda: states(run) == ["firing"], "an alert")
    rank.end()
    run.gone()

    found = diagnose(run.output)

    assert found.verdict is DiagnosisVerdict.ALERTED
    assert found.headline == "The alert monitor-blind fired on rank 0 from step 3 on"
    assert said in render_text(found)


def test_a_gap_that_is_over_is_told_beside_what_is_known(make_run):
    run = make_run()
    rank = run.rank()
    run.launch_agent()
    rank.steps(0, 3)
    rank.event(type="gap", first=3, last=4, message=WHY)
    rank.steps(5, 2)
    wait_for(lambda: states(run) == ["firing", "resolved"], "the end of an alert")
    rank.end()
    run.gone()

    found = diagnose(run.output)

    assert found.verdict is DiagnosisVerdict.FINITE
    assert f"nothing is collected of rank 0 of steps 3 to 4: {WHY}" in render_text(found)
