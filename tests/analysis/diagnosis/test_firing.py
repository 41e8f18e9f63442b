"""A run in which every value is finite and alerts fire all the same."""

import pytest

from tests.alerts.alerts_by_hand import alert
from tests.analysis.stored_run import FINITE, grad, store
from trainermon.alerts.log import AlertLog
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.page.page import render_page
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.values import AlertCondition, AlertState, Kind


def late(identity, **changes):
    fields = {"rule": "straggler", "kind": Kind.STEP, "condition": AlertCondition.STRAGGLER, "findings": ()}
    return alert(identity, **{"attempt": 1, "rank": 1, "first_step": 3, **fields, **changes})


@pytest.fixture
def run_dir(tmp_path):
    store(tmp_path, {step: {0: {grad("fc.weight"): FINITE}} for step in range(6)})
    log = AlertLog(tmp_path / "nodes/node/alerts.jsonl")
    for one in (
        late("one"),
        late("two", rank=2, first_step=4),
        late("before", attempt=0, rank=5),
        late("first", rule="slow-input", rank=0, first_step=2),
        late("over", rank=3),
        late("over", rank=3, state=AlertState.RESOLVED),
    ):
        log.append(one)
    return tmp_path


def test_alerts_that_still_fire_stand_beside_the_headline(run_dir):
    diagnosis = diagnose(run_dir)

    assert diagnosis.firing == ("slow-input (rank 0, since step 2)", "straggler (ranks 1, 2, since step 3)")
    text = " ".join(render_text(diagnosis).split())
    said = "alerts still firing: slow-input (rank 0, since step 2), straggler (ranks 1, 2, since step 3);"
    assert f"{said} `trainermon alerts {diagnosis.run_id}` has them" in text
    assert "straggler (ranks 1, 2, since step 3)" in render_page(run_dir, diagnosis)


def test_of_a_step_that_was_asked_for_no_other_alerts_are_told(run_dir):
    assert diagnose(run_dir, step=1).firing == ()
