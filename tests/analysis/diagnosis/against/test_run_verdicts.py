"""Two runs over all their steps: the rules of thumb on losses and gradient norms, by numbers that are made by hand."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.stored_run import FINITE, grad, store
from trainermon import cli
from trainermon.analysis.diagnosis.against.against import diagnose_against
from trainermon.analysis.diagnosis.against.run_verdicts import describe, judge_run
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict, Symptom
from trainermon.core.catalogue import GLOBAL_NORM_SERIES, LOSS_SERIES
from trainermon.core.values import Kind, SeriesKey

LOSS = SeriesKey(Kind.LOSS, LOSS_SERIES)
NORM = SeriesKey(Kind.STEP, GLOBAL_NORM_SERIES)


def single(value):
    """Return the moments of one number."""
    if math.isnan(value):
        return (1, math.inf, -math.inf, 0.0, 0.0, 0, 1, 0)
    return (1, value, value, value, value * value, 0, 0, 0)


def pair(tmp_path, ours, theirs, *, key=LOSS, more=None):
    """Store two runs of one rank with these numbers by step, and return their folders."""
    for name, values in (("run", ours), ("reference", theirs)):
        (tmp_path / name).mkdir()
        rows = {step: {0: {key: single(value), **(more or {})}} for step, value in enumerate(values)}
        store(tmp_path / name, rows)
    return tmp_path / "run", tmp_path / "reference"


def judged(*args, **kwargs):
    (verdict,) = judge_run(*pair(*args, **kwargs))
    return verdict


@pytest.mark.parametrize(
    ("ours", "theirs", "mean", "found"),
    [
        ([2.0, 1.0, 0.5], [2.0, 1.0, 0.5], 0.0, (False, None, 0)),
        ([2.0, 1.009, 0.5045], [2.0, 1.0, 0.5], 0.006, (False, None, 1)),
        ([2.0, 1.03, 0.505], [2.0, 1.0, 0.5], 0.04 / 3, (True, 1, 1)),
        ([-2.0, -1.0, -1.0], [-2.0, -1.0, -0.8], 0.25 / 3, (True, 2, 2)),
        ([1.0, 5.0, 1.0], [1.0, 0.0, 1.0], 0.0, (False, None, 0)),
    ],
    ids=["equal", "within", "beyond", "below zero", "no reference to divide by"],
)
def test_the_loss_is_judged_by_its_mean_relative_error(tmp_path, ours, theirs, mean, found):
    verdict = judged(tmp_path, ours, theirs)

    assert (verdict.quantity, verdict.limit, verdict.num_steps) == ("loss", 0.01, 3)
    assert verdict.value == pytest.approx(mean, abs=1e-12)
    assert (verdict.differs, verdict.step, verdict.worst_step) == found


@pytest.mark.parametrize(
    ("ours", "largest", "differs", "step"),
    [([1.0, 1.9, 1.0], 0.9, False, None), ([1.0, 2.5, 1.0], 1.5, True, 1), ([1.0, 2.5, 4.0], 3.0, True, 1)],
)
def test_the_gradient_norm_is_judged_by_its_worst_step(tmp_path, ours, largest, differs, step):
    verdict = judged(tmp_path, ours, [1.0, 1.0, 1.0], key=NORM)

    assert (verdict.quantity, verdict.limit) == ("grad_norm", 1.0)
    assert verdict.value == pytest.approx(largest)
    assert (verdict.differs, verdict.step) == (differs, step)


@given(
    noise=st.lists(st.floats(0.95, 1.05), min_size=1, max_size=9),
    factor=st.floats(0.05, 0.79) | st.floats(1.27, 20.0),
    spike=st.floats(0.5, 1.9),
)
@settings(max_examples=10)
def test_a_norm_of_a_constant_ratio_differs_whatever_each_step_is_apart(tmp_path_factory, noise, factor, spike):
    theirs = [spike, *noise, spike, *noise]
    verdict = judged(tmp_path_factory.mktemp("runs"), [factor * value for value in theirs], theirs, key=NORM)

    assert (verdict.differs, verdict.step) == (True, 0)
    if factor < 1.99:
        assert verdict.value == pytest.approx(factor)
        assert f"median ratio {factor:.3g} over {len(theirs)} steps, beyond 1.25 either way" in describe(verdict)


def test_what_is_within_the_limit_is_close_and_not_said_to_agree(tmp_path):
    verdict = judged(tmp_path, [1.03, 0.98, 1.0], [1.0, 1.0, 1.0], key=NORM)

    assert describe(verdict) == "close: largest relative difference 0.03 over 3 steps, within 1, most on step 0"


def test_a_loss_that_is_finite_on_one_side_only_differs_whatever_the_mean_is(tmp_path):
    verdict = judged(tmp_path, [1.0, math.nan, 1.0, math.nan], [1.0, 1.0, 1.0, math.nan])

    assert (verdict.differs, verdict.step, verdict.num_one_sided, verdict.value) == (True, 1, 1, 0.0)
    assert describe(verdict) == (
        "differs: mean relative error 0 % where both are finite, within 1 %; finite on one side only on 1 of 4 steps; "
        "first apart on step 1"
    )


def test_only_steps_that_both_have_count(tmp_path):
    assert judged(tmp_path, [1.0, 1.0, 7.0, 8.0], [1.0, 1.0]).num_steps == 2


def test_runs_without_losses_have_no_verdict(tmp_path):
    assert judge_run(*pair(tmp_path, [1.0], [2.0], key=grad("fc.weight", Kind.EXP_AVG))) == ()


def drifting(tmp_path):
    """Return runs of which no step is beyond their noise, but whose losses are apart by 3 % on the mean."""
    theirs = [2.0 - 0.1 * step for step in range(8)]
    return pair(tmp_path, [value * 1.03 for value in theirs], theirs, more={grad("fc.weight"): FINITE})


def test_runs_that_part_slowly_are_told_though_no_step_stands_out(tmp_path, capsys):
    run, reference = drifting(tmp_path)

    diagnosis = diagnose_against(run, reference)
    assert cli.main(["diagnose", str(run), "--against", str(reference), "--exit-code"]) == 3

    assert (diagnosis.verdict, diagnosis.symptom) == (DiagnosisVerdict.LOCATED, Symptom.DIFFERS)
    assert diagnosis.headline == "No step stands out, but over the run the loss differs"
    shown = capsys.readouterr().out
    assert "loss       differs: mean relative error 3 % over 8 steps, beyond 1 %; first beyond it on step 0" in shown


def test_the_verdicts_stand_in_json_and_on_the_page(tmp_path, capsys):
    run, reference = drifting(tmp_path)

    cli.main(["diagnose", str(run), "--against", str(reference), "--json", "--html", str(tmp_path / "page.html")])

    verdict, norm = json.loads(capsys.readouterr().out)["run_verdicts"]
    assert (norm["quantity"], norm["differs"], norm["value"]) == ("grad_norm", False, 0.0)
    assert (verdict["quantity"], verdict["differs"], verdict["limit"]) == ("loss", True, 0.01)
    assert verdict["value"] == pytest.approx(0.03)
    page = (tmp_path / "page.html").read_text()
    assert "Over the run" in page
    assert "mean relative error 3 % over 8 steps, beyond 1 %" in page


def test_a_diagnosis_without_a_reference_has_none(tmp_path, capsys):
    run, _ = drifting(tmp_path)

    cli.main(["diagnose", str(run), "--json"])

    plain = json.loads(capsys.readouterr().out)
    assert (plain["run_verdicts"], plain["gradient_chain"]) == ([], [])
