"""A run in which every value is finite and alerts fire all the same."""

import dataclasses

import pytest

from tests.alerts.alerts_by_hand import alert
from tests.analysis.stored_run import FINITE, grad, store
from trainermon import cli
from trainermon.alerts.log import AlertLog
from trainermon.analysis.diagnosis.command import FOUND
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict
from trainermon.analysis.diagnosis.page.page import render_page
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.values import AlertCondition, AlertState, Kind, Severity


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


def told(identity, rule, condition, **changes):
    return late(identity, rule=rule, condition=condition, message=f"{rule}: it did", **changes)


@pytest.mark.parametrize("is_over", [False, True])
def test_the_gravest_alert_is_the_headline_of_a_run_that_is_finite(run_dir, is_over):
    alerts = [
        told("eval", "eval-mode", AlertCondition.THRESHOLD, first_step=1),
        told("apart", "replica-divergence", AlertCondition.DIFFERS, severity=Severity.CRITICAL, first_step=3),
        told("apart too", "replica-divergence", AlertCondition.DIFFERS, severity=Severity.CRITICAL, rank=2),
    ]
    log = AlertLog(run_dir / "nodes/node/alerts.jsonl")
    for one in alerts:
        log.append(one)
        if is_over:
            log.append(dataclasses.replace(one, state=AlertState.RESOLVED))

    diagnosis = diagnose(run_dir)

    assert (diagnosis.verdict, diagnosis.step) == (DiagnosisVerdict.ALERTED, 3)
    assert diagnosis.headline == "The alert replica-divergence fired on ranks 1, 2 from step 3 on"
    assert diagnosis.reason.startswith("replica-divergence: it did")
    assert ("no longer" in diagnosis.reason) == is_over
    assert "Nothing was non-finite" not in render_text(diagnosis).splitlines()[0]
    assert "an alert fired" in render_page(run_dir, diagnosis)


@pytest.mark.parametrize("rule", ["learning-rate-zero", "eval-mode", "learning-rate-jump"])
def test_a_warning_about_what_is_computed_has_an_exit_status(tmp_path, rule):
    store(tmp_path, {step: {0: {grad("fc.weight"): FINITE}} for step in range(6)})
    AlertLog(tmp_path / "nodes/node/alerts.jsonl").append(told("it", rule, AlertCondition.THRESHOLD))

    assert cli.main(["diagnose", str(tmp_path), "--exit-code"]) == FOUND


@pytest.mark.parametrize("changes", [{"severity": Severity.INFO}, {"condition": AlertCondition.REPORTED}])
def test_what_says_nothing_of_the_values_leaves_the_run_finite(run_dir, changes):
    AlertLog(run_dir / "nodes/node/alerts.jsonl").append(late("other", rule="mild", **changes))

    assert diagnose(run_dir).verdict is DiagnosisVerdict.FINITE
