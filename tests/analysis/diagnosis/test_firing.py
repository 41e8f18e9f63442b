"""A run in which every value is finite and alerts fire all the same."""

import dataclasses
import json

import pytest

from tests.alerts.alerts_by_hand import alert
from tests.analysis.stored_run import FINITE, grad, store
from trainermon import cli
from trainermon.alerts.laws.registry import LAWS, law_of
from trainermon.alerts.log import AlertLog
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict, FaultPhase, Symptom
from trainermon.analysis.diagnosis.page.page import render_page
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.catalogue import TORCH_WARNED_SERIES
from trainermon.core.config import MonitorConfig
from trainermon.core.terminal.statuses import FOUND
from trainermon.core.values import AlertCondition, AlertDirection, AlertState, Finding, Kind, SeriesKey, Severity
from trainermon.monitor.taps.loop.torch_warnings import WARNED


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


def broken_law(**changes):
    """A broken law: the reduction of two modules' gradients was not linear from step 2 on, on both ranks."""
    found = tuple(Finding(series=SeriesKey(Kind.GRAD_REDUCED, name), value=0.5) for name in ("fc.weight", "head.bias"))
    law = {"law": "linear", "kind": Kind.GRAD_REDUCED, "severity": Severity.CRITICAL, "findings": found}
    return told("law", "my-reductions", AlertCondition.LAW, **{"first_step": 2, **law, **changes})


def test_a_broken_law_says_what_does_not_hold_where_and_what_usually_breaks_it(run_dir):
    log = AlertLog(run_dir / "nodes/node/alerts.jsonl")
    log.append(told("apart", "replica-divergence", AlertCondition.DIFFERS, severity=Severity.CRITICAL, first_step=2))
    for rank in range(2):
        log.append(dataclasses.replace(broken_law(rank=rank), id=f"law {rank}"))

    diagnosis = diagnose(run_dir)

    assert (diagnosis.symptom, diagnosis.phase, diagnosis.step) == (Symptom.BREAKS_LAW, FaultPhase.REDUCTION, 2)
    assert (diagnosis.module, diagnosis.candidates) == ("fc", ("head",))
    assert diagnosis.causes == law_of("linear").causes
    assert "alert replica-divergence (rank 1, since step 2)" in diagnosis.consequences
    text = " ".join(render_text(diagnosis).split())
    assert (
        "Reduced gradients are not the sum, nor the average, of what the ranks had (ranks 0, 1, since step 2)" in text
    )
    assert "usually 1. the forward bypassed the wrapper" in text
    assert "look at the collective that reduces these parameters" in text
    assert "the forward bypassed the wrapper" in render_page(run_dir, diagnosis)


def test_of_a_warning_of_torch_the_cause_is_the_one_that_was_seen(run_dir):
    found = (Finding(series=SeriesKey(Kind.STEP, TORCH_WARNED_SERIES, slot="nothing_is_clipped"), value=1.0),)
    AlertLog(run_dir / "nodes/node/alerts.jsonl").append(broken_law(law="not-warned", kind=Kind.STEP, findings=found))

    (cause,) = diagnose(run_dir).causes

    assert cause.startswith("nothing_is_clipped: clip_grad_norm_ was given a generator")


@pytest.mark.parametrize("slot", WARNED)
def test_each_warning_of_torch_has_a_cause_of_its_own(slot):
    assert sum(cause.startswith(f"{slot}:") for cause in law_of("not-warned").causes) == 1


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_the_headline_of_a_broken_law_says_what_went_wrong(run_dir, law):
    found = (Finding(series=SeriesKey(law.rows[0], "fc.weight"), value=0.5),)
    AlertLog(run_dir / "nodes/node/alerts.jsonl").append(broken_law(law=law.name, kind=law.rows[0], findings=found))

    diagnosis = diagnose(run_dir)

    since = "began between steps 0 and 1" if law.seen_after else "since step 2"
    assert diagnosis.headline == f"{law.broken} (rank 1, {since})"
    assert law.broken not in ("", law.sentence.rstrip("."))
    assert (diagnosis.module == "") == law.is_of_the_whole


def test_a_law_that_says_no_headline_is_told_by_its_sentence():
    law = dataclasses.replace(LAWS[0], broken="", sentence="Mine is even.")

    assert law.headline == "This does not hold: mine is even"


def test_a_law_of_a_package_that_is_gone_is_an_alert_like_any_other(run_dir):
    AlertLog(run_dir / "nodes/node/alerts.jsonl").append(broken_law(law="of-nobody"))

    assert diagnose(run_dir).headline == "The alert my-reductions fired on rank 1 from step 2 on"


