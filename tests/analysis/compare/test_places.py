"""Which dumps are found below a folder, and which are compared; several ranks at once."""

import json
import os
import shutil
from pathlib import Path

import pytest

from trainermon.analysis.compare import compare, compare_distributed
from trainermon.analysis.compare.places import find_places, pair_places
from trainermon.cli import main
from trainermon.monitor.errors import DumpError

RECORDED = Path(__file__).with_name("recorded")


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


def test_what_does_not_belong_together_is_refused(two_ranks):
    for old, new in (("rank0", "rank10"), ("rank1", "rank11")):
        os.rename(two_ranks / "b/step3" / old, two_ranks / "b/step3" / new)

    with pytest.raises(DumpError, match=r"step3 rank0, step3 rank1.*step3 rank10"):
        compare(two_ranks / "a", two_ranks / "b")


def test_the_faulty_rank_is_named(two_ranks, capsys):
    assert main(["compare", str(two_ranks / "a"), str(two_ranks / "b")]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["step3", "rank1"]
    assert "Module.layers.1.Block.forward.0" in lines[4]


@pytest.mark.parametrize("cores", [1, 2])
def test_every_rank_gets_its_files_in_one_process_and_in_several(cores, two_ranks, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))

    outcomes = compare_distributed(two_ranks / "a", two_ranks / "b", two_ranks / "out")
    assert [outcome.label for outcome in outcomes] == ["step3 rank0", "step3 rank1"]
    assert [len(outcome.blamed) for outcome in outcomes] == [0, 1]
    assert sorted(path.suffix for outcome in outcomes for path in outcome.files) == [".csv", ".csv", ".json", ".json"]


def test_a_dump_cut_off_by_a_killed_process_is_compared(tmp_path):
    folder = tmp_path / "rank0"
    folder.mkdir()
    data = json.loads((RECORDED / "faulty/step0/rank0/dump.json").read_text())["data"]
    lines = [json.dumps({"info": {}, "task": "statistics", "level": "mix"})]
    lines += [json.dumps({"key": key, "value": value}) for key, value in data.items()]
    (folder / "dump.partial.jsonl").write_text("\n".join(lines[:30]) + '\n{"key": "torn')

    (comparison,) = compare(folder, RECORDED / "sound")
    assert sum(call.target is not None for call in comparison.calls) == 29


def test_a_missing_backward_call_shifts_the_numbers_of_those_after_it(tmp_path):
    gap = put("sound", tmp_path / "rank0")
    dump = json.loads((gap / "dump.json").read_text())
    del dump["data"]["Tensor.__rmul__.1.backward"]
    (gap / "dump.json").write_text(json.dumps(dump))

    (comparison,) = compare(RECORDED / "sound", gap)
    partners = {call.target.key: call.golden.key for call in comparison.calls if call.target and call.golden}
    assert partners["Tensor.__rmul__.1.backward"] == "Tensor.__rmul__.0.backward"
