"""Diagnoses from stored statistics and small dumps in run directories made by hand."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from tests.analysis.stored_run import ALL_NAN, FINITE, MASK, ONE_INF, actv, dump, grad, store
from trainermon import cli
from trainermon.analysis.diagnosis import findings
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.evidence import modules_of
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict, FaultPhase, RankRole
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.errors import DumpError
from trainermon.core.values import Kind, SeriesKey, as_plain
from trainermon.dump.files.verdicts import NonfiniteCause, Reproducibility

LOSS = SeriesKey(Kind.LOSS, "loss")
SOUND = (2.0, 0, 0)
BAD = (2.0, 0, 1)
MODULES = ["emb", "h", "h.0", "h.0.up", "h.0.down", "head"]


def own(name):
    return grad(name, Kind.GRAD_UNREDUCED)


def test_no_run_directory_is_refused(tmp_path):
    with pytest.raises(DumpError, match="is not a directory: expected the directory of a run"):
        diagnose(tmp_path / "none")


def test_empty_run_has_no_evidence(tmp_path):
    diagnosis = diagnose(tmp_path)

    assert diagnosis.verdict is DiagnosisVerdict.NO_EVIDENCE
    assert diagnosis.step is None
    assert "Nothing is known" in render_text(diagnosis)


def test_finite_run_says_so_and_names_the_largest(tmp_path):
    large = (4, -1.0, 7e9, 1.0, 5.0, 0, 0, 0)
    store(
        tmp_path, {1: {0: {grad("fc.weight"): FINITE}}, 2: {0: {grad("fc.weight"): large, actv("m", "input.0"): MASK}}}
    )

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.verdict, diagnosis.step) == (DiagnosisVerdict.FINITE, 2)
    assert "7e+09, in grad_reduced of fc.weight on rank 0" in diagnosis.reason


@pytest.mark.parametrize("bad_step", [None, 8])
def test_ordered_dumps_of_sound_steps_do_not_hide_the_last_step_or_a_bad_one(tmp_path, bad_step):
    store(tmp_path, {step: {0: {own("fc.weight"): ALL_NAN if step == bad_step else FINITE}} for step in range(10)})
    for step in (2, 6):
        dump(tmp_path, 0, SOUND, step=step, replay=False, micro_steps=0)

    diagnosis = diagnose(tmp_path)

    if bad_step is None:
        assert diagnosis.step == 9
        assert diagnosis.headline == "Nothing was non-finite in any of 10 stored steps, up to step 9"
    else:
        assert (diagnosis.step, diagnosis.verdict) == (8, DiagnosisVerdict.LOCATED)


def test_an_ordered_dump_of_a_bad_step_counts_where_the_rows_do_not_tell(tmp_path):
    store(tmp_path, {step: {0: {actv("fc", "output.0"): FINITE}} for step in range(10)})
    for step, weight in ((2, SOUND), (6, BAD), (7, BAD)):
        dump(tmp_path, 0, weight, step=step, replay=False, micro_steps=0)

    assert (diagnose(tmp_path).step, diagnose(tmp_path).module) == (6, "fc")


def test_an_infinity_within_a_step_that_is_finite_is_told(tmp_path):
    form = {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [2],
        "Max": 1.0,
        "Min": 0.0,
        "nans": 0,
        "infs": 1,
    }
    data = {"Module.mask.Mask.forward.0": {"input_args": [], "output": [form]}}
    (tmp_path / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L0", "data": data}))

    found = diagnose(tmp_path)

    assert found.headline == "No parameter, gradient or result of the model was non-finite in step 0"
    assert found.reason.startswith(
        "Output.0 of Module.mask.Mask.forward.0 on rank 0 is not finite, but that reached none"
    )


def test_whole_numbers_in_an_input_are_not_the_largest_element(tmp_path):
    tokens = (4, 0.0, 125.0, 180.0, 17_000.0, 1, 0, 0)
    floats = (4, -3.0, 99.0, 98.5, 9811.25, 0, 0, 0)
    rows = {actv("token", "input.0"): tokens, actv("mask", "kwargs.mask"): tokens, actv("h", "input.0"): floats}
    store(tmp_path, {2: {0: {**rows, grad("fc.weight"): FINITE}}})

    said = diagnose(tmp_path).reason
    assert (
        "values that were collected are finite; of step 2, the largest element is 99, in actv of h input.0 on" in said
    )
    assert "--against a sound one finds where they part" in said


def test_an_ordered_dump_is_no_replay(tmp_path):
    store(tmp_path, {5: {0: {own("fc.weight"): FINITE}, 1: {own("fc.weight"): FINITE}}})
    dump(tmp_path, 0, SOUND, replay=False, micro_steps=0)

    text = render_text(diagnose(tmp_path))

    assert "dump of rank 0" in text
    assert "replay" not in text.replace("dumps/replay/", "")
    assert "bad gradient" not in text


@pytest.mark.parametrize(("num_ranks", "others"), [(2, "rank 1 is concerned, too"), (3, "ranks 1, 2 are concerned")])
def test_names_stand_as_they_are_and_ranks_in_good_grammar(tmp_path, num_ranks, others):
    for number, key in enumerate(
        [own("token.weight"), SeriesKey(Kind.PARAM_ORIGIN, "token.weight"), actv("token", "output.0")]
    ):
        run = tmp_path / str(number)
        store(run, {5: {rank: {key: ALL_NAN} for rank in range(num_ranks)}})

        text = render_text(diagnose(run))

        assert re.search(r"(parameter|module)\W+token", text, re.IGNORECASE)
        assert "Token" not in text
        assert others in " ".join(text.split())


def test_replays_tell_the_ranks_and_the_store_the_consequences(tmp_path):
    rows = {grad("fc.weight"): ALL_NAN, grad("fc.bias"): ALL_NAN, own("fc.weight"): FINITE, LOSS: FINITE}
    store(tmp_path, {4: {0: {LOSS: FINITE}}, 5: {0: rows, 1: {**rows, own("fc.weight"): ONE_INF, LOSS: ALL_NAN}}})
    dump(tmp_path, 0, SOUND)
    dump(tmp_path, 1, BAD)

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.verdict, diagnosis.step, diagnosis.attempt) == (DiagnosisVerdict.LOCATED, 5, 1)
    assert (diagnosis.rank, diagnosis.module, diagnosis.phase) == (1, "fc", FaultPhase.PARAMETER)
    zero, one = diagnosis.ranks
    assert (zero.role, zero.replay, zero.unreduced, zero.reduced) == (RankRole.INNOCENT, "clean", 0, 2)
    assert (one.role, one.replay, one.unreduced, one.reduced) == (RankRole.ORIGIN, "nonfinite", 1, 2)
    assert diagnosis.consequences == (
        "the reduction carried it to ranks 0, 1: 2 gradients each",
        "the loss was not finite on rank 1",
    )
    assert diagnosis.chain[-1].module == "(loss)"
    assert diagnosis.parameters[0].name == "fc.weight"
    assert diagnosis.dump == "dumps/replay/attempt1/step5/rank1"


@pytest.mark.parametrize(
    ("again", "uncovered", "words"),
    [
        (Reproducibility.NOT_REPRODUCIBLE, "", "not reproduced, so transient, likely the hardware or a race"),
        (Reproducibility.REPRODUCIBLE, "", "a backward through a backward (create_graph), hooks on gradients"),
        (Reproducibility.UNKNOWN, "", "a backward through a backward (create_graph), hooks on gradients"),
        (None, "", "a backward through a backward (create_graph), hooks on gradients"),
        (Reproducibility.REPRODUCIBLE, "a backward ran with create_graph", ". A backward ran with create_graph. "),
    ],
)
def test_a_clean_replay_is_located_by_the_store_and_blames_the_device_only_where_a_forward_differed(
    tmp_path, again, uncovered, words
):
    sound = {own(name): FINITE for name in ("emb.weight", "h.0.up.weight", "head.weight")}
    bad = {**sound, own("emb.weight"): ALL_NAN, own("h.0.up.weight"): ONE_INF}
    store(tmp_path, {5: {0: sound, 1: bad}}, modules=MODULES)
    dump(tmp_path, 0, SOUND)
    dump(tmp_path, 1, SOUND, reproducibility=again, uncovered=uncovered)

    diagnosis = diagnose(tmp_path)

    is_suspect = again is Reproducibility.NOT_REPRODUCIBLE
    assert diagnosis.verdict is DiagnosisVerdict.NOT_REPRODUCED
    assert (diagnosis.rank, diagnosis.module, diagnosis.phase) == (1, "h.0.up", FaultPhase.BACKWARD)
    assert words in diagnosis.reason
    assert ("hardware" in render_text(diagnosis)) == ("transient" in diagnosis.headline) == is_suspect
    assert (diagnosis.classification.cause is NonfiniteCause.KERNEL) == is_suspect


@pytest.mark.parametrize("is_suspect", [False, True])
def test_what_the_step_had_and_no_replay_contains_is_the_headline_unless_a_forward_differed(tmp_path, is_suspect):
    bad = {own("emb.weight"): ALL_NAN, own("h.0.up.weight"): ONE_INF, own("head.weight"): FINITE}
    store(tmp_path, {5: {0: bad}}, modules=MODULES)
    again = Reproducibility.NOT_REPRODUCIBLE if is_suspect else Reproducibility.REPRODUCIBLE
    dump(tmp_path, 0, SOUND, reproducibility=again, absent=["a backward through a backward (create_graph)"])

    diagnosis = diagnose(tmp_path)

    if is_suspect:
        assert diagnosis.headline == "A transient non-finite value appeared in h.0.up on rank 0 in step 5"
        return
    words = "a backward through a backward (create_graph)"
    assert diagnosis.headline == f"A non-finite gradient likely came of {words} on rank 0 in step 5"
    assert (diagnosis.module, diagnosis.rank) == ("", 0)
    assert diagnosis.classification.cause is NonfiniteCause.UNKNOWN
    assert f"the step had {words}, which no replay contains" in diagnosis.classification.reason


def test_clean_replays_alone_still_mean_that_the_fault_was_not_reproduced(tmp_path):
    dump(tmp_path, 0, SOUND)

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.verdict, diagnosis.rank, diagnosis.step) == (DiagnosisVerdict.NOT_REPRODUCED, None, 5)


LONG = "an input of the model was overwritten after the forward; " * 4 + "end of the reason"


@pytest.mark.parametrize("aborted", ["refused", "failed"])
@pytest.mark.parametrize("weight", [SOUND, BAD])
def test_a_replay_that_was_given_up_is_shown_with_its_whole_reason(tmp_path, aborted, weight):
    store(tmp_path, {5: {0: {own("emb.weight"): ALL_NAN}, 1: {own("emb.weight"): FINITE}}})
    dump(tmp_path, 0, weight, aborted=aborted, uncovered=LONG)
    dump(tmp_path, 1, SOUND)

    diagnosis = diagnose(tmp_path)

    zero, one = diagnosis.ranks
    assert (zero.replay, zero.replay_reason) == (aborted, LONG)
    assert (one.replay, one.replay_reason) == ("clean", "")
    assert (diagnosis.verdict, diagnosis.rank) == (DiagnosisVerdict.LOCATED, 0)
    assert "transient" not in diagnosis.headline + diagnosis.reason
    text = render_text(diagnosis)
    assert f"replay {aborted}: {LONG}" in text
    assert text.count("end of the reason") == 1


def test_a_replay_that_was_given_up_elsewhere_does_not_hide_that_the_fault_was_not_reproduced(tmp_path):
    store(tmp_path, {5: {0: {own("emb.weight"): ALL_NAN}, 1: {own("emb.weight"): FINITE}}})
    dump(tmp_path, 0, SOUND)
    dump(tmp_path, 1, SOUND, aborted="refused", uncovered="why")

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.verdict, diagnosis.rank) == (DiagnosisVerdict.NOT_REPRODUCED, 0)
    assert diagnosis.ranks[1].role is RankRole.UNKNOWN


def test_a_clean_replay_beside_one_that_was_given_up_proves_nothing(tmp_path):
    store(tmp_path, {5: {rank: {grad("emb.weight"): ALL_NAN} for rank in (0, 1)}})
    dump(tmp_path, 0, SOUND)
    dump(tmp_path, 1, SOUND, aborted="refused", uncovered="why")

    diagnosis = diagnose(tmp_path)

    assert diagnosis.verdict is DiagnosisVerdict.LOCATED
    assert "The replay of rank 1 did not come to its end" in diagnosis.reason


def test_lost_output_names_the_rank_and_stored_activations_the_module(tmp_path):
    rows = {
        actv("h.0", "input.0"): FINITE, actv("h.0", "output.0"): ALL_NAN, actv("h.0.up", "input.0"): FINITE,
        actv("h.0.up", "output.0"): ONE_INF, actv("h.0.down", "input.0"): ONE_INF,
        actv("h.0.down", "output.0"): ALL_NAN, actv("emb", "output.0"): MASK, LOSS: ALL_NAN,
    }  # fmt: skip
    store(tmp_path, {5: {0: {LOSS: FINITE}, 1: rows}}, modules=MODULES)
    dump(tmp_path, 0, SOUND)
    dump(tmp_path, 1, SOUND, reproduced=False, lost_nonfinite=True)

    diagnosis = diagnose(tmp_path)

    assert diagnosis.verdict is DiagnosisVerdict.NOT_REPRODUCED
    assert (diagnosis.rank, diagnosis.module, diagnosis.phase) == (1, "h.0.up", FaultPhase.FORWARD)


def test_without_a_replay_the_store_locates_as_well_as_it_can(tmp_path):
    weights = {
        SeriesKey(Kind.PARAM_ORIGIN, "h.0.up.weight"): ONE_INF,
        SeriesKey(Kind.PARAM_ORIGIN, "emb.weight"): FINITE,
    }
    store(
        tmp_path, {5: {0: {grad("emb.weight"): ALL_NAN}, 1: {**weights, grad("emb.weight"): ALL_NAN}}}, modules=MODULES
    )

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.verdict, diagnosis.rank, diagnosis.module) == (DiagnosisVerdict.LOCATED, 1, "h.0.up")
    assert diagnosis.phase is FaultPhase.PARAMETER
    assert diagnosis.reason.startswith("No replay of the step was found")


def test_reduced_gradients_alone_tell_no_rank(tmp_path):
    store(tmp_path, {5: {rank: {grad("emb.weight"): ALL_NAN} for rank in (0, 1)}})

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.rank, diagnosis.module, diagnosis.phase) == (None, "", FaultPhase.UNKNOWN)
    assert "does not tell where it arose" in diagnosis.reason


def test_bad_loss_without_activations_tells_the_rank_only(tmp_path):
    store(tmp_path, {5: {0: {LOSS: FINITE}, 1: {LOSS: ALL_NAN, own("emb.weight"): ALL_NAN}}})

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.rank, diagnosis.module) == (1, "")


def test_bad_loss_beside_finite_activations_and_gradients_is_the_loss_itself(tmp_path):
    rows = {actv("head", "output.0"): FINITE, LOSS: ALL_NAN, grad("head.weight"): FINITE}
    store(tmp_path, {5: {0: {**rows, LOSS: FINITE}, 1: rows}})

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.rank, diagnosis.module, diagnosis.phase) == (1, "(loss)", FaultPhase.FORWARD)
    assert diagnosis.headline == "A non-finite value arose in the forward of (loss) on rank 1 in step 5"


@pytest.mark.parametrize("kind", [Kind.PARAM_UPDATED, Kind.EXP_AVG_SQ])
def test_what_the_optimizer_made_of_finite_gradients_is_named_in_its_own_step(tmp_path, kind):
    rows = {grad("h.0.up.weight"): FINITE, grad("head.weight"): FINITE}
    bad = {SeriesKey(kind, "head.weight"): ONE_INF, SeriesKey(Kind.PARAM_UPDATED, "h.0.up.weight"): FINITE}
    loss = {LOSS: FINITE}
    steps = {5: {0: rows | loss, 1: rows | loss | bad}, 6: {rank: {LOSS: ALL_NAN} for rank in (0, 1)}}
    store(tmp_path, steps, modules=MODULES)

    diagnosis = diagnose(tmp_path, step=5)

    found = (diagnosis.step, diagnosis.rank, diagnosis.module, diagnosis.phase)
    assert found == (5, 1, "head", FaultPhase.OPTIMIZER)
    assert f"gradients were finite, but {kind} of head.weight were not" in diagnosis.reason
    assert "(loss)" not in diagnosis.headline


def test_modules_of_every_pipeline_stage_have_their_place_in_the_order(tmp_path):
    bad = {actv(name, "output.0"): ALL_NAN for name in ("decoder", "decoder.1.fc", "head")}
    store(tmp_path, {5: {0: {LOSS: FINITE}, 1: bad}}, modules=["decoder", "decoder.0.fc"])
    (tmp_path / "ranks/rank00001.json").write_text(json.dumps({"modules": ["decoder", "decoder.1.fc", "head"]}))

    assert diagnose(tmp_path).module == "decoder.1.fc"
    assert modules_of(tmp_path) == ("decoder", "decoder.0.fc", "decoder.1.fc", "head")


def test_an_optimizer_that_was_given_bad_gradients_is_not_blamed(tmp_path):
    bad = {grad("head.weight"): ONE_INF, SeriesKey(Kind.PARAM_UPDATED, "head.weight"): ONE_INF}
    store(tmp_path, {5: {0: bad, 1: bad}}, modules=MODULES)

    assert diagnose(tmp_path).phase is FaultPhase.UNKNOWN


def test_a_parameter_that_the_optimizer_spoiled_is_the_optimizers(tmp_path):
    updated = SeriesKey(Kind.PARAM_UPDATED, "fc.weight")
    store(tmp_path, {4: {0: {updated: ONE_INF, grad("fc.weight"): FINITE}}, 5: {0: {grad("fc.weight"): ALL_NAN}}})
    dump(tmp_path, 0, BAD)

    diagnosis = diagnose(tmp_path, step=5)

    assert (diagnosis.phase, diagnosis.module) == (FaultPhase.OPTIMIZER, "fc")
    assert "gradients of step 4 were finite" in diagnosis.reason


def test_a_step_too_late_points_at_the_first(tmp_path):
    store(tmp_path, {4: {0: {grad("fc.weight"): ALL_NAN}}, 5: {0: {grad("fc.weight"): ALL_NAN}}})
    dump(tmp_path, 0, BAD)

    late = diagnose(tmp_path, step=5)
    assert (late.verdict, late.rank, late.module) == (DiagnosisVerdict.CONSEQUENCE, None, "")
    assert late.headline == "Step 4 was the first that was not finite: this is a consequence; see --step 4"
    assert diagnose(tmp_path).step == 4


@pytest.mark.parametrize("kind", [Kind.LOSS, Kind.PARAM_ORIGIN, Kind.GRAD_REDUCED])
def test_the_first_of_several_bad_steps_is_pointed_at(tmp_path, kind):
    sound, bad = ({0: {SeriesKey(kind, "x"): numbers, grad("w"): ALL_NAN}} for numbers in (FINITE, ALL_NAN))
    finite = {0: {SeriesKey(kind, "x"): FINITE}}
    store(tmp_path, {1: bad, 2: finite, 38: finite, 40: sound, 41: bad, 42: bad, 43: finite})

    assert "see --step 40" in diagnose(tmp_path, step=42).headline
    assert "see --step 40" in diagnose(tmp_path, step=41).headline
    assert diagnose(tmp_path, step=40).verdict is DiagnosisVerdict.LOCATED
    assert diagnose(tmp_path, step=43).verdict is DiagnosisVerdict.FINITE


@pytest.mark.parametrize("known_by", ["dump", "parameters", "loss"])
def test_a_second_fault_on_sound_weights_is_no_consequence(tmp_path, known_by):
    weights = SeriesKey(Kind.PARAM_ORIGIN, "w")
    known = {"dump": {LOSS: ALL_NAN}, "parameters": {LOSS: ALL_NAN, weights: FINITE}, "loss": {LOSS: FINITE}}[known_by]
    store(tmp_path, {4: {0: {own("w"): ALL_NAN}}, 5: {0: {own("w"): ALL_NAN, **known}}})
    if known_by == "dump":
        dump(tmp_path, 0, SOUND)

    assert diagnose(tmp_path, step=5).verdict is not DiagnosisVerdict.CONSEQUENCE


def test_the_newest_attempt_is_explained(tmp_path):
    dump(tmp_path, 0, BAD, step=3, attempt=1)
    dump(tmp_path, 0, BAD, step=9, attempt=2)
    dump(tmp_path, 0, BAD, step=12, attempt=2)

    assert (diagnose(tmp_path).attempt, diagnose(tmp_path).step) == (2, 9)
    assert diagnose(tmp_path, step=3).attempt == 1


def test_an_unknown_step_is_refused_with_the_known_ones(tmp_path, capsys):
    store(tmp_path, {step: {0: {LOSS: FINITE}} for step in (2, 3, 4, 12)})
    dump(tmp_path, 0, BAD, step=14)

    for step, nearest in ((0, 2), (10, 12), (999, 14)):
        with pytest.raises(DumpError, match=rf"step {step} is not known.* 2 to 14,.* nearest is --step {nearest}$"):
            diagnose(tmp_path, step=step)
    assert cli.main(["diagnose", str(tmp_path), "--step", "999"]) == 1
    assert "step 999 is not known" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpError, match="holds no dump and no stored statistics of step 3"):
        diagnose(tmp_path / "empty", step=3)


def test_a_damaged_dump_is_noted_not_fatal(tmp_path):
    dump(tmp_path, 0, BAD)
    dump(tmp_path, 1, SOUND)
    (tmp_path / "dumps/replay/attempt1/step5/rank1/dump.json").write_text("{")

    diagnosis = diagnose(tmp_path)

    assert diagnosis.rank == 0
    assert any("is not JSON" in source for source in diagnosis.evidence)


def test_ordered_dump_gives_way_to_a_replay(tmp_path):
    dump(tmp_path, 0, BAD)
    folder = tmp_path / "dumps/manual/attempt1/step5"
    folder.mkdir(parents=True)
    dump(tmp_path / "other", 0, SOUND, replay=False)
    (tmp_path / "other/dumps/replay/attempt1/step5/rank0").rename(folder / "rank0")

    assert diagnose(tmp_path).dump.startswith("dumps/replay/")


@pytest.mark.parametrize("words", [[], ["new"], ["trainermon_output/new"]])
def test_command_takes_a_run_id_and_else_the_newest_run(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("new", "old")):
        run = tmp_path / "trainermon_output" / name
        dump(run, 0, BAD)
        (run / "run.json").write_text("{}")
        os.utime(run, (1e9 - age, 1e9 - age))

    assert cli.main(["diagnose", *words]) == 0
    assert "new, step 5" in capsys.readouterr().out
    assert cli.main(["diagnose", "none"]) == 1
    assert "no run 'none'" in capsys.readouterr().err


def test_command_prints_text_and_json(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    dump(tmp_path, 0, BAD, notes=("a note",))
    post_mortem = tmp_path / "reports/post-mortem-hang-node1-attempt1-step9.md"
    post_mortem.parent.mkdir()
    post_mortem.write_text("")
    assert cli.main(["diagnose", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert cli.main(["diagnose", str(tmp_path), "--step", "5", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)

    assert "A parameter was not finite in fc on rank 0 in step 5" in text
    assert f"see also   {post_mortem}" in text
    assert "\033" not in text
    assert plain == json.loads(json.dumps(as_plain(diagnose(tmp_path, step=5))))


def test_every_field_is_documented():
    text = (Path(__file__).parents[3] / "trainermon/analysis/diagnosis/README.md").read_text()
    values = (findings.Diagnosis, findings.BadTensor, findings.PathLink, findings.RankFinding, findings.BadParameter)
    for value in (*values, findings.LevelFinding, findings.Contrast, findings.NextCollection):
        for field in dataclasses.fields(value):
            assert f"`{field.name}`" in text, f"{value.__name__}.{field.name}"
    for kind in (DiagnosisVerdict, FaultPhase, RankRole, findings.Symptom, findings.PlaceLevel):
        for member in kind:
            assert f"`{member.value}`" in text


def test_text_is_aligned_and_coloured_only_on_demand(tmp_path):
    dump(tmp_path, 0, BAD)
    diagnosis = diagnose(tmp_path)

    plain, coloured = render_text(diagnosis), render_text(diagnosis, colour=True)

    assert plain == coloured.replace("\033[1m", "").replace("\033[0m", "")
    assert all(line[10] == " " for line in plain.splitlines()[1:])


@pytest.mark.parametrize(("buffers", "is_said"), [(0, False), (3, True), (None, True)])
def test_buffers_that_were_not_looked_at_are_told_unless_there_are_none(tmp_path, buffers, is_said):
    store(tmp_path, {1: {0: {grad("fc.weight"): FINITE}}})
    (tmp_path / "ranks").mkdir(exist_ok=True)
    (tmp_path / "ranks" / "rank00000.json").write_text(json.dumps({"rank": 0, "buffers": buffers}))

    assert any("buffers" in note for note in diagnose(tmp_path).evidence) == is_said
