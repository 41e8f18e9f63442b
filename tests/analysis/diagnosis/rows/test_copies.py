"""Copies of parameters that part on tensor parallel ranks: by the forward of a copied module, or by something else."""

import json

import pytest

from tests.analysis.stored_run import actv, grad, store
from trainermon.alerts.log import AlertLog
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import FaultPhase, PlaceLevel, RankRole, Symptom
from trainermon.core.values import Alert, AlertState, Finding, Kind, SeriesKey, Severity

STEPS, EQUAL, FOUND, FAULT = range(30, 81, 10), 60, 80, 70
WORDS, DROPOUT, NORM, ROUTER, UP, HEAD = (
    "embedding.words", "embedding.dropout", "layer.norm", "layer.mlp.router", "layer.mlp.up", "head"
)  # fmt: skip
MODULES = ["embedding", WORDS, DROPOUT, "layer", NORM, "layer.mlp", ROUTER, UP, HEAD]
CALLED = [WORDS, DROPOUT, "embedding", NORM, ROUTER, UP, "layer.mlp", "layer", HEAD]  # as they end
TOLD = (Kind.ACTV, Kind.GRAD_REDUCED)
COPIED, SPLIT = (f"{NORM}.weight", f"{ROUTER}.weight"), (f"{WORDS}.weight", f"{UP}.weight", f"{HEAD}.weight")
BY_DESIGN = {(UP, "output.0"), (HEAD, "output.0")}
INNER = {(ROUTER, "input.0"), (ROUTER, "output.0"), (UP, "input.0"), ("layer.mlp", "input.0")}
BEHIND_NORM = BY_DESIGN | INNER | {(NORM, "output.0")}  # what the split layers give is summed up: it is equal again
BEHIND_EMBEDDING = BEHIND_NORM | {("embedding", "output.0"), (NORM, "input.0"), ("layer", "input.0")}
BEHIND_EMBEDDING |= {("layer", "output.0"), (HEAD, "input.0")}
BEHIND_DROPOUT = BEHIND_EMBEDDING | {(DROPOUT, "output.0")}


def moments(kind, step, number, rank):
    value = 1.0 + len(kind) + 100.0 * step + number + rank / 8
    return (4, -value, value, value / 2, value * value, 0, 0, 0)


def rows_of(step, rank, own, *, kinds=TOLD):
    """Return a rank's rows of a step; those in `own`, (module, slot) or (parameter, kind), are like no other rank's."""
    rows = {}
    for number, module in enumerate(CALLED):
        for side, slot in enumerate(("input.0", "output.0")):
            is_own = (module, slot) in own | BY_DESIGN
            rows[actv(module, slot)] = moments("actv", step, 2 * number + side, (rank + 1) if is_own else 0)
    for number, name in enumerate((*COPIED, *SPLIT)):
        rows[grad(name)] = moments("grad", step, number, 0)
        for kind in (Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED):
            is_own = name in SPLIT or (name, kind) in own
            rows[SeriesKey(kind, name)] = moments(kind, step, number, (rank + 1) if is_own else 0)
        if step % 20 == 0 and name in COPIED:
            is_own = (name, Kind.CHECKSUM) in own
            rows[SeriesKey(Kind.CHECKSUM, name)] = moments("checksum", step, number, (rank + 1) if is_own else 0)
    return {key: row for key, row in rows.items() if key.kind in (*kinds, Kind.CHECKSUM)}


def alert(rank, *, kind=Kind.CHECKSUM, rule="replica-divergence", first_step=FOUND):
    return Alert(
        id=f"{rule}-{rank}",
        rule=rule,
        severity=Severity.CRITICAL,
        state=AlertState.FIRING,
        attempt=1,
        rank=rank,
        step=first_step,
        first_step=first_step,
        time_s=0.0,
        kind=kind,
        value=1.0,
        baseline=2.0,
        num_series=len(COPIED),
        findings=tuple(Finding(series=SeriesKey(kind, name), value=1.0) for name in COPIED),
        message=f"{rule}: copies are not equal",
    )


