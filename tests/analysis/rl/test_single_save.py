"""`SingleSave` and `SingleComparator`, against files and tables of msprobe's own."""

import json
import os
from fractions import Fraction
from pathlib import Path

import hypothesis.extra.numpy as arrays_of
import numpy as np
import openpyxl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainermon import SingleComparator, SingleSave
from trainermon.analysis.rl.stage_differences import compare_stages, differences
from trainermon.cli import main
from trainermon.core.errors import ConfigError, DumpError
from trainermon.rl.stages import StageRecorder, stage_files

# Written by mindstudio-probe 26.2.0: two runs of a step that differ in what their keys say, and its tables as JSON.
KINDS = Path(__file__).parents[2] / "recorded" / "single_save" / "kinds"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A process has one `SingleSave`; here every test has."""
    monkeypatch.setattr(SingleSave, "_instance", None)
    monkeypatch.setattr(SingleSave, "_said", set())


def save_the_kinds(folder, *, is_second):
    """Save what the recorded runs saved; see their keys."""
    recorded = {file[:5]: np.load(file.path) for file in stage_files(KINDS / "first")}
    x = torch.from_numpy(recorded["listed", 0, 0, 0, "0"])
    changed, nan = x.clone(), x.clone()
    if is_second:
        changed[1, 2] += 0.5
        nan[2, 2] = float("nan")
    SingleSave(folder)
    SingleSave.save({"changed": changed, "nan": nan, "scalar": torch.tensor(2.5 + is_second)})
    SingleSave.save({"shape": x[:, :3] if is_second else x, "flat": x.reshape(-1) if is_second else x})
    SingleSave.save({"nested": {"a": x, "b": changed}, "listed": [x, changed], "bf16": x.bfloat16(), "half": x.half()})
    SingleSave.save({"ids": torch.arange(6).reshape(2, 3) + is_second, "flag": x > 0})
    SingleSave.save_ex({"whole": changed})
    SingleSave.save_ex({"numbered": changed}, micro_batch=3)
    if not is_second:
        SingleSave.save({"gone": x})


def rows_of(path):
    return [list(row) for row in list(openpyxl.load_workbook(path).active.values)[1:]]


@pytest.mark.parametrize("side", ["first", "second"])
def test_files_lie_where_msprobe_puts_them_and_hold_the_same_numbers(tmp_path, side):
    save_the_kinds(tmp_path, is_second=side == "second")

    def files(folder):
        return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}

    ours, theirs = files(tmp_path), files(KINDS / side)
    assert ours.keys() == theirs.keys()
    for name, path in theirs.items():
        if name.endswith(".npy"):
            np.testing.assert_array_equal(np.load(ours[name]), np.load(path))
        else:
            one, other = (json.loads(each.read_text())["data"] for each in (ours[name], path))
            assert shapes_in(one) == shapes_in(other)


def shapes_in(described):
    if isinstance(described, dict) and "shape" not in described:
        return {name: shapes_in(each) for name, each in described.items()}
    return [shapes_in(each) for each in described] if isinstance(described, list) else described["shape"]


@pytest.mark.parametrize("writers", [("theirs", "theirs"), ("ours", "ours"), ("theirs", "ours")])
def test_tables_have_the_columns_and_figures_of_msprobe(tmp_path, monkeypatch, writers):
    folders = []
    for side, writer in zip(("first", "second"), writers, strict=True):
        folders.append(KINDS / side if writer == "theirs" else tmp_path / side)
        if writer == "ours":
            monkeypatch.setattr(SingleSave, "_instance", None)
            save_the_kinds(folders[-1], is_second=side == "second")

    first, second = folders
    found = SingleComparator.compare(first, second, output_path=tmp_path / "out", num_processes=2)

    expected = json.loads((KINDS / "expected.json").read_text())
    assert {path.stem for path in (tmp_path / "out").iterdir()} == expected.keys() - {"gone"}
    for key, rows in expected.items():
        if key in ("gone", "whole", "nested", "nan"):  # none there; not read by it; one of two; NaN is 0 there
            continue
        for row, their_row in zip(rows_of(tmp_path / "out" / f"{key}.xlsx"), rows, strict=True):
            assert row[:6] == their_row[:6]
            assert (row[7] is None) == (their_row[7] is None)
            ours, theirs = ([number or 0 for number in each] for each in (row[6:12], their_row[6:]))
            assert ours == pytest.approx(theirs, rel=1e-6), key
    assert [row[3] for row in rows_of(tmp_path / "out" / "nested.xlsx")] == ["a", "b"]
    assert [row[8] for row in rows_of(tmp_path / "out" / "nan.xlsx")] == ["nan"]
    assert [each.key for each in found.differing] == [
        "changed", "flat", "ids", "listed", "nan", "nested", "numbered", "scalar", "shape", "whole",
    ]  # fmt: skip
    assert found.only_first == ("gone of step 0, rank 0",)
    assert not found.is_equal


def test_steps_and_micro_steps_are_counted(tmp_path):
    SingleSave(tmp_path)
    for _ in range(2):
        SingleSave.save({"loss": torch.ones(())})
        SingleSave.save({"loss": torch.zeros(())})
        SingleSave.step()

    assert [(file.step, file.micro_step) for file in stage_files(tmp_path)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_settings_are_kept(tmp_path):
    SingleSave(tmp_path)
    SingleSave.save_config({"lr": 1e-3})

    assert json.loads((tmp_path / "configurations.json").read_text()) == {"lr": 1e-3}


def test_a_process_has_one(tmp_path, caplog):
    assert SingleSave(tmp_path / "a") is SingleSave(tmp_path / "b")
    assert f"{tmp_path / 'b'} is left empty" in caplog.text


def test_another_framework_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected 'pytorch' or 'mindspore'"):
        SingleSave(tmp_path, fmk="jax")


def test_the_rank_is_that_of_the_moment(tmp_path, monkeypatch):
    SingleSave(tmp_path)
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        SingleSave.save({"x": torch.ones(1)})

    assert sorted(file.rank for file in stage_files(tmp_path)) == [0, 3]


@pytest.mark.parametrize(
    "data",
    [
        "no mapping",
        {"text": "words"},
        {"up/..": torch.ones(1)},
        {"parts": {"../../up": torch.ones(1)}},
        {"twice": {"a": [torch.ones(1)], "a.0": torch.ones(1)}},
        {"object": [object()]},
        {"meta": torch.ones(2, device="meta")},
    ],
)
def test_what_cannot_be_saved_is_said_once_and_stops_nothing(tmp_path, caplog, data):
    SingleSave(tmp_path / "saved")
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        SingleSave.save(data)
        SingleSave.save_ex(data)

    assert [record.message.split(":")[1] for record in caplog.records] == [" save", " save_ex"]
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    SingleSave.save({**(data if isinstance(data, dict) else {}), "good": torch.ones(1)})
    assert [file.key for file in stage_files(tmp_path / "saved")] == ["good"]


def test_a_call_before_there_is_one_is_said_and_stops_nothing(caplog):
    SingleSave.save({"x": torch.ones(1)})
    SingleSave.step()

    assert caplog.text.count("make one first") == 2


def test_a_full_disk_stops_nothing(tmp_path, caplog):
    SingleSave(tmp_path)
    (tmp_path / "data").write_text("in the way")
    SingleSave.save({"x": torch.ones(1)})

    assert "it is left out" in caplog.text


def test_what_is_saved_is_not_changed_nor_kept_in_the_graph(tmp_path):
    SingleSave(tmp_path)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    SingleSave.save({"loss": loss, "conj": torch.tensor([1 + 2j]).conj(), "sub": torch.nn.Parameter(torch.ones(2))})
    loss.backward()

    stored = {file.key: np.load(file.path) for file in stage_files(tmp_path)}
    assert weight.grad.tolist() == [2, 2, 2]
    assert stored["loss"].shape == ()
    assert stored["conj"].tolist() == [1 - 2j]


def test_deeply_nested_values_keep_their_names(tmp_path):
    SingleSave(tmp_path)
    SingleSave.save({"batch": {"a": [torch.ones(1), {"b": torch.zeros(2)}]}})

    assert [file.part for file in stage_files(tmp_path)] == ["a.0", "a.1.b"]
    (described,) = tmp_path.rglob("*.json")
    assert shapes_in(json.loads(described.read_text())["data"]) == {"a": [[1], {"b": [2]}]}


def two(tmp_path, one, other):
    for folder, value in (("a", one), ("b", other)):
        StageRecorder(tmp_path / folder).save(value)
    return compare_stages(tmp_path / "a", tmp_path / "b")


def test_types_that_differ_are_named(tmp_path):
    found = two(tmp_path, {"ids": np.arange(3)}, {"ids": np.arange(3, dtype=np.float32)})

    assert found.is_equal
    assert found.sentence == (
        "The 1 array that both runs have is equal in value; of other types: 1 array, ids of step 0, rank 0 "
        "(int64 against float32)."
    )


def test_integers_that_one_float_stands_for_are_not_equal(tmp_path):
    found = two(tmp_path, {"ids": np.array([2**53])}, {"ids": np.array([2**53 + 1])})

    assert "9007199254740992 against 9007199254740993" in found.sentence
    assert found.arrays[0].max_abs == 1


def test_imaginary_parts_are_looked_at(tmp_path):
    found = two(tmp_path, {"x": np.array([1 + 2j])}, {"x": np.array([1 + 5j])})

    assert found.arrays[0].max_abs == 3


def test_what_one_run_lacks_is_in_the_first_line_and_in_the_exit_status(tmp_path, capsys):
    found = two(tmp_path, {"a": np.ones(1), "b": np.ones(1)}, {"a": np.ones(1)})

    assert found.sentence == (
        "The 1 array that both runs have is equal. Only in the first run: 1 array, b of step 0, rank 0."
    )
    assert main(["rl", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"]) == 3
    assert main(["rl", "compare", str(tmp_path / "b"), str(tmp_path / "b"), "--exit-code"]) == 0
    assert "The 1 array that both runs have is equal.\n" in capsys.readouterr().out


def test_runs_that_share_nothing_are_not_equal(tmp_path):
    found = two(tmp_path, {"a": np.ones(1)}, {"b": np.ones(1)})

    assert not found.is_equal
    assert found.sentence.startswith("Not one array could be compared. Only in the first run: 1 array, a of")


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-3], lambda raw: raw[:6], lambda _raw: b"", lambda raw: b"x" + raw]
)
def test_a_cut_off_file_is_named_and_the_others_are_compared(tmp_path, capsys, damage):
    two(tmp_path, {"reward": np.ones(2), "response": np.ones(4)}, {"reward": np.ones(2), "response": np.ones(4)})
    (file,) = (tmp_path / "a").rglob("reward.npy")
    file.write_bytes(damage(file.read_bytes()))

    found = compare_stages(tmp_path / "a", tmp_path / "b")

    assert [each.key for each in found.arrays] == ["response"]
    assert "Not compared: 1 array, " in found.sentence
    assert "reward.npy" in found.sentence
    assert main(["rl", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"]) == 3
    assert "not compared: " in capsys.readouterr().out


def test_pickled_arrays_are_not_opened(tmp_path):
    two(tmp_path, {"x": np.ones(1)}, {"x": np.ones(1)})
    (file,) = (tmp_path / "b").rglob("x.npy")
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)

    assert len(compare_stages(tmp_path / "a", tmp_path / "b").unread) == 1


def test_two_files_of_one_place_are_refused(tmp_path):
    recorder = StageRecorder(tmp_path)
    recorder.save_micro_step({"x": np.ones(1)}, None)
    recorder.save_micro_step({"x": np.zeros(1)}, 0)

    with pytest.raises(DumpError, match="expected one file of x of step 0, rank 0"):
        compare_stages(tmp_path, tmp_path)


def test_shapes_without_a_common_element_say_so(tmp_path):
    found = two(tmp_path, {"x": np.ones((3, 0))}, {"x": np.ones((3, 2))})

    assert "shape [3, 0] against [3, 2], with no element in common" in found.sentence


def test_numbers_of_a_scalar_are_shown(tmp_path):
    assert "rank 0: 1 against 2." in two(tmp_path, {"loss": np.float32(1)}, {"loss": np.float32(2)}).sentence
    assert os.listdir(tmp_path)


def exactly(value):
    return Fraction(value) if np.isfinite(value) else str(value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_difference_of_numbers_is_seen(data):
    kinds = st.sampled_from(["int64", "uint64", "int32", "uint8", "bool", "float16", "float32", "float64"])
    dtypes = data.draw(kinds), data.draw(kinds)
    if len({np.dtype(each).kind == "f" for each in dtypes}) > 1:
        dtypes = dtypes[0], dtypes[0]  # numpy rounds integers that it holds against floats
    shape = data.draw(arrays_of.array_shapes(min_dims=0, max_dims=2, max_side=3))
    one, other = (data.draw(arrays_of.arrays(each, shape)) for each in dtypes)

    found = differences(one, other)

    pairs = [(exactly(a), exactly(b)) for a, b in zip(one.ravel().tolist(), other.ravel().tolist(), strict=True)]
    assert found["equal"] == pytest.approx(sum(a == b for a, b in pairs) / max(1, len(pairs)))
    finite = [abs(a - b) for a, b in pairs if not isinstance(a, str) and not isinstance(b, str)]
    if len(finite) == len(pairs) and max(finite, default=0) < 1e300:
        assert found["max_abs"] == pytest.approx(float(max(finite, default=0)), rel=1e-6)
