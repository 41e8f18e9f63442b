"""Recorded numbers that are not finite in a run whose tensors all are."""

import math

import pytest

from tests.analysis.stored_run import FINITE, grad, store
from trainermon import cli
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict, Symptom
from trainermon.core.terminal.statuses import FOUND
from trainermon.core.values import Kind, SeriesKey

WEIGHT = grad("fc.weight")
ONE = (1, 1.0, 1.0, 1.0, 1.0, 0, 0, 0)
NAN = (1, math.inf, -math.inf, 0.0, 0.0, 0, 1, 0)
INFINITE = (1, math.inf, -math.inf, 0.0, 0.0, 0, 0, 1)


def number(name, slot=""):
    return SeriesKey(Kind.STEP, name, slot)


@pytest.mark.parametrize(("bad", "word"), [(NAN, "NaN"), (INFINITE, "infinite")])
def test_a_recorded_number_that_is_not_finite_is_found_with_its_first_step(tmp_path, bad, word):
    rows = {step: {0: {WEIGHT: FINITE, number("validation_loss"): bad if step >= 3 else ONE}} for step in range(6)}
    store(tmp_path, rows)

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.verdict, diagnosis.symptom, diagnosis.step) == (
        DiagnosisVerdict.LOCATED,
        Symptom.NONFINITE,
        3,
    )
    assert diagnosis.headline == "The recorded validation_loss was not finite on rank 0 in step 3"
    assert f"was {word} in 3 steps" in diagnosis.reason
    assert cli.main(["diagnose", str(tmp_path), "--exit-code"]) == FOUND
    assert diagnose(tmp_path, step=4).step == 4
    assert diagnose(tmp_path, step=2).verdict is DiagnosisVerdict.FINITE


def test_ranks_and_later_numbers_are_named(tmp_path):
    bad = {WEIGHT: FINITE, number("score"): NAN, number("learning_rate", "0"): ONE}
    later = {WEIGHT: FINITE, number("score"): NAN, number("learning_rate", "0"): NAN}
    store(tmp_path, {1: {0: bad, 1: bad}, 2: {0: later, 1: later}})

    diagnosis = diagnose(tmp_path)

    assert diagnosis.headline == "The recorded score was not finite on ranks 0, 1 in step 1"
    assert diagnosis.rank is None
    assert diagnosis.consequences == ("the recorded learning_rate of group 0 was not finite from step 2 on",)


@pytest.mark.parametrize("skipped", [0, 1])
def test_the_norm_of_a_step_that_the_framework_skipped_is_no_fault(tmp_path, skipped):
    flag = (1, float(skipped), float(skipped), float(skipped), float(skipped), 1 - skipped, 0, 0)
    store(tmp_path, {1: {0: {WEIGHT: FINITE, number("global_grad_norm"): INFINITE, number("skipped"): flag}}})

    assert (diagnose(tmp_path).verdict is DiagnosisVerdict.FINITE) == bool(skipped)