def record(run_dir, own, *, num_ranks=2, odd=(0, 1), axes=("tp",), steps=STEPS, kinds=TOLD, edit=None, **said):
    """Store a run in which the rows `own(step)` are another on each of the `odd` ranks, and what the alerts said.

    Of two axes the ranks run along the first one first; `edit` changes the rows by step and rank before storing.
    """
    found = {
        step: {rank: rows_of(step, rank if rank in odd else -1, own(step), kinds=kinds) for rank in range(num_ranks)}
        for step in steps
    }
    for ranks in found.values():  # what is split is split everywhere
        for rank, rows in ranks.items():
            for module, slot in BY_DESIGN if Kind.ACTV in kinds else ():
                rows[actv(module, slot)] = (4, -1.0, 2.0 + rank, 1.0, 5.0, 0, 0, 0)
    if edit is not None:
        edit(found)
    store(run_dir, found, modules=MODULES)
    for rank in range(num_ranks) if axes else ():
        places = zip(axes, (rank % 2, rank // 2) if len(axes) == 2 else (rank,), strict=True)
        place = {key: value for axis, at in places for key, value in ((axis, at), (f"{axis}_size", num_ranks))}
        told = {"rank": rank, "coordinates": {"rank": rank, **place}, "modules": MODULES}
        (run_dir / f"ranks/rank{rank:05d}.json").write_text(json.dumps(told))
    log = AlertLog(run_dir / "nodes/node/alerts.jsonl")
    for rank in odd:
        log.append(alert(rank, **said))
    return diagnose(run_dir)


def apart(*names, kind=Kind.CHECKSUM):
    return {(name, kind) for name in names}


def from_fault_on(behind, *, fault=FAULT):
    """Return by step what is a rank's own if `behind` is from the step `fault` on, and the copies are on the last."""
    return lambda step: (behind if step >= fault else set()) | (apart(*COPIED) if step == FOUND else set())


def place_of(diagnosis):
    assert diagnosis.symptom is Symptom.DIVERGED
    return diagnosis.phase, diagnosis.module, diagnosis.step


PRESENT = (FaultPhase.PARAMETER, NORM, FOUND)
"""What is said where nothing shows in a forward."""


def test_a_copied_module_that_returns_other_values_is_named_with_both_ranks(tmp_path):
    diagnosis = record(tmp_path, from_fault_on(BEHIND_DROPOUT))

    assert place_of(diagnosis) == (FaultPhase.FORWARD, DROPOUT, FAULT)
    assert diagnosis.rank is None
    assert [(one.rank, one.role) for one in diagnosis.ranks] == [(0, RankRole.ORIGIN), (1, RankRole.ORIGIN)]
    assert f"between step {EQUAL} (last equal) and step {FOUND}" in diagnosis.headline
    assert f"in step {FAULT} the forward of {DROPOUT} differed on ranks 0, 1" in diagnosis.headline
    assert f"In step {FAULT} {DROPOUT} was given the same on ranks 0, 1" in diagnosis.reason
    assert "returned another output.0 on each of them" in diagnosis.reason
    levels = {level.level: level.answer for level in diagnosis.levels}
    assert (levels[PlaceLevel.STEP], levels[PlaceLevel.MODULE]) == (str(FAULT), DROPOUT)
    assert diagnosis.collect.debugger["step"] == [FAULT]


def test_of_three_ranks_the_one_that_departs_is_named(tmp_path):
    diagnosis = record(tmp_path, from_fault_on(BEHIND_DROPOUT), num_ranks=3, odd=(1,))

    assert (*place_of(diagnosis), diagnosis.rank) == (FaultPhase.FORWARD, DROPOUT, FAULT, 1)
    assert [(one.rank, one.role) for one in diagnosis.ranks] == [(1, RankRole.ORIGIN)]
    assert "returned another output.0 on rank 1 than on the others" in diagnosis.reason


def test_a_module_with_copied_parameters_that_departs_is_named_if_these_are_equal(tmp_path):
    behind = BY_DESIGN | {(ROUTER, "output.0")}  # of what the split layers make of it the sum is equal again

    diagnosis = record(tmp_path, lambda step: from_fault_on(behind)(step) - apart(f"{ROUTER}.weight"))

    assert place_of(diagnosis) == (FaultPhase.FORWARD, ROUTER, FAULT)
    assert "its parameters were equal" in diagnosis.reason


def test_a_module_whose_own_parameters_have_parted_is_not_blamed(tmp_path):
    diagnosis = record(tmp_path, from_fault_on(BEHIND_NORM))

    assert place_of(diagnosis) == PRESENT
    assert f"between step {EQUAL} (last equal) and step {FOUND}" in diagnosis.headline


def test_parameters_that_are_stored_on_the_step_itself_decide(tmp_path):
    def own(step):
        return from_fault_on(BEHIND_NORM)(step) | (apart(f"{NORM}.weight", kind=Kind.PARAM_ORIGIN) if bad else set())

    kinds = (Kind.ACTV, Kind.PARAM_ORIGIN)
    bad = False
    assert place_of(record(tmp_path / "equal", own, kinds=kinds)) == (FaultPhase.FORWARD, NORM, FAULT)
    bad = True
    assert place_of(record(tmp_path / "apart", own, kinds=kinds)) == PRESENT


def test_a_module_that_was_given_other_values_is_not_blamed(tmp_path):
    behind = BEHIND_DROPOUT | {(WORDS, "input.0"), ("embedding", "input.0"), (WORDS, "output.0"), (DROPOUT, "input.0")}

    assert place_of(record(tmp_path, from_fault_on(behind))) == PRESENT


@pytest.mark.parametrize("kinds", [(Kind.ACTV, Kind.GRAD_REDUCED), (Kind.ACTV, Kind.PARAM_ORIGIN)])
def test_from_the_first_check_on_split_modules_are_not_blamed_but_a_copied_one_is(tmp_path, kinds):
    steps = range(EQUAL, FOUND + 1, 10)

    nothing = record(tmp_path / "nothing", from_fault_on(set()), steps=steps, kinds=kinds)
    dropout = record(tmp_path / "dropout", from_fault_on(BEHIND_DROPOUT, fault=EQUAL), steps=steps, kinds=kinds)

    assert place_of(nothing) == PRESENT
    assert place_of(dropout) == (FaultPhase.FORWARD, DROPOUT, EQUAL)


def test_without_any_row_that_tells_the_parameters_nothing_is_blamed_from_the_first_check_on(tmp_path):
    own, steps = from_fault_on(BEHIND_EMBEDDING, fault=EQUAL), range(EQUAL, FOUND + 1, 10)

    # the embedding's words are dealt out as under sequence parallelism
    assert place_of(record(tmp_path, own, steps=steps, kinds=(Kind.ACTV,))) == PRESENT


def test_what_departed_before_while_the_copies_stayed_equal_is_meant_to(tmp_path):
    own = from_fault_on(BEHIND_DROPOUT, fault=STEPS[0])

    assert place_of(record(tmp_path, own)) == PRESENT


def test_data_parallel_copies_are_given_other_values_by_design(tmp_path):
    assert place_of(record(tmp_path, from_fault_on(BEHIND_DROPOUT), axes=("dp",))) == PRESENT


def test_without_activations_the_step_is_still_between_two_checks(tmp_path):
    diagnosis = record(tmp_path, from_fault_on(BEHIND_DROPOUT), kinds=(Kind.GRAD_REDUCED,))

    assert place_of(diagnosis) == PRESENT
    assert f"between step {EQUAL} (last equal) and step {FOUND}" in diagnosis.headline


def test_copies_that_were_never_equal_say_nothing_of_a_forward(tmp_path):
    steps = range(FOUND, FOUND + 1)

    diagnosis = record(tmp_path, from_fault_on(BEHIND_DROPOUT), steps=steps)

    assert place_of(diagnosis) == PRESENT
    assert f"from step {FOUND} on" in diagnosis.headline
    assert "last equal" not in diagnosis.headline


@pytest.mark.parametrize("is_forward", [True, False])
def test_norms_of_copies_that_part_after_the_update_are_looked_at_alike(tmp_path, is_forward):
    def own(step):
        parted = apart(*COPIED, kind=Kind.PARAM_UPDATED) if step >= FAULT else set()
        return parted | (BEHIND_DROPOUT if is_forward and step >= FAULT else set())

    said = {"kind": Kind.PARAM_UPDATED, "rule": "replica-norms-differ", "first_step": FAULT}
    kinds = (Kind.ACTV, Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED)

    diagnosis = record(tmp_path, own, kinds=kinds, **said)

    assert place_of(diagnosis) == ((FaultPhase.FORWARD, DROPOUT) if is_forward else (FaultPhase.OPTIMIZER, NORM)) + (
        FAULT,
    )
    assert f"between step {EQUAL} (last equal) and step {FAULT}" in diagnosis.headline


def without(key, *, rank=None, step=None):
    """Return an edit that leaves out the rows of a series, everywhere or of one rank or step alone."""

    def edit(found):
        for at, ranks in found.items():
            for of, rows in ranks.items():
                if rank in (None, of) and step in (None, at):
                    rows.pop(key, None)

    return edit


def test_frozen_split_modules_of_which_no_parameter_is_known_are_not_blamed(tmp_path):
    def freeze(found):
        for name in SPLIT:
            without(grad(name))(found)

    steps = range(EQUAL, FOUND + 1, 10)

    assert place_of(record(tmp_path, from_fault_on(set()), steps=steps, edit=freeze)) == PRESENT


def test_a_module_that_returned_the_same_before_needs_no_other_rows(tmp_path):
    diagnosis = record(tmp_path, from_fault_on(BEHIND_DROPOUT), kinds=(Kind.ACTV,))

    assert place_of(diagnosis) == (FaultPhase.FORWARD, DROPOUT, FAULT)


def test_the_step_is_the_first_on_which_the_module_was_given_the_same(tmp_path):
    given = BEHIND_DROPOUT | {(WORDS, "input.0"), ("embedding", "input.0"), (WORDS, "output.0"), (DROPOUT, "input.0")}

    def own(step):
        return from_fault_on(BEHIND_DROPOUT)(step) | (given if step == FAULT else set())

    assert place_of(record(tmp_path, own)) == (FaultPhase.FORWARD, DROPOUT, FOUND)


def test_checks_on_which_the_copies_were_apart_already_are_not_the_last_equal_one(tmp_path):
    diagnosis = record(tmp_path, lambda step: apart(*COPIED) if step >= EQUAL else set())

    assert f"between step {EQUAL - 20} (last equal) and step {FOUND}" in diagnosis.headline


@pytest.mark.parametrize("slot", ["input.0", "output.0"])
def test_a_call_that_not_all_ranks_show_whole_tells_nothing(tmp_path, slot):
    edit = without(actv(DROPOUT, slot), rank=1)

    assert place_of(record(tmp_path, from_fault_on(BEHIND_DROPOUT), edit=edit)) == PRESENT


def test_a_parameter_that_one_rank_alone_shows_is_not_known_to_be_equal(tmp_path):
    edit = without(SeriesKey(Kind.PARAM_ORIGIN, f"{NORM}.weight"), rank=1, step=FAULT)
    kinds = (Kind.ACTV, Kind.PARAM_ORIGIN)

    diagnosis = record(
        tmp_path,
        lambda step: from_fault_on(BEHIND_NORM)(step) if step != FOUND else apart(*COPIED),
        kinds=kinds,
        edit=edit,
    )

    assert place_of(diagnosis) == PRESENT


BOTH = {"num_ranks": 4, "odd": (0, 1, 2, 3), "axes": ("tp", "dp")}


def test_groups_of_ranks_that_depart_in_the_same_call_are_named_together(tmp_path):
    diagnosis = record(tmp_path, from_fault_on(BEHIND_DROPOUT), **BOTH)

    assert (*place_of(diagnosis), len(diagnosis.ranks)) == (FaultPhase.FORWARD, DROPOUT, FAULT, 4)


def test_of_groups_of_ranks_the_one_that_departed_first_is_named(tmp_path):
    def delay(found):
        for step, ranks in found.items():
            for rank in (0, 1) if step < FOUND else ():
                ranks[rank].update(
                    {
                        key: row
                        for key, row in rows_of(step, rank, set(), kinds=TOLD).items()
                        if (key.name, key.slot) not in BY_DESIGN
                    }
                )

    diagnosis = record(tmp_path, from_fault_on(BEHIND_DROPOUT), edit=delay, **BOTH)

    assert place_of(diagnosis) == (FaultPhase.FORWARD, DROPOUT, FAULT)
    assert [one.rank for one in diagnosis.ranks if one.role is RankRole.ORIGIN] == [2, 3]


def test_copies_that_parted_between_data_parallel_ranks_alone_say_nothing_of_a_forward(tmp_path):
    def equal_along_tp(found):
        for rank in (1, 3):
            checks = {key: row for key, row in found[FOUND][rank - 1].items() if key.kind is Kind.CHECKSUM}
            found[FOUND][rank].update(checks)

    diagnosis = record(tmp_path, from_fault_on(BEHIND_DROPOUT), edit=equal_along_tp, **BOTH)

    assert place_of(diagnosis) == PRESENT


def test_ranks_that_did_not_write_down_their_places_are_not_taken_for_copies(tmp_path):
    assert place_of(record(tmp_path, from_fault_on(BEHIND_DROPOUT), axes=())) == PRESENT
