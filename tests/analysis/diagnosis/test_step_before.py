"""What the step before tells of a parameter that is not finite when the forward begins."""

import math

import pytest

from tests.analysis.stored_run import ALL_NAN, FINITE, dump, grad, store
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import FaultPhase
from trainermon.core.values import Kind, SeriesKey

GRADIENT, UPDATED = grad("fc.weight"), grad("fc.weight", Kind.PARAM_UPDATED)
RATE = SeriesKey(Kind.STEP, "learning_rate", "0")
NAN = (1, math.inf, -math.inf, 0.0, 0.0, 0, 1, 0)
SOUND_RATE = (1, 0.25, 0.25, 0.25, 0.0625, 0, 0, 0)
NORM = f"{math.sqrt(FINITE[4]):.3g}"


def explained(run_dir, before, step_before=4):
    bad = {GRADIENT: ALL_NAN, SeriesKey(Kind.LOSS, "loss"): ALL_NAN}
    store(run_dir, {step_before: {0: {GRADIENT: FINITE, **before}}, 5: {0: bad}})
    dump(run_dir, 0, (2.0, 4, 0))
    return diagnose(run_dir, step=5)


def test_a_learning_rate_that_is_not_finite_makes_it_the_optimizers(tmp_path):
    diagnosis = explained(tmp_path, {RATE: NAN})

    assert (diagnosis.phase, diagnosis.module) == (FaultPhase.OPTIMIZER, "fc")
    said = f"The optimizer's step 4 made it of finite gradients (norm {NORM}): its learning rate was NaN"
    assert said in diagnosis.reason


def test_with_a_sound_rate_gradients_and_rate_are_told(tmp_path):
    diagnosis = explained(tmp_path, {RATE: SOUND_RATE})

    assert diagnosis.phase is FaultPhase.PARAMETER
    assert f"Step 4 had finite gradients (norm {NORM}): the optimizer made it of them with learning rate 0.25, or" in (
        diagnosis.reason
    )


def test_a_parameter_that_was_finite_behind_the_update_was_written_to_in_between(tmp_path):
    diagnosis = explained(tmp_path, {RATE: SOUND_RATE, UPDATED: FINITE})

    assert diagnosis.phase is FaultPhase.PARAMETER
    assert "finite behind the optimizer's step 4: something wrote to it between" in diagnosis.reason


@pytest.mark.parametrize(("gradient", "step"), [(ALL_NAN, 4), (FINITE, 3)])
def test_bad_gradients_or_another_step_tell_nothing(tmp_path, gradient, step):
    diagnosis = explained(tmp_path, {RATE: NAN, GRADIENT: gradient}, step)

    assert "learning rate" not in diagnosis.reason
