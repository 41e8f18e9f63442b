"""Stages in files and their comparison, against files and figures of msprobe's SingleSave and SingleComparator."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trainermon.analysis.rl.stage_differences import compare_stages, differences
from trainermon.core.errors import DumpError
from trainermon.rl.stages import StageRecorder, stage_files, stored_stages

# Written by mindstudio-probe 26.2.0: two runs of two steps, the second with another response and log-probability.
RECORDED = Path(__file__).parents[2] / "recorded" / "single_save"


def test_the_figures_are_those_of_msprobe():
    found = compare_stages(RECORDED / "first", RECORDED / "second")

    by_key = {(each.key, each.step, each.rank, each.micro_step, each.part): each for each in found.arrays}
    expected = json.loads((RECORDED / "expected.json").read_text())
    checked = 0
    for key, rows in expected.items():
        for step, rank, micro_step, part, *_, same, first, max_abs, max_relative, thousandth, hundredth in rows:
            candidates = [
                each for place, each in by_key.items()
                if place[:4] == (key, step, rank, micro_step) and (place[4] == str(part) or not place[4].isdigit())
            ]  # fmt: skip
            (each,) = candidates
            flat = None if each.first is None else int(np.ravel_multi_index(each.first, each.shapes[0]))
            assert flat == (None if np.isnan(first) else int(first))
            assert each.equal * 100 == pytest.approx(same)
            assert each.max_abs == pytest.approx(max_abs)
            assert each.max_relative == pytest.approx(max_relative, rel=1e-5)
            within = each.within_thousandth * 100, each.within_hundredth * 100
            assert within == pytest.approx((thousandth, hundredth))
            checked += 1
    assert checked == len(found.arrays) == 12


def test_the_first_difference_is_said_in_the_order_of_a_step():
    assert compare_stages(RECORDED / "first", RECORDED / "second").sentence == (
        "The first difference is in response of step 1, rank 0: from token 5 of sample 2 on, 46 against 47; 4.2% of "
        "the elements differ; prompt, reward are equal."
    )


def test_our_files_are_those_of_msprobe(tmp_path):
    recorder = StageRecorder(tmp_path)
    theirs = {file[:5]: np.load(file.path) for file in stage_files(RECORDED / "first")}
    for step in range(2):
        recorder.step_number = step
        stage = {key: theirs[key, step, 0, 0, ""] for key in ("prompt", "response", "reward")}
        recorder.save({key: torch.from_numpy(value) for key, value in stage.items()})
        recorder.save({"log_prob": [torch.from_numpy(theirs["log_prob", step, 0, 0, part]) for part in "01"]})
        recorder.save({"log_prob": {"a": torch.from_numpy(theirs["log_prob", step, 0, 1, "a"])}})

    def files(folder):
        return {str(path.relative_to(folder)): path for path in folder.glob("data/**/*") if path.is_file()}

    ours, recorded = files(tmp_path), files(RECORDED / "first")
    assert ours.keys() == recorded.keys()
    for name, path in recorded.items():
        if name.endswith(".npy"):
            assert np.array_equal(np.load(path), np.load(ours[name]))
        else:
            one, other = (json.loads(each.read_text())["data"] for each in (path, ours[name]))
            assert json.dumps(shape_of(one)) == json.dumps(shape_of(other))
            assert numbers_of(one) == pytest.approx(numbers_of(other), rel=4e-3)  # theirs of bfloat16 are


def shape_of(value):
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [shape_of(each) for each in value]
    return (
        {key: shape_of(each) for key, each in value.items()}
        if isinstance(value, dict)
        else type(value).__name__ == "list"
    )


def numbers_of(value):
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers_of(value[key])]
    return [number for each in value for number in numbers_of(each)] if isinstance(value, list) else [float(value)]


def test_runs_with_equal_stages_are_equal():
    found = compare_stages(RECORDED / "first", RECORDED / "first")

    assert (found.sentence, found.differing) == ("All 12 arrays that both runs have are equal.", ())


def test_stages_of_one_run_alone_are_listed(tmp_path):
    for folder, keys in (("a", ("prompt", "reward")), ("b", ("prompt", "loss"))):
        StageRecorder(tmp_path / folder).save({key: np.ones(2) for key in keys})

    found = compare_stages(tmp_path / "a", tmp_path / "b")

    assert (found.only_first, found.only_second) == (("reward of step 0, rank 0",), ("loss of step 0, rank 0",))


def test_lengths_that_differ_are_compared_in_what_both_have(tmp_path):
    StageRecorder(tmp_path / "a").save({"response": np.arange(12).reshape(3, 4)})
    StageRecorder(tmp_path / "b").save({"response": np.arange(12).reshape(3, 4)[:, :3]})

    assert (
        "shape [3, 4] against [3, 3], equal in what both have"
        in compare_stages(tmp_path / "a", tmp_path / "b").sentence
    )


def test_nan_equals_nan_and_nothing_else():
    one, other = np.array([np.nan, 1.0, np.inf]), np.array([np.nan, np.nan, np.inf])

    found = differences(one, other)

    assert (found["equal"], found["first"]) == (pytest.approx(2 / 3), (1,))


def test_rows_steps_and_bytes_are_limited(tmp_path, caplog):
    recorder = StageRecorder(tmp_path, every=2, samples=2, quota_bytes=100)
    for step in range(6):
        recorder.step_number = step
        recorder.save({"reward": np.arange(5, dtype=np.float64)})

    stored = list(stage_files(tmp_path))
    assert [file.step for file in stored] == [0, 2, 4]
    assert np.load(stored[0].path).tolist() == [0, 1]
    recorder.step_number = 6
    recorder.save({"reward": np.zeros(100)})
    recorder.save({"reward": np.arange(100.0)[:, None] * np.ones(9)})
    assert caplog.text.count("reached their quota") == 1


def test_stages_are_given_back_step_by_step(tmp_path):
    recorder = StageRecorder(tmp_path)
    for step in range(11):
        recorder.step_number = step
        recorder.save({"prompt": np.full((2, 3), step), "response": [np.arange(step + 1), np.arange(12)]})

    found = list(stored_stages(tmp_path))

    assert [step for step, _ in found] == list(range(11))
    for step, stages in found:
        assert stages["prompt"].tolist() == [[step] * 3] * 2
        assert [each.tolist() for each in stages["response"]] == [list(range(step + 1)), list(range(12))]


@pytest.mark.parametrize("key", ["../up", "a/b", "", ".hidden"])
def test_keys_that_are_no_names_are_refused(tmp_path, key):
    with pytest.raises(ValueError, match="expected letters"):
        StageRecorder(tmp_path).save({key: np.ones(1)})


def test_what_is_no_array_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected arrays of numbers"):
        StageRecorder(tmp_path).save({"response": ["text", "more"]})


def test_a_folder_without_stages_is_refused(tmp_path):
    with pytest.raises(DumpError, match="expected the stages of a run"):
        compare_stages(tmp_path, RECORDED / "first")
