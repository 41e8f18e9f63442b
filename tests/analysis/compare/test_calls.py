"""`compare` and `compare_distributed` as msprobe's manuals call them, and its input files."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon import compare, compare_distributed
from trainermon.cli import main
from trainermon.core.errors import ConfigError

RECORDED = Path(__file__).with_name("recorded")
BLAMED = ["Module.layers.1.Block.forward.0"]


@pytest.fixture
def dumps(tmp_path, monkeypatch):
    """Two runs as the manuals lay them out, and the working folder above them."""
    monkeypatch.chdir(tmp_path)
    for name, side in (("dump_path0100", "faulty"), ("dump_path090", "sound")):
        shutil.copytree(RECORDED / side / "step0", tmp_path / name / "step4")
    return tmp_path


def of_files():
    folder = "./{}/step4/rank0/{}"
    return {
        "npu_path": folder.format("dump_path0100", "dump.json"),
        "bench_path": folder.format("dump_path090", "dump.json"),
        "stack_path": folder.format("dump_path0100", "stack.json"),
        "is_print_compare_log": True,
    }


def of_folders():
    return {
        "npu_path": "./dump_path0100/step4",
        "bench_path": "./dump_path090/step4",
        "stack_path": "./dump_path0100/step4",
        "is_print_compare_log": True,
    }


def of_old_names():
    return {key.replace("_path", "_json_path"): value for key, value in of_files().items()}


def names(folder):
    return sorted(path.name.split("_")[0] + path.suffix for path in Path(folder).iterdir())


@pytest.mark.parametrize("given", [of_files, of_folders, of_old_names])
@pytest.mark.parametrize("as_file", [False, True])
def test_msprobes_call_compares_and_writes(dumps, given, as_file):
    input_param = given()
    if as_file:
        Path("compare.json").write_text(json.dumps(given()))
        input_param = "./compare.json"

    (comparison,) = compare(input_param, output_path="./output", stack_mode=True)

    assert [call.key for call in comparison.blamed] == BLAMED
    assert names("output") == ["advisor.txt", "compare.csv", "compare.json"]


def test_both_paths_may_be_given_by_place_or_by_name(dumps):
    by_place = compare(of_files(), "one", auto_analyze=False)
    by_name = compare(input_param=of_files(), output_path="other", fuzzy_match=True, highlight=True)

    assert [one.row_counts() for one in by_place] == [one.row_counts() for one in by_name]
    assert names("one") == ["compare.csv", "compare.json"]
    assert names("other") == ["advisor.txt", "compare.csv", "compare.json", "compare.xlsx"]


@pytest.mark.parametrize(
    ("stack_mode", "has_stacks"), [({}, True), ({"stack_mode": True}, True), ({"stack_mode": False}, False)]
)
def test_stacks_stand_in_the_table_unless_they_shall_not(dumps, stack_mode, has_stacks):
    compare(of_files(), "out", **stack_mode)

    with next(Path("out").glob("*.csv")).open(newline="") as file:
        assert any("record_with_msprobe.py" in row["NPU_Stack_Info"] for row in csv.DictReader(file)) is has_stacks


def test_our_own_call_goes_on_as_before(dumps):
    (comparison,) = compare("dump_path0100", "dump_path090")
    (of_dump_files,) = compare("dump_path0100/step4/rank0/dump.json", "dump_path090/step4/rank0/dump.json")

    assert comparison.row_counts() == of_dump_files.row_counts()
    assert names(".") == ["dump", "dump"]


def test_msprobes_distributed_call_compares_every_rank(dumps):
    outcomes = compare_distributed("./dump_path0100/step4", "./dump_path090/step4", "./output", stack_mode=True)
    by_name = compare_distributed(
        npu_dump_dir="./dump_path0100/step4", bench_dump_dir="./dump_path090/step4", output_path="./other"
    )

    assert [one.blamed[0][0] for one in (*outcomes, *by_name)] == 2 * BLAMED
    assert names("output") == names("other") == ["advisor.txt", "compare.csv", "compare.json"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: compare(of_files(), "out", fuzzy=True),  # type: ignore[call-arg]
            "compare: unknown argument 'fuzzy'; did you mean 'fuzzy_match'",
        ),
        (lambda: compare({"npu_path": "a"}, "out"), "input_param does not name bench_path"),
        (lambda: compare({"npu_path": "a", "bench": "b"}, "out"), "bench: unknown key; did you mean"),
        (lambda: compare("dump_path0100"), "compare: name two dumps"),
        (lambda: compare("a", "b", input_param=of_files()), "found input_param and two dumps"),
        (lambda: compare_distributed("a"), "compare_distributed: name two folders"),
    ],
)
def test_a_wrong_call_is_told_what_is_missing(dumps, call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_the_command_takes_msprobes_switches_and_writes_where_it_does(dumps, capsys):
    Path("compare.json").write_text(json.dumps(of_folders()))

    assert main(["compare", "-i", "compare.json", "-s"]) == 0
    assert main(["compare", "-i", "compare.json", "-o", "elsewhere", "-s", "-c", "-hl", "-da", "-fm"]) == 0

    assert names("output") == ["advisor.txt", "compare.csv", "compare.json"]
    assert names("elsewhere") == ["compare.csv", "compare.json", "compare.xlsx"]
    assert "The first difference arose in Module.layers.1.Block.forward.0" in capsys.readouterr().out


def test_tables_of_tensors_say_as_of_old_whether_accuracy_was_reached(tmp_path):
    for side, last in (("a", 2.0), ("b", 3.0)):
        entry = forward(tensor(data_name="in.npy"), output=tensor(data_name="out.npy"))
        alone = {f"Functional.only_{side}.0.forward": entry}
        folder = write_dump(tmp_path / side, {"Functional.linear.0.forward": entry, **alone})
        (folder / "dump_tensor_data").mkdir()
        np.save(folder / "dump_tensor_data" / "in.npy", np.ones((2, 3), np.float32))
        np.save(folder / "dump_tensor_data" / "out.npy", np.array([[1, 1, 1], [1, 1, last]], np.float32))

    compare(tmp_path / "a", tmp_path / "b", output_path=tmp_path / "out")

    with next((tmp_path / "out").glob("*.csv")).open(newline="") as file:
        found = [(row["NPU Name"], row["Result"], row["Accuracy Reached or Not"]) for row in csv.DictReader(file)]
    assert found[:3] == [
        ("Functional.linear.0.forward.input.0", "pass", "Yes"),
        ("Functional.linear.0.forward.output.0", "error", "No"),
        ("Functional.only_a.0.forward.input.0", "unmatched", "Unmatched"),
    ]
