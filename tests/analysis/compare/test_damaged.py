"""Dumps that are damaged, or made to do harm: one clear line, and the other ranks are compared all the same."""

import json
import shutil

import numpy as np
import pytest

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.analysis.damaged_dumps import CALL, SEEN, run_of, without_folder
from tests.analysis.damaged_dumps import whole as good
from trainermon.analysis.compare import distributed
from trainermon.cli import main


@pytest.fixture
def in_one_process(monkeypatch):
    monkeypatch.setattr(distributed, "num_cores", lambda: 1)


@pytest.mark.parametrize("links", [{"a": "a"}, {"a": "b", "b": "c", "c": "a"}, {CALL: "b", "b": "c", "c": "b"}])
def test_a_call_that_is_said_to_enclose_itself_is_refused(links, tmp_path, capsys):
    data = {CALL: forward(tensor(), output=tensor())}
    target, golden = write_dump(tmp_path / "a", data, construct=links), good(tmp_path / "b")

    assert main(["compare", str(target), str(golden)]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert "construct.json" in line
    assert "enclose itself" in line


def test_calls_within_one_another_at_any_depth_are_no_cycle(tmp_path):
    deep = {f"Module.m.{n}.M.forward.0": f"Module.m.{n + 1}.M.forward.0" for n in range(3000)}
    data = {CALL: forward(tensor(), output=tensor())}
    target = write_dump(tmp_path / "a", data, construct=deep | {CALL: "Module.m.0.M.forward.0"})

    assert main(["compare", str(target), str(good(tmp_path / "b")), "--exit-code"]) == 0


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 64, b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", b"\x02\x00\x00\x00\x00\x00\x00\x00{}"]
)
@pytest.mark.parametrize("ending", ["safetensors", "pt", "npy"])
def test_a_damaged_file_of_a_tensor_is_named_in_one_line(content, ending, tmp_path, capsys):
    for side in "ab":
        stored = tensor(shape=(3,), data_name=f"x.{ending}")
        folder = write_dump(tmp_path / side, {CALL: forward(tensor(), output=stored)}) / "dump_tensor_data"
        folder.mkdir()
        (folder / f"x.{ending}").write_bytes(content)

    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"]) == 4

    assert f"x.{ending} is not a tensor file" in capsys.readouterr().out.partition("\n")[0]


STORED = np.ones((8, 8), np.float32)


def several(folder, stored=STORED):
    """A dump of three calls with the files of their results; that of the second is given, None: it is missing."""
    data = {
        f"Functional.relu.{n}.forward": forward(tensor(), output=tensor(shape=(8, 8), data_name=f"{n}.npy"))
        for n in range(3)
    }
    files = write_dump(folder, data) / "dump_tensor_data"
    files.mkdir()
    for n in range(3):
        if n != 1 or stored is not None:
            np.save(files / f"{n}.npy", stored if n == 1 else STORED)
    return str(folder)


@pytest.mark.parametrize("target_first", [True, False])
@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (STORED.reshape(4, 16), "1.npy holds float32 [4, 16], where dump.json says float32 [8, 8]"),
        (STORED.astype(np.float64), "1.npy holds float64 [8, 8], where dump.json says float32 [8, 8]"),
        (STORED[:4], "1.npy holds float32 [4, 8], where dump.json says float32 [8, 8]"),
        (None, "1.npy is missing"),
    ],
)
def test_a_file_that_is_not_what_its_dump_says_is_named_and_the_rest_compared(
    stored, said, target_first, tmp_path, capsys
):
    sides = [several(tmp_path / "a", stored), several(tmp_path / "b")]

    assert main(["compare", *(sides if target_first else sides[::-1]), "--exit-code"]) == 4

    first = capsys.readouterr().out.partition("\n")[0]
    assert first.startswith("The dumps agree as far as they go: 5 rows")
    assert "1 tensor was not compared" in first
    assert said in first


def test_a_difference_beside_a_missing_file_is_found_and_both_are_named(tmp_path, capsys):
    sides = [several(tmp_path / "a", None), several(tmp_path / "b")]
    np.save(tmp_path / "a" / "dump_tensor_data" / "2.npy", STORED * 2)

    assert main(["compare", *sides, "--exit-code"]) == 3

    first = capsys.readouterr().out.partition("\n")[0]
    assert "Functional.relu.2.forward" in first
    assert "1.npy is missing" in first


def test_two_files_of_the_same_other_form_are_compared(tmp_path, capsys):
    """As of a dtype that a framework cannot write."""
    sides = [several(tmp_path / side, STORED.astype(np.float64)) for side in "ab"]

    assert main(["compare", *sides, "--exit-code"]) == 0
    assert capsys.readouterr().out.startswith("The dumps agree: ")


@pytest.mark.parametrize("text", ["{}", '{"data": 3}', "[", ""])
def test_a_damaged_rank_does_not_keep_the_others_from_being_compared(text, tmp_path, capsys):
    for side, value in (("a", 1.5), ("b", 1.0)):
        for rank in range(3):
            good(tmp_path / side / "step0" / f"rank{rank}", value=value if rank == 2 else 1.0)
    (tmp_path / "a" / "step0" / "rank1" / "dump.json").write_text(text)

    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"]) == 3

    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step0 rank1") and line.endswith("not compared") for line in lines)
    assert lines[0].startswith(f"Step 0, rank 2: the first difference arose in {CALL}")


