"""A buffer that was finite and no longer is, in a run whose gradients are all finite."""

import pytest

from tests.analysis.stored_run import ALL_NAN, FINITE, ONE_INF, actv, grad, store
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict, FaultPhase
from trainermon.core.values import Kind, SeriesKey

MEAN, VARIANCE = (SeriesKey(Kind.BUFFER, f"h.1.{name}") for name in ("running_mean", "running_var"))
NOT_LOOKED_AT = "no buffers"


def run_of(run_dir, buffers, **others):
    """Store four steps of finite gradients; on step 0 and 2 buffers with the moments `buffers` = [first, second]."""
    steps = {step: {0: {grad("h.0.weight"): FINITE}} for step in range(4)}
    for step, rows in zip((0, 2), buffers, strict=False):
        steps[step][0] |= rows | (others if step else {})
    store(run_dir, steps, modules=("h.0", "h.1", "h.2"))


@pytest.mark.parametrize("bad", [ALL_NAN, ONE_INF])
def test_a_buffer_that_was_finite_before_is_named(tmp_path, bad):
    run_of(tmp_path, [{MEAN: FINITE, VARIANCE: FINITE}, {MEAN: bad, VARIANCE: bad}])

    found = diagnose(tmp_path)

    assert (found.verdict, found.step, found.rank) == (DiagnosisVerdict.LOCATED, 2, 0)
    assert (found.module, found.phase) == ("h.1", FaultPhase.PARAMETER)
    assert found.headline == "A buffer was not finite in h.1 on rank 0 in step 2"
    assert "buffer h.1.running_mean and 1 other held NaN or Inf when the forward of step 2 began" in found.reason


@pytest.mark.parametrize("held", [ALL_NAN, ONE_INF])
def test_a_buffer_that_began_so_is_not(tmp_path, held):
    run_of(tmp_path, [{MEAN: held, VARIANCE: FINITE}, {MEAN: held, VARIANCE: FINITE}])

    found = diagnose(tmp_path)

    assert found.verdict is DiagnosisVerdict.FINITE
    assert not any(NOT_LOOKED_AT in line for line in found.evidence)


def test_where_none_are_stored_that_is_said(tmp_path):
    run_of(tmp_path, [])

    assert any(NOT_LOOKED_AT in line for line in diagnose(tmp_path).evidence)


def test_a_forward_that_went_wrong_elsewhere_comes_first(tmp_path):
    run_dir, output = tmp_path, actv("h.0", "output.0")
    steps = {
        0: {0: {MEAN: FINITE, output: FINITE, grad("h.0.weight"): FINITE}},
        1: {0: {MEAN: ALL_NAN, output: ALL_NAN, grad("h.0.weight"): ALL_NAN}},
    }
    store(run_dir, steps, modules=("h.0", "h.1"))

    assert diagnose(run_dir).module == "h.0"
