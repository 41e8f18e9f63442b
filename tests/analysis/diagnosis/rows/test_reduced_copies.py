"""Copies of parameters that part: by their reduced gradients, or in the optimizer's step."""

import json

import pytest

from tests.analysis.diagnosis.rows.test_copies import (
    COPIED,
    EQUAL,
    FAULT,
    FOUND,
    NORM,
    PRESENT,
    SPLIT,
    apart,
    moments,
    place_of,
    record,
)
from tests.analysis.stored_run import grad
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import FaultPhase
from trainermon.core.values import Kind, SeriesKey

ORIGIN, UPDATED = Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED
KINDS = (Kind.GRAD_REDUCED, ORIGIN, UPDATED)
AFTER_UPDATE = {"kind": UPDATED, "rule": "replica-norms-differ", "first_step": FAULT}
IN_REDUCTION = (FaultPhase.REDUCTION, NORM, FAULT)


def parted(step):
    """What is a rank's own if the copies part in the update of step `FAULT`."""
    found = apart(*COPIED, kind=UPDATED) if step >= FAULT else set()
    return found | (apart(*COPIED, kind=ORIGIN) if step > FAULT else set())


def checked(step):
    """What is a rank's own if a check of checksums is all that shows it."""
    return apart(*COPIED) if step >= FOUND else set()


def gradients_apart(*, rank=1, since=FAULT, name=f"{NORM}.weight", more=None):
    """Return an edit that gives `rank` another gradient of a parameter; `more` edits behind it."""

    def edit(found):
        for step, ranks in found.items():
            if step >= since:
                count, low, high, total, squares, *rest = ranks[rank][grad(name)]
                ranks[rank][grad(name)] = (count, low, high, total, squares * 4, *rest)
        if more:
            more(found)

    return edit


def with_unreduced(count):
    """Return an edit that adds gradients before the reduction, of so many elements."""

    def edit(found):
        for ranks in found.values():
            for rows in ranks.values():
                for name in (*COPIED, *SPLIT):
                    rows[SeriesKey(Kind.GRAD_UNREDUCED, name)] = (count, *moments("grad", 1, 1, 0)[1:])

    return edit


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_gradients_that_differ_while_the_copies_are_equal_are_named_with_step_ranks_and_norms(tmp_path, axis):
    diagnosis = record(tmp_path, parted, axes=(axis,), kinds=KINDS, edit=gradients_apart(), **AFTER_UPDATE)

    assert place_of(diagnosis) == IN_REDUCTION
    assert f"in step {FAULT} the reduced gradients of {NORM}.weight differed on ranks 0, 1" in diagnosis.headline
    assert "on rank 0" in diagnosis.reason
    assert "on rank 1" in diagnosis.reason


def test_all_parameters_are_counted_not_those_that_an_alert_lists(tmp_path):
    edit = gradients_apart(more=gradients_apart(name=COPIED[1]))
    record(tmp_path, parted, axes=("dp",), kinds=KINDS, edit=edit, **AFTER_UPDATE)
    log = tmp_path / "nodes/node/alerts.jsonl"
    alerts = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(one | {"findings": one["findings"][:1]}) + "\n" for one in alerts))

    assert "gradients of layer.mlp.router.weight and of 1 other parameter differed" in diagnose(tmp_path).headline


def test_of_three_ranks_the_one_that_differs_is_named(tmp_path):
    diagnosis = record(
        tmp_path, parted, axes=("dp",), num_ranks=3, odd=(1,), kinds=KINDS, edit=gradients_apart(), **AFTER_UPDATE
    )

    assert (*place_of(diagnosis), diagnosis.rank) == (*IN_REDUCTION, 1)


def test_equal_gradients_leave_the_optimizer(tmp_path):
    diagnosis = record(tmp_path, parted, axes=("dp",), kinds=KINDS, **AFTER_UPDATE)

    assert place_of(diagnosis) == (FaultPhase.OPTIMIZER, NORM, FAULT)


@pytest.mark.parametrize(("axis", "expected"), [("dp", IN_REDUCTION), ("tp", PRESENT)])
def test_between_two_checks_a_cause_is_told_from_a_consequence_by_who_is_reduced_over(tmp_path, axis, expected):
    diagnosis = record(tmp_path, checked, axes=(axis,), kinds=(Kind.GRAD_REDUCED,), edit=gradients_apart())

    assert place_of(diagnosis) == expected
    assert f"between step {EQUAL} (last equal) and step {FOUND}" in diagnosis.headline


def test_on_the_last_equal_check_itself_it_is_a_cause(tmp_path):
    edit = gradients_apart(since=EQUAL)

    diagnosis = record(tmp_path, checked, axes=("tp",), kinds=(Kind.GRAD_REDUCED,), edit=edit)

    assert place_of(diagnosis) == (FaultPhase.REDUCTION, NORM, EQUAL)


@pytest.mark.parametrize(("whole", "expected"), [(4, FaultPhase.REDUCTION), (8, FaultPhase.PARAMETER)])
def test_gradients_of_parts_differ_by_design(tmp_path, whole, expected):
    edit = gradients_apart(since=EQUAL, more=with_unreduced(whole))

    assert record(tmp_path, checked, axes=("dp",), kinds=(Kind.GRAD_REDUCED,), edit=edit).phase is expected


def test_rounding_parts_nothing(tmp_path):
    def edit(found):
        for ranks in found.values():
            count, low, high, total, squares, *rest = ranks[1][grad(f"{NORM}.weight")]
            ranks[1][grad(f"{NORM}.weight")] = (count, low, high, total, squares * (1 + 1e-6), *rest)

    diagnosis = record(tmp_path, parted, axes=("dp",), kinds=KINDS, edit=edit, **AFTER_UPDATE)

    assert diagnosis.phase is FaultPhase.OPTIMIZER
