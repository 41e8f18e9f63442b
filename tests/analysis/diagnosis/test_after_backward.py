"""Gradients that are spoilt after the backward: by the reduction, before the optimizer's step, or by the optimizer."""

import pytest

from tests.analysis.stored_run import ALL_NAN, FINITE, ONE_INF, dump, grad, store
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict, FaultPhase
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.catalogue import GRADIENT_AT_STEP
from trainermon.core.values import Kind, SeriesKey
from trainermon.dump.files.verdicts import Reproducibility

SOUND = (2.0, 0, 0)
MODULES = ["emb", "h", "h.0", "h.0.up", "h.0.down", "head"]


def own(name):
    return grad(name, Kind.GRAD_UNREDUCED)


PLACED = {
    0: {own("head.weight"): FINITE, own("emb.weight"): FINITE},
    1: {own("head.weight"): FINITE, own("emb.weight"): FINITE},
}
REDUCED = {grad("head.weight"): FINITE, grad("emb.weight"): FINITE}


def test_what_the_reduction_spoils_on_one_rank_is_its_own(tmp_path):
    """A communication hook gives rank 1 a gradient that is not finite: every rank's own ones were."""
    rows = {rank: {**PLACED[rank], **REDUCED} for rank in (0, 1)}
    rows[1] |= {grad("head.weight"): ALL_NAN}
    store(tmp_path, {5: rows}, modules=MODULES)
    dump(tmp_path, 0, SOUND)
    dump(tmp_path, 1, SOUND)

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.verdict, diagnosis.rank, diagnosis.module) == (DiagnosisVerdict.LOCATED, 1, "head")
    assert diagnosis.phase is FaultPhase.REDUCTION
    assert diagnosis.headline == "The reduction made a non-finite gradient of head on rank 1 in step 5"
    text = render_text(diagnosis)
    assert "transient" not in text
    assert "carried" not in text
    assert "not reproducible" not in text


def test_what_the_reduction_spoils_on_every_rank_is_no_ranks(tmp_path):
    store(tmp_path, {5: {rank: {**PLACED[rank], grad("head.weight"): ALL_NAN} for rank in (0, 1)}}, modules=MODULES)

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.verdict, diagnosis.rank, diagnosis.phase) == (
        DiagnosisVerdict.LOCATED,
        None,
        FaultPhase.REDUCTION,
    )


def test_a_reduction_that_was_given_something_bad_is_not_to_blame(tmp_path):
    rows = {rank: {**PLACED[rank], grad("head.weight"): ALL_NAN} for rank in (0, 1)}
    rows[0] |= {own("head.weight"): ONE_INF}
    store(tmp_path, {5: rows}, modules=MODULES)

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.rank, diagnosis.phase) == (0, FaultPhase.BACKWARD)


def test_a_gradient_that_was_written_to_after_the_backward_is_named(tmp_path):
    at_step = SeriesKey(Kind.STATE, "h.0.up.weight", GRADIENT_AT_STEP)
    rows = {rank: {**PLACED[rank], **REDUCED} for rank in (0, 1)}
    rows[1] |= {at_step: ALL_NAN}
    store(tmp_path, {4: {0: rows[0], 1: rows[0]}, 5: rows}, modules=MODULES)
    dump(tmp_path, 0, SOUND)
    dump(tmp_path, 1, SOUND, reproducibility=Reproducibility.REPRODUCIBLE, reproducibility_reason="same bits")

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.verdict, diagnosis.step, diagnosis.rank) == (DiagnosisVerdict.LOCATED, 5, 1)
    assert (diagnosis.module, diagnosis.phase) == ("h.0.up", FaultPhase.BEFORE_STEP)
    assert (diagnosis.classification, diagnosis.reproducibility) == (None, None)
    assert "transient" not in render_text(diagnosis)


@pytest.mark.parametrize(
    ("bad", "module", "phase"),
    [
        (("exp_avg",), "head", FaultPhase.OPTIMIZER),  # a moment that was bad by itself
        (("exp_avg", "exp_avg_sq"), "head", FaultPhase.BEFORE_STEP),
    ],
)
def test_both_moments_are_bad_only_if_the_gradient_was(tmp_path, bad, module, phase):
    moments = {SeriesKey(kind, "head.weight"): FINITE for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)}
    moments |= {SeriesKey(Kind(kind), "head.weight"): ONE_INF for kind in bad}
    updated = {SeriesKey(Kind.PARAM_UPDATED, "head.weight"): ONE_INF}
    store(tmp_path, {5: {0: REDUCED | moments | updated}}, modules=MODULES)

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.module, diagnosis.phase) == (module, phase)


@pytest.mark.parametrize("bad", ["h.0.up.weight", "emb.weight"])
def test_a_gradient_that_was_bad_after_the_backward_was_not_spoilt_behind_it(tmp_path, bad):
    """One rank, reduced gradients only: clipping carries the one that was bad to all of them."""
    at_step = SeriesKey(Kind.STATE, "h.0.up.weight", GRADIENT_AT_STEP)
    gradients = {grad(name): ALL_NAN if name == bad else FINITE for name in ("h.0.up.weight", "emb.weight")}
    store(tmp_path, {5: {0: {**gradients, at_step: ALL_NAN}}}, modules=MODULES)

    diagnosis = diagnose(tmp_path)

    assert diagnosis.phase is FaultPhase.UNKNOWN
    assert "was finite after the backward" not in diagnosis.reason


def test_what_was_stored_of_the_step_alone_does_not_say_how_the_backward_left_it(tmp_path):
    at_step = SeriesKey(Kind.STATE, "h.0.up.weight", GRADIENT_AT_STEP)
    store(tmp_path, {5: {0: {at_step: ALL_NAN}}}, modules=MODULES)

    diagnosis = diagnose(tmp_path)

    assert diagnosis.phase is FaultPhase.BEFORE_STEP
    assert "was finite after the backward" not in diagnosis.reason