@pytest.mark.parametrize(("first_step", "is_cause"), [(2, True), (3, True), (4, False)])
def test_what_diverges_after_a_law_is_broken_followed_from_it(tmp_path, first_step, is_cause):
    key, other = grad("fc.weight"), (4, -1.0, 2.0, 1.0, 6.0, 0, 0, 0)
    parted = {step: {rank: {key: other if rank and step > 2 else FINITE} for rank in range(2)} for step in range(6)}
    store(tmp_path, parted)
    log = AlertLog(tmp_path / "nodes/node/alerts.jsonl")
    named = (Finding(series=key, value=2.0),)
    changes = {"kind": key.kind, "findings": named, "severity": Severity.CRITICAL}
    log.append(told("apart", "copies-differ", AlertCondition.DIFFERS, **changes))
    log.append(broken_law(first_step=first_step))

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.symptom is Symptom.BREAKS_LAW) == is_cause
    if is_cause:
        assert diagnosis.consequences[0].startswith("Values diverged from those of the other ranks")


def test_ranks_that_step_at_other_rates_are_the_cause_of_what_differs_then(run_dir):
    rate = (Finding(series=SeriesKey(Kind.STEP, "learning_rate", "0"), value=2e-3),)
    log = AlertLog(run_dir / "nodes/node/alerts.jsonl")
    log.append(told("rate", "ranks-disagree", AlertCondition.DIFFERS, findings=rate, first_step=2))
    copy = (Finding(series=SeriesKey(Kind.PARAM_UPDATED, "fc.weight"), value=1.0),)
    apart = {"kind": Kind.PARAM_UPDATED, "findings": copy, "severity": Severity.CRITICAL, "first_step": 2}
    log.append(told("apart", "replica-norms-differ", AlertCondition.DIFFERS, **apart))

    diagnosis = diagnose(run_dir)

    assert diagnosis.headline == "The alert ranks-disagree fired on rank 1 from step 2 on"
    assert (diagnosis.module, diagnosis.phase) == ("(optimizer)", FaultPhase.OPTIMIZER)
    assert diagnosis.consequences[0].startswith("Values diverged")


@pytest.mark.parametrize("is_on", [True, False])
def test_laws_that_could_not_be_judged_and_notes_of_the_start_are_told(run_dir, is_on):
    config = dataclasses.asdict(MonitorConfig(wg_distribution=True, param_distribution=True, xy_distribution=is_on))
    about = {"run_id": "a", "config": config, "config_notes": ["2 of 4 parameters are in no group"]}
    (run_dir / "run.json").write_text(json.dumps(about))

    evidence = diagnose(run_dir).evidence

    assert "noted at the start: 2 of 4 parameters are in no group" in evidence
    (off,) = [one for one in evidence if one.startswith("not watched, as xy_distribution is off: ")] or [""]
    assert ("inputs-come-twice" in off) != is_on
    assert "parameters-stand-still" not in off


def test_of_laws_that_broke_in_one_step_the_earlier_in_it_is_the_headline(run_dir):
    broken = {"clip-factors-differ": "one-clip-factor", "reduced-gradients-differ": "equal-gradients"}
    log = AlertLog(run_dir / "nodes/node/alerts.jsonl")
    for rule, law in broken.items():
        log.append(dataclasses.replace(broken_law(law=law, first_step=1), id=rule, rule=rule))

    found = diagnose(run_dir)

    assert found.headline.startswith(law_of("equal-gradients").headline)
    assert "alert clip-factors-differ" in found.consequences[0]


@pytest.mark.parametrize("is_since_too", [False, True])
def test_what_went_wrong_before_a_restart_is_told_where_nothing_did_since(run_dir, is_since_too):
    log = AlertLog(run_dir / "nodes/node/alerts.jsonl")
    fields = {"severity": Severity.CRITICAL, "first_step": 5}
    log.append(told("nan", "activation-nonfinite", AlertCondition.NONFINITE, attempt=0, **fields))
    log.append(told("dead", "rank-dead", AlertCondition.REPORTED, attempt=0, **{**fields, "first_step": 4}))
    if is_since_too:
        log.append(told("apart", "replica-divergence", AlertCondition.DIFFERS, **fields))

    found = diagnose(run_dir)

    assert found.verdict is DiagnosisVerdict.ALERTED
    assert found.attempt == (1 if is_since_too else 0)
    expected = "The alert replica-divergence" if is_since_too else "Before the restart: The alert activation-nonfinite"
    assert found.headline.startswith(expected)


JUMP = {
    "kind": Kind.STEP,
    "direction": AlertDirection.UP,
    "value": 0.1,
    "baseline": 0.001,
    "findings": (Finding(series=SeriesKey(Kind.STEP, "learning_rate", "0"), value=0.1, baseline=0.001),),
}
EVAL = {**JUMP, "value": 1.0, "findings": (Finding(series=SeriesKey(Kind.STEP, "eval_mode"), value=1.0),)}
GREW = {"kind": Kind.GRAD_REDUCED, "value": 9.0, "findings": (Finding(series=grad("fc.weight"), value=9.0),)}