def test_what_cannot_be_compared_is_unknown_and_said(tmp_path, capsys):
    for side in "ab":
        for rank in range(2):
            good(tmp_path / side / "step0" / f"rank{rank}")
    (tmp_path / "b" / "step0" / "rank1" / "dump.json").write_text("{}")

    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"]) == 4
    assert 'has no "data" object' in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code", "--json"]) == 4
    failures = [document.get("failure", "") for document in json.loads(capsys.readouterr().out)]
    assert ['has no "data" object' in failure for failure in failures] == [False, True]


@pytest.mark.parametrize("words", [[], ["--json"]])
@pytest.mark.parametrize(
    "rank", [{CALL: {}}, {CALL: {}, "Functional.relu.0.forward": {}}, {"Functional.relu.0.forward": {}}]
)
def test_calls_that_one_side_alone_has_leave_the_exit_status_unknown(rank, words, tmp_path):
    """The first rank agrees; the other has the calls of the golden dump, one more, or another one."""
    for side, names in (("a", rank), ("b", {CALL: {}})):
        good(tmp_path / side / "step0" / "rank0")
        calls = {name: forward(tensor(), output=tensor()) for name in names}
        write_dump(tmp_path / side / "step0" / "rank1", calls)

    status = main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code", *words])

    assert status == (0 if rank == {CALL: {}} else 4)


@pytest.mark.parametrize("command", ["compare", "graph", "source"])
@pytest.mark.parametrize("sides", ["a", "b", "ab"])
@pytest.mark.parametrize("lose", [without_folder, *SEEN])
@pytest.mark.usefixtures("in_one_process")
def test_what_is_missing_is_said_in_the_first_line_and_by_the_status(lose, sides, command, tmp_path, capsys):
    target, golden = (run_of(tmp_path / side) for side in "ab")
    words = [command, str(target), str(golden), "--exit-code"]
    assert main(words) == 0
    for side in sides:
        lose(tmp_path / side / "step0" / "rank1")
    if lose is without_folder and sides == "ab":
        return  # nothing tells that there was one
    capsys.readouterr()

    assert main(words) == 4

    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("Step 0, rank 1: ")
    assert any(
        word in first for word in ("as far as they go", "not compared", "not judged", "no dump", "nothing could")
    )
    assert main([*words, "--json"]) == 4


@pytest.mark.parametrize("command", ["graph", "source"])
@pytest.mark.parametrize("lose", SEEN)
def test_what_is_missing_of_dumps_without_a_golden_one_is_said(lose, command, tmp_path, capsys):
    target = run_of(tmp_path / "a")
    assert main([command, str(target), "--exit-code"]) == 0
    lose(target / "step0" / "rank1")
    capsys.readouterr()

    assert main([command, str(target), "--exit-code"]) == 4

    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("Step 0, rank 1: ")
    assert any(word in first for word in ("not whole", "holds no dump", "no call was dumped", "no statistics"))


@pytest.mark.parametrize("command", ["compare", "graph"])
def test_a_difference_counts_more_than_what_is_missing(command, tmp_path):
    target, golden = (run_of(tmp_path / side) for side in "ab")
    without_folder(target / "step0" / "rank1")
    shutil.rmtree(golden / "step0" / "rank0")
    good(golden / "step0" / "rank0", value=1.5)

    assert main([command, str(target), str(golden), "--exit-code"]) == 3


@pytest.mark.parametrize("empty", ["a", "b"])
def test_a_dump_without_calls_is_named(empty, tmp_path, capsys):
    for side in "ab":
        write_dump(tmp_path / side, {} if side == empty else {CALL: forward(tensor(), output=tensor())})

    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"]) == 4
    assert f"Nothing could be compared: no call was dumped in {tmp_path / empty}." in capsys.readouterr().out


def mask(dtype):
    return np.finfo(dtype).min


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("mode", ["statistics", "tensor"])
@pytest.mark.parametrize("dtypes", [(np.float64, np.float32), (np.float32, np.float16), (np.float16, np.float64)])
def test_the_least_number_of_each_type_is_the_same_mask(dtypes, mode, counted, tmp_path, capsys):
    for side, dtype in zip("ab", dtypes, strict=True):
        values = np.array([0.0, 1.0, mask(dtype), mask(dtype)], dtype)
        with np.errstate(over="ignore"):
            wide = values.astype(np.float64)
            numbers = {
                "Max": 1.0,
                "Min": float(mask(dtype)),
                "Mean": float(wide.mean()),
                "Norm": float(np.linalg.norm(wide)),
            }
        numbers |= {"nans": 0, "infs": 0} if counted else {}
        form = tensor(f"torch.{np.dtype(dtype)}", (4,), data_name="x.npy") | numbers
        folder = write_dump(tmp_path / side, {"Functional.relu.0.forward": forward(tensor(), output=form)})
        (folder / "dump_tensor_data").mkdir()
        np.save(folder / "dump_tensor_data" / "x.npy", values)

    main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--mode", mode, "--json"])

    (document,) = json.loads(capsys.readouterr().out)
    assert document["blamed"] == []
    messages = [message for call in document["results"] for row in call.get("rows", []) for message in row["messages"]]
    assert not any("NaN" in message or "differs" in message for message in messages)
