"""Runs of two ranks with one thing different from a sound one, each held against it: by rows, by dumps, by both."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from tests.analysis import against_job
from tests.analysis.against_job import FAULT_STEP, FAULTS, NUM_STEPS, SOUND
from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.analysis.stored_run import FINITE, actv, grad, store
from tests.journal_rows import RankJournal, only_spool
from tests.ranks import run_ranks
from trainermon import PrecisionDebugger, cli
from trainermon.analysis.diagnosis.against.against import diagnose_against
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict, FaultPhase, PlaceLevel, RankRole, Symptom
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.config import load_config
from trainermon.core.errors import DumpError
from trainermon.core.values import Kind, SeriesKey, as_plain

# What rows alone call it: they do not see a hook that the script registers after the monitor's, nor the model's inputs.
BY_ROWS = {"output": "h.1.attention", "batch": "(model)"}
NAMES = [fault.name for fault in FAULTS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(Path(against_job.__file__), str(folder))
    for run in folder.iterdir():
        steps = {}
        for rank in (0, 1):
            for step, rows in RankJournal(only_spool(run / "spool"), rank).rows.items():
                steps.setdefault(step, {})[rank] = {key: dataclasses.astuple(row) for key, row in rows.items()}
        assert len(steps) == NUM_STEPS
        store(run, steps)
    return folder


@pytest.fixture(scope="module")
def rows_only(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for run in runs.iterdir():
        shutil.copytree(run, folder / run.name, ignore=shutil.ignore_patterns("dumps", "spool"))
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_the_first_difference_is_where_the_fault_was_put(runs, fault):
    diagnosis = diagnose_against(runs / fault.name, runs / SOUND)

    assert (diagnosis.verdict, diagnosis.symptom) == (DiagnosisVerdict.LOCATED, Symptom.DIFFERS)
    found = (diagnosis.step, diagnosis.rank, diagnosis.module, diagnosis.phase.value)
    assert found == (FAULT_STEP, fault.rank, fault.module, fault.phase), diagnosis.headline
    roles = {finding.rank: finding.role for finding in diagnosis.ranks}
    assert roles[fault.rank] is RankRole.ORIGIN
    assert roles.get(1 - fault.rank, RankRole.INNOCENT) is not RankRole.ORIGIN
    assert [level.level for level in diagnosis.levels] == list(PlaceLevel)
    answers = {level.level: level.answer for level in diagnosis.levels}
    assert (answers[PlaceLevel.STEP], answers[PlaceLevel.RANK]) == (str(FAULT_STEP), str(fault.rank))
    assert answers[PlaceLevel.DOMAIN] == f"dp {fault.rank}"
    assert "3 steps before it that both runs have agree to the bit" in diagnosis.levels[0].reason
    assert diagnosis.contrasts[0].value != diagnosis.contrasts[0].usual


@pytest.mark.distributed
@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_rows_alone_tell_step_rank_module_and_phase_and_ask_for_a_dump(rows_only, fault, tmp_path):
    diagnosis = diagnose_against(rows_only / fault.name, rows_only / SOUND)

    found = (diagnosis.step, diagnosis.rank, diagnosis.module, diagnosis.phase.value)
    module = BY_ROWS.get(fault.kind, fault.module)
    assert found == (FAULT_STEP, fault.rank, module, fault.phase), diagnosis.headline
    assert diagnosis.collect.debugger["step"] == [FAULT_STEP]
    assert "dumps: none of a step and rank that both sides have" in diagnosis.evidence


@pytest.mark.distributed
@pytest.mark.parametrize("fault", FAULTS[2:5], ids=NAMES[2:5])
def test_dumps_alone_tell_rank_module_and_phase(runs, fault):
    diagnosis = diagnose_against(runs / fault.name / "dumps", runs / SOUND / "dumps/ordered/attempt1/step3")

    found = (diagnosis.step, diagnosis.rank, diagnosis.module, diagnosis.phase.value)
    assert found == (FAULT_STEP, fault.rank, fault.module, fault.phase), diagnosis.headline
    assert "hold dumps only" in diagnosis.evidence[0]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("number", "steps"), [(3, (3, 3, 3, 3, 3, 3)), (5, (4, 4, 4, 4, 3, 3))], ids=["gradient", "optimizer"]
)
def test_the_way_of_the_gradients_parts_where_the_fault_was_put(rows_only, number, steps):
    fault = FAULTS[number]
    links = diagnose_against(rows_only / fault.name, rows_only / SOUND).gradient_chain

    assert tuple(link.step for link in links) == steps
    if fault.kind == "optimizer":
        assert links[4].series == f"exp_avg {fault.module}.weight"
    else:
        assert links[0].rank == fault.rank


@pytest.mark.distributed
def test_a_run_does_not_differ_from_itself(runs):
    diagnosis = diagnose_against(runs / SOUND, runs / SOUND)

    (norm,) = diagnosis.run_verdicts  # the job records no loss
    assert (norm.quantity, norm.differs, norm.value, norm.num_steps) == ("grad_norm", False, 0.0, NUM_STEPS)
    assert {link.state for link in diagnosis.gradient_chain} == {"agrees"}

    assert (diagnosis.verdict, diagnosis.symptom, diagnosis.collect) == (DiagnosisVerdict.EQUAL, Symptom.NONE, None)
    assert "The stored rows of 5 steps agree" in diagnosis.reason


@pytest.mark.distributed
def test_command_prints_both_sides_and_ends_with_the_status_that_was_asked_for(runs, capsys):
    fault = FAULTS[1]
    arguments = ["diagnose", str(runs / fault.name), "--against", str(runs / SOUND)]

    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert cli.main([*arguments, "--exit-code", "--json"]) == 3
    plain = json.loads(capsys.readouterr().out)
    assert cli.main(["diagnose", str(runs / SOUND), "--against", str(runs / SOUND), "--exit-code"]) == 0

    assert f"The run first differs from the reference in {fault.module} on rank 1 in step 3" in text
    assert "fault_grid.py" in text
    assert len(text.splitlines()) <= 40
    assert plain == json.loads(json.dumps(as_plain(diagnose_against(runs / fault.name, runs / SOUND))))


@pytest.fixture
def no_debugger():
    yield
    PrecisionDebugger.close()


@pytest.mark.usefixtures("no_debugger")
def test_what_to_collect_next_is_written_as_configurations_that_both_tools_read(tmp_path, capsys):
    for name, numbers in (("run", (4, -1.0, 3.0, 1.0, 5.0, 0, 0, 0)), ("reference", FINITE)):
        steps = {1: {0: {grad("fc.weight"): FINITE}}, 2: {0: {grad("fc.weight"): numbers}}}
        (tmp_path / name).mkdir()
        store(tmp_path / name, steps)
    arguments = ["diagnose", str(tmp_path / "run"), "--against", str(tmp_path / "reference")]

    assert cli.main([*arguments, "--collect", str(tmp_path / "next")]) == 0

    assert "config.json: {" in capsys.readouterr().out
    config = PrecisionDebugger(tmp_path / "next/config.json").config
    assert (config.level, config.step) == ("mix", (2,))
    monitor, notes = load_config(tmp_path / "next/monitor_config.json")
    assert (monitor.xy_distribution, monitor.param_distribution, monitor.start_step, notes) == (True, True, 0, ())


@pytest.mark.parametrize(("ours", "theirs", "expected"), [(1, 50, True), (50, 1, True), (50, 50, False)])
def test_steps_that_one_side_alone_has_are_in_the_first_line(tmp_path, ours, theirs, expected):
    for name, number in (("run", ours), ("reference", theirs)):
        (tmp_path / name).mkdir()
        store(tmp_path / name, {step: {0: {grad("fc.weight"): FINITE}} for step in range(number)})

    diagnosis = diagnose_against(tmp_path / "run", tmp_path / "reference")

    assert (diagnosis.headline == "No difference from the reference was found on the 1 step that both have") == expected
    assert (f"49 steps of {'the reference' if ours == 1 else 'this run'} alone" in diagnosis.reason) == expected


def comm(slot):
    return SeriesKey(Kind.COMM, "tp.all_reduce", slot)


def noisy(step, scale):
    return (4, -1.0 - scale * step, 2.0 + scale, 1.0, 5.0, 0, 0, 0)


def test_runs_that_never_agree_to_the_bit_are_held_against_their_own_noise(tmp_path):
    far = {3: (4, -1.0, 2.5, 1.0, 5.0, 0, 0, 0)}
    for name, scale, odd in (("run", 1e-4, far), ("reference", 0.0, {})):
        steps = {step: {0: {grad("fc.weight"): odd.get(step, noisy(step, scale))}} for step in range(5)}
        (tmp_path / name).mkdir()
        store(tmp_path / name, steps)

    diagnosis = diagnose_against(tmp_path / "run", tmp_path / "reference")

    assert (diagnosis.step, diagnosis.rank) == (3, 0)
    assert "agree but for noise of up to" in diagnosis.levels[0].reason


def test_reduced_gradients_alone_do_not_tell_where_it_arose(tmp_path):
    for name, maximum in (("run", 3.0), ("reference", 2.0)):
        other = {grad("fc.weight"): (4, -1.0, maximum, 1.0, 5.0, 0, 0, 0)}
        (tmp_path / name).mkdir()
        store(tmp_path / name, {1: {0: {grad("fc.weight"): FINITE}}, 2: {0: other, 1: other}})

    diagnosis = diagnose_against(tmp_path / "run", tmp_path / "reference")

    assert (diagnosis.step, diagnosis.rank, diagnosis.module) == (2, None, "")
    assert diagnosis.phase is FaultPhase.UNKNOWN
    assert "does not tell where it arose" in diagnosis.reason


def test_stored_collectives_tell_which_rank_sent_the_difference_to_the_others(tmp_path):
    other = (4, -1.0, 3.0, 1.0, 5.0, 0, 0, 0)
    output, sent, received = actv("h.down", "output.0"), comm("pre.0"), comm("post.0")
    rows = dict.fromkeys((output, sent, received), FINITE)
    late = {**rows, output: other, received: other}
    for name, one, two in (("run", late, {**late, sent: other}), ("reference", rows, rows)):
        (tmp_path / name).mkdir()
        store(tmp_path / name, {1: {0: rows, 1: rows}, 2: {0: one, 1: two}})

    diagnosis = diagnose_against(tmp_path / "run", tmp_path / "reference")

    assert (diagnosis.step, diagnosis.rank, diagnosis.module) == (2, 1, "h.down")


def test_nothing_in_common_is_said_and_what_to_store(tmp_path):
    for name in ("run", "reference"):
        (tmp_path / name / "nodes").mkdir(parents=True)

    diagnosis = diagnose_against(tmp_path / "run", tmp_path / "reference")

    assert diagnosis.verdict is DiagnosisVerdict.NO_EVIDENCE
    assert "Nothing could be compared" in render_text(diagnosis)
    assert diagnosis.collect.monitor["xy_distribution"] is True


def test_a_reference_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(DumpError, match="expected a run"):
        diagnose_against(tmp_path, tmp_path / "none")


def test_dumps_of_msprobe_that_count_no_nans_are_not_taken_for_non_finite():
    recorded = Path(__file__).parents[2] / "compare" / "recorded"

    text = render_text(diagnose_against(recorded / "faulty", recorded / "sound"))

    assert "\ntensor     input.0, float32[6, 16], -0.255 … 2.08\n" in text
    assert "non-finite" not in text


def test_another_number_that_a_function_was_given_is_told_with_both_values(tmp_path):
    function, module = "Tensor.__add__.0.forward", "Module.norm.RMSNorm.forward.0"
    for name, epsilon in (("run", 1e-3), ("reference", 1e-6)):
        number = {"type": "float", "value": epsilon}
        data = {
            function: forward(tensor(value=1.0), number, output=tensor(value=1.0 + epsilon)),
            module: forward(tensor(value=1.0), output=tensor(value=1.0 - epsilon)),
        }
        write_dump(tmp_path / name / "step0" / "rank0", data, construct={function: module, module: None})

    diagnosis = diagnose_against(tmp_path / "run", tmp_path / "reference")

    assert (diagnosis.api, diagnosis.module, diagnosis.tensor) == (function, "norm", None)
    assert diagnosis.reason.startswith(f"input.1 of {function} is 0.001, 1e-06 in the reference")


def test_a_call_on_one_side_only_is_told_though_no_value_differs(tmp_path):
    """Statistics do not see that rows were exchanged; that something was called in between they do."""
    call = forward(tensor(), output=tensor())
    for name, calls in (("run", ("Tensor.relu", "Tensor.flip")), ("reference", ("Tensor.relu",))):
        for step in (0, 1, 2):
            data = {f"{kind}.0.forward": call for kind in (calls if step == 1 else calls[:1])}
            write_dump(tmp_path / name / f"step{step}" / "rank0", data)

    diagnosis = diagnose_against(tmp_path / "run", tmp_path / "reference")

    assert diagnosis.verdict is DiagnosisVerdict.EQUAL
    assert diagnosis.headline == "No value differs from the reference, but step 1 has calls on one side only"
    assert "only one side calls Tensor.flip.0.forward" in diagnosis.reason


LOSS_VALUE = SeriesKey(Kind.LOSS, "loss")
UPDATED = SeriesKey(Kind.EXP_AVG, "head.weight")
WATCHED = {grad("head.weight"): FINITE, actv("head", "output.0"): FINITE}


def one_sided(folder, ours, theirs, *, both=(), first=2, num_steps=4):
    """Return what is said of two runs that are equal, but for what each has besides from step `first` on.

    `both` are more series that both have on all steps.
    """
    watched = WATCHED | dict.fromkeys(both, FINITE)
    for name, more in (("run", ours), ("reference", theirs)):
        rows = {step: {0: watched | (more if step >= first else {})} for step in range(num_steps)}
        (folder / name).mkdir()
        store(folder / name, rows, modules=["head", "tail"])
    return diagnose_against(folder / "run", folder / "reference")


def test_a_moment_that_the_reference_alone_has_is_told_with_what_it_means(tmp_path):
    diagnosis = one_sided(tmp_path, {}, {UPDATED: FINITE}, both=[SeriesKey(Kind.EXP_AVG, "tail.weight")])

    assert (diagnosis.step, diagnosis.module, diagnosis.phase) == (2, "head", FaultPhase.OPTIMIZER)
    assert diagnosis.reason.startswith("exp_avg head.weight is only in the reference: it arose in the optimizer step")
    assert "an optimizer that does not have the parameter keeps nothing of it" in diagnosis.reason


def test_a_series_that_this_run_alone_has_is_told(tmp_path):
    diagnosis = one_sided(tmp_path, {actv("head", "input.0"): FINITE}, {})

    assert (diagnosis.step, diagnosis.phase) == (2, FaultPhase.FORWARD)
    assert diagnosis.reason.startswith("actv head input.0 is only in this run")


def test_a_series_of_a_name_that_one_side_never_stores_is_no_difference(tmp_path):
    """A configuration may leave it out."""
    diagnosis = one_sided(tmp_path, {actv("tail", "output.0"): FINITE}, {})

    assert diagnosis.verdict is DiagnosisVerdict.EQUAL
    assert diagnosis.evidence[1] == "only in this run: tail: not compared"


def test_kinds_that_one_run_alone_recorded_prove_no_difference(tmp_path):
    more = (SeriesKey(Kind.PARAM_ORIGIN, "tok.weight"), SeriesKey(Kind.EXP_AVG, "tok.weight"), actv("tok", "output.0"))
    same = {LOSS_VALUE: FINITE, grad("tok.weight"): FINITE}
    other = dict.fromkeys(same, (4, -1.0, 3.0, 1.0, 5.0, 0, 0, 0))
    for name, late, besides in (("run", other, more), ("reference", same, ())):
        rows = {step: (same if step < 3 else late) | dict.fromkeys(besides, FINITE) for step in range(5)}
        (tmp_path / name).mkdir()
        store(tmp_path / name, {step: {0: values, 1: values} for step, values in rows.items()})

    diagnosis = diagnose_against(tmp_path / "run", tmp_path / "reference")

    assert diagnosis.step == 3
    assert "3 steps before it that both runs have agree to the bit; 4 of 4 series differ" in diagnosis.levels[0].reason
    assert "only in this run: param_origin, actv, exp_avg: not compared" in render_text(diagnosis)
    back = diagnose_against(tmp_path / "reference", tmp_path / "run")
    assert (back.step, back.evidence[1]) == (
        3,
        "only in the reference: param_origin, actv, exp_avg: not compared",
    )


def test_a_model_without_activations_from_some_step_on_is_told_as_a_whole(tmp_path):
    for name, missing in (("run", {2, 3}), ("reference", ())):
        rows = {s: {0: {k: v for k, v in WATCHED.items() if s not in missing or k.kind != Kind.ACTV}} for s in range(4)}
        (tmp_path / name).mkdir()
        store(tmp_path / name, rows)

    diagnosis = diagnose_against(tmp_path / "run", tmp_path / "reference")

    assert (diagnosis.step, diagnosis.module, diagnosis.phase) == (2, "(model)", FaultPhase.FORWARD)
    assert "a model that was left in eval() has none" in diagnosis.reason


def test_steps_that_one_side_lost_right_before_the_difference_are_told(tmp_path):
    other = {0: {grad("head.weight"): (4, -1.0, 3.0, 1.0, 5.0, 0, 0, 0)}}
    same = {0: {grad("head.weight"): FINITE}}
    for name, steps in (("run", {0: same, 3: other}), ("reference", dict.fromkeys(range(4), same))):
        (tmp_path / name).mkdir()
        store(tmp_path / name, steps)

    diagnosis = diagnose_against(tmp_path / "run", tmp_path / "reference")

    assert diagnosis.step == 3
    assert "Right before it steps 1 to 2 are stored on one side only: it may have begun there" in diagnosis.reason