@pytest.mark.parametrize("severity", [Severity.WARNING, Severity.CRITICAL])
@pytest.mark.parametrize("has_exploded", [False, True])
def test_a_jump_of_the_rate_comes_before_the_laws_that_have_the_rate_in_them(run_dir, severity, has_exploded):
    log = AlertLog(run_dir / "nodes/node/alerts.jsonl")
    series = (Finding(series=SeriesKey(Kind.STEP, "weight_decay", "0"), value=0.01),)
    log.append(broken_law(law="mild-decay", kind=Kind.STEP, severity=severity, findings=series, first_step=3))
    log.append(told("jump", "learning-rate-jump", AlertCondition.EXCEEDS, first_step=3, **JUMP))
    if has_exploded:
        log.append(
            told("grew", "gradient-jump", AlertCondition.SPIKE, first_step=4, direction=AlertDirection.UP, **GREW)
        )

    found = diagnose(run_dir)

    assert found.headline.startswith("The learning rate jumped from at most 0.001 to 0.1 in step 3 on rank 1")
    assert ("values exploded" in found.headline) == has_exploded
    assert found.step == 3


@pytest.mark.parametrize(("first_step", "is_cause"), [(0, False), (19, True), (20, True), (21, None)])
def test_what_the_script_set_before_values_exploded_is_named_in_the_first_line(tmp_path, first_step, is_cause):
    store(tmp_path, {step: {1: {grad("fc.weight"): FINITE}} for step in range(22)})
    log = AlertLog(tmp_path / "nodes/node/alerts.jsonl")
    log.append(told("grew", "gradient-jump", AlertCondition.SPIKE, first_step=20, direction=AlertDirection.UP, **GREW))
    log.append(told("eval", "eval-mode", AlertCondition.THRESHOLD, first_step=first_step, **EVAL))

    found = diagnose(tmp_path)

    said = f"the alert eval-mode fired on rank 1 from step {first_step} on"
    assert (said in found.headline.lower()) == (is_cause is not None)
    assert found.headline.startswith("The alert eval-mode") == bool(is_cause)
    assert "values exploded" in found.headline.lower()
    assert found.symptom is Symptom.EXPLODED


def test_what_became_nan_right_after_the_rate_jumped_names_the_jump_first(tmp_path):
    nan = (4, 0.0, 0.0, 0.0, 0.0, 0, 4, 0)
    store(tmp_path, {step: {1: {grad("fc.weight"): nan if step == 4 else FINITE}} for step in range(6)})
    log = AlertLog(tmp_path / "nodes/node/alerts.jsonl")
    log.append(told("jump", "learning-rate-jump", AlertCondition.EXCEEDS, first_step=3, **JUMP))

    assert diagnose(tmp_path).headline.startswith("The learning rate jumped from at most 0.001 to 0.1 in step 3")


@pytest.mark.parametrize("is_over", [False, True])
def test_a_warning_that_the_run_is_slow_is_in_the_first_line_and_is_no_fault_of_its_values(tmp_path, is_over):
    store(tmp_path, {step: {1: {grad("fc.weight"): FINITE}} for step in range(6)})
    log = AlertLog(tmp_path / "nodes/node/alerts.jsonl")
    log.append(late("slow", message="straggler: rank 1 holds up the others"))
    if is_over:
        log.append(late("slow", state=AlertState.RESOLVED))

    found = diagnose(tmp_path)

    over = ", and no longer at the end" if is_over else ""
    assert found.headline.startswith(
        f"The alert straggler fired on rank 1 from step 3 on{over}; nothing was non-finite"
    )
    assert found.reason.startswith("straggler: rank 1 holds up the others")
    assert found.verdict is DiagnosisVerdict.FINITE


@pytest.mark.parametrize(
    ("law", "step", "since"),
    [
        ("still-reached", 160, "since step 150"),
        ("reached", 20, "since step 10"),
        ("begin-empty", 122, "began between steps 120 and 121"),
    ],
)
def test_the_first_line_says_when_a_law_began_to_be_broken_not_when_that_was_seen(run_dir, law, step, since):
    named = (Finding(series=SeriesKey(law_of(law).rows[0], "fc.weight"), value=11.0),)
    broken = broken_law(law=law, kind=law_of(law).rows[0], findings=named, first_step=step, step=step, value=11.0)
    AlertLog(run_dir / "nodes/node/alerts.jsonl").append(broken)

    assert diagnose(run_dir).headline.endswith(f"(rank 1, {since})")


def test_a_setting_that_was_switched_off_is_told_with_the_evidence(run_dir):
    note = broken_law(law="not-switched-off", severity=Severity.INFO, kind=Kind.STEP)
    AlertLog(run_dir / "nodes/node/alerts.jsonl").append(note)

    assert "noted: my-reductions: it did" in diagnose(run_dir).evidence
