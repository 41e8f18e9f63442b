"""Which dumps are found below a folder, and which are compared; several ranks at once."""

import json
import os
import shutil
from pathlib import Path

import pytest

import trainermon
from trainermon.analysis.compare import CompareOptions, compare, compare_distributed
from trainermon.analysis.compare.distributed import outcomes
from trainermon.analysis.compare.merging.places import find_places, pair_places
from trainermon.cli import main
from trainermon.core.errors import DumpError

RECORDED = Path(__file__).parents[1] / "recorded"


def put(source, folder):
    shutil.copytree(RECORDED / source / "step0" / "rank0", folder)
    return folder


@pytest.fixture
def two_ranks(tmp_path):
    for rank, name in enumerate(("sound", "faulty")):
        put(name, tmp_path / "a" / "step3" / f"rank{rank}")
        put("sound", tmp_path / "b" / "step3" / f"rank{rank}")
    return tmp_path


@pytest.mark.parametrize("below", ["", "step0", "step0/rank0", "step0/rank0/dump.json"])
def test_a_dump_is_found_from_every_level(below):
    (place,) = find_places(RECORDED / "sound" / below)

    assert place.directory == RECORDED / "sound/step0/rank0"
    assert (place.step, place.rank) == (0, 0)


def test_of_a_run_the_last_attempt_counts(tmp_path):
    for attempt in (1, 2):
        put("sound", tmp_path / f"run/dumps/x/attempt{attempt}/step7/rank0")

    (place,) = find_places(tmp_path / "run")
    assert place.attempt == 2


def test_single_steps_are_compared_whatever_their_numbers(two_ranks):
    os.rename(two_ranks / "b/step3", two_ranks / "b/step9")

    pairs = pair_places(find_places(two_ranks / "a"), find_places(two_ranks / "b"))
    assert [(pair.target.rank, pair.golden.rank) for pair in pairs] == [(0, 0), (1, 1)]


def test_a_dump_without_a_counterpart_is_told(two_ranks, caplog):
    shutil.rmtree(two_ranks / "a/step3/rank1")
    put("sound", two_ranks / "a/step4/rank0")

    assert len(pair_places(find_places(two_ranks / "a"), find_places(two_ranks / "b"))) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "not compared, on the target only: step4 rank0",
        "not compared, on the golden side only: step3 rank1",
    ]


def test_what_does_not_belong_together_is_refused(two_ranks):
    for old, new in (("rank0", "rank10"), ("rank1", "rank11")):
        os.rename(two_ranks / "b/step3" / old, two_ranks / "b/step3" / new)

    with pytest.raises(DumpError, match=r"step3 rank0, step3 rank1.*step3 rank10"):
        compare(two_ranks / "a", two_ranks / "b")


def test_the_faulty_rank_is_named(two_ranks, capsys):
    assert main(["compare", str(two_ranks / "a"), str(two_ranks / "b")]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Step 3, rank 1: the first difference arose in Module.layers.1.Block.forward.0")
    assert lines[3].split()[:2] == ["step3", "rank1"]


@pytest.mark.parametrize("cores", [1, 2])
def test_every_rank_gets_its_files_in_one_process_and_in_several(cores, two_ranks, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))

    outcomes = compare_distributed(two_ranks / "a", two_ranks / "b", two_ranks / "out")
    assert [outcome.label for outcome in outcomes] == ["step3 rank0", "step3 rank1"]
    assert [len(outcome.blamed) for outcome in outcomes] == [0, 1]
    assert sorted(path.suffix for outcome in outcomes for path in outcome.files) == [
        *(".csv", ".csv", ".json", ".json", ".txt", ".txt"),
    ]


def test_a_dump_cut_off_by_a_killed_process_is_compared(tmp_path):
    folder = tmp_path / "rank0"
    folder.mkdir()
    data = json.loads((RECORDED / "faulty/step0/rank0/dump.json").read_text())["data"]
    lines = [json.dumps({"info": {}, "task": "statistics", "level": "mix"})]
    lines += [json.dumps({"key": key, "value": value}) for key, value in data.items()]
    (folder / "dump.partial.jsonl").write_text("\n".join(lines[:30]) + '\n{"key": "torn')

    (comparison,) = compare(folder, RECORDED / "sound")
    assert sum(call.target is not None for call in comparison.calls) == 29


def test_a_missing_backward_call_does_not_shift_those_after_it(tmp_path):
    gap = put("sound", tmp_path / "rank0")
    dump = json.loads((gap / "dump.json").read_text())
    del dump["data"]["Tensor.__rmul__.1.backward"]
    (gap / "dump.json").write_text(json.dumps(dump))

    (comparison,) = compare(RECORDED / "sound", gap)
    partners = {call.target.key: call.golden.key for call in comparison.calls if call.target and call.golden}
    assert "Tensor.__rmul__.1.backward" not in partners
    assert partners["Tensor.__rmul__.0.backward"] == "Tensor.__rmul__.0.backward"


@pytest.mark.parametrize("spelling", ["path", "json_path"])
def test_msprobe_s_input_file_names_both_sides(spelling, tmp_path, capsys):
    sides = {f"npu_{spelling}": str(RECORDED / "faulty"), f"bench_{spelling}": str(RECORDED / "sound")}
    file = tmp_path / "compare.json"
    file.write_text(json.dumps({**sides, "stack_path": "x", "is_print_compare_log": True}))

    assert main(["compare", "-i", str(file), "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("The first difference arose in Module.layers.1.Block.forward.0")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"npu_path": "a"}', "does not name bench_path"),
        ('{"npu_pth": "a"}', "npu_pth: unknown key; did you mean 'npu_path'"),
        ("[]", "holds list, expected an object with npu_path and bench_path"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_a_wrong_input_file_is_refused(content, message, tmp_path, capsys):
    (tmp_path / "compare.json").write_text(content)

    assert main(["compare", "-i", str(tmp_path / "compare.json")]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["a"], ["a", "-i", "b"]])
def test_one_side_alone_is_refused(words, capsys):
    assert main(["compare", *words]) == 1

    assert "name a target and a golden dump, or a compare.json with -i" in capsys.readouterr().err


def test_the_baseline_is_that_of_the_rank_in_question(two_ranks):
    options = CompareOptions(baseline=(two_ranks / "a", two_ranks / "b"))

    _, one = compare(two_ranks / "a", two_ranks / "b")
    _, other = compare(two_ranks / "a", two_ranks / "b", options=options)
    assert len(one.blamed) == 1
    assert other.blamed == ()
    with pytest.raises(DumpError, match="the baseline has no dump of step0 rank0"):
        compare(RECORDED / "faulty", RECORDED / "sound", options=options)


def test_the_face_hands_out_both_functions():
    assert (trainermon.compare, trainermon.compare_distributed) == (compare, compare_distributed)


@pytest.mark.parametrize(("sides", "what"), [("step3/rank1", "rows"), ("", "dumps")])
def test_progress_is_told_of_dumps_and_within_a_single_one_of_rows(sides, what, two_ranks):
    told = []
    found = list(
        outcomes(
            two_ranks / "a" / sides,
            two_ranks / "b" / sides,
            None,
            options=CompareOptions(),
            report=lambda *one: told.append(one),
        )
    )

    assert told[0][2] == what
    assert told[-1] == (len(found), len(found), "dumps")


def test_a_file_that_is_no_dump_is_named(two_ranks, capsys):
    other = two_ranks / "b" / "broken.json"
    other.write_text("{}")

    assert main(["compare", str(two_ranks / "a"), str(other)]) == 1

    assert f"{other} is no dump: expected a file dump.json" in capsys.readouterr().err
