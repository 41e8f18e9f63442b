"""What the command says, held against numpy and torch."""

import json
import math
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
import torch

from trainermon.analysis.tensor import files
from trainermon.analysis.tensor.index import parse_index
from trainermon.cli import main
from trainermon.core.errors import DumpError
from trainermon.dump.debugger import PrecisionDebugger


@pytest.fixture(params=[7, 1 << 18], ids=["pieces", "whole"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", request.param)


def tensor(*words):
    assert main(["tensor", *map(str, words)]) == 0


def as_json(capsys, *words):
    tensor(*words, "--json")
    return json.loads(capsys.readouterr().out)


def save(path, values):
    np.save(path, values)
    return path


@pytest.fixture
def faulty(tmp_path):
    values = np.random.default_rng(0).normal(3, 2, size=(6, 5, 4)).astype(np.float32)
    values[1, 2, 3], values[4, 2, 0], values[5, 4, 1], values[0, 0, 0] = math.nan, math.inf, -math.inf, 0
    return save(tmp_path / "a.npy", values), values


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("index", ["", "1:5, 2, ::-1", "..., 3", "-1"])
def test_show_tells_counts_moments_and_positions_as_numpy_does(index, faulty, capsys):
    path, values = faulty

    found = as_json(capsys, "show", path, "-i", index)

    places = np.arange(values.size).reshape(values.shape)
    chosen, part = (values[eval(f"np.s_[{index or '...'}]")], places[eval(f"np.s_[{index or '...'}]")])
    finite = chosen[np.isfinite(chosen)].astype(np.float64)
    assert found["count"] == chosen.size
    assert found["nans"] == np.isnan(chosen).sum()
    assert found["positive_infs"] == (chosen == math.inf).sum()
    assert found["negative_infs"] == (chosen == -math.inf).sum()
    assert found["zeros"] == (chosen == 0).sum()
    assert [found["mean"], found["std"]] == pytest.approx([finite.mean(), finite.std()], rel=1e-12)
    assert [found["rms"], found["norm"]] == pytest.approx([math.sqrt((finite**2).mean()), np.linalg.norm(finite)])
    for name, value in (("min", finite.min()), ("max", finite.max())):
        assert found[name]["value"] == value
        assert values[tuple(found[name]["position"])] == np.float32(value)
    bad = [list(map(int, np.unravel_index(i, values.shape))) for i in part[~np.isfinite(chosen)].ravel()]
    assert [place["position"] for place in found["bad"]] == bad


def test_show_tells_over_which_indices_the_bad_elements_are_spread(tmp_path, capsys):
    values = np.ones((40, 6), np.float32)
    values[17] = math.nan

    tensor("show", save(tmp_path / "a.npy", values))

    text = capsys.readouterr().out
    assert "dim 0: 1 of 40 indices: 17" in text
    assert "dim 1: 6 of 6 indices, all of them" in text
    assert "at [13:21, :]" in text  # the values around the first of them


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "complex64", "bool", "int64"])
def test_show_reads_what_numpy_does_not_know(dtype, tmp_path, capsys):
    values = torch.tensor([[0, 1], [3, 5]]).to(getattr(torch, dtype))
    torch.save(values, tmp_path / "a.pt")

    found = as_json(capsys, "show", tmp_path / "a.pt")

    expected = values.to(torch.complex128).abs() if dtype == "complex64" else values.double()
    assert (found["dtype"], found["norm"]) == (dtype, pytest.approx(float(expected.norm())))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("1,2,3,4", "has 4 dimensions, the tensor has 3"),
        ("9", "position 9 in index '9' is outside of a dimension of 6"),
        ("x", "'x' in index 'x' is neither a number nor a slice"),
        ("__import__('os')", "is neither a number nor a slice"),
        ("1:2:3:4", "is neither a number nor a slice"),
        ("::0", "has a step of zero"),
        ("...,...", "more than one ..."),
        ("1,,2", "'' in index '1,,2' is neither"),
    ],
)
def test_an_index_that_is_none_is_refused(index, message, faulty, capsys):
    assert main(["tensor", "show", str(faulty[0]), "-i", index]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", ":", "-1", "1, ::-2", "..., 0, :", "0, ..., 1:3", "[2, 1, 3]", "5:2:-1", "3:3"])
def test_an_index_selects_what_numpy_selects(text):
    places = np.arange(120).reshape(6, 5, 4)

    part = parse_index(text, places.shape)

    chosen = places[part.index]
    np.testing.assert_array_equal(chosen, eval(f"places[{text.strip('[]') or '...'}]"))
    for position in np.ndindex(chosen.shape):
        assert places[part.whole(position)] == chosen[position]
    np.testing.assert_array_equal(places[parse_index(part.text, places.shape).index], chosen)


@pytest.mark.usefixtures("chunk")
def test_diff_finds_where_two_tensors_differ(tmp_path, capsys):
    theirs = np.random.default_rng(1).normal(size=(9, 5)).astype(np.float32)
    ours = theirs.copy()
    ours[2, 3] *= 1.5
    ours[7, 0] = math.nan
    ours[8, 4] += 1e-4
    paths = save(tmp_path / "a.npy", ours), save(tmp_path / "b.npy", theirs)

    found = as_json(capsys, "diff", *paths)
    loose = as_json(capsys, "diff", *paths, "--atol", "1e-3")

    assert found["differing"] == 3
    assert [extreme["position"] for extreme in found["first"]] == [[2, 3], [7, 0], [8, 4]]
    assert [extreme["position"] for extreme in found["largest"]] == [[7, 0], [2, 3], [8, 4]]
    assert (found["relative"], found["nonfinite"]) == ("NaN", [1, 0])
    a, b = (np.delete(values.astype(np.float64).ravel(), 35) for values in (ours, theirs))
    assert found["max_absolute"] == pytest.approx(abs(a - b).max())
    assert found["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-12)
    assert loose["differing"] == 2


def test_diff_of_types_parts_and_integers(tmp_path, capsys):
    torch.save(torch.tensor([1.0, 2.0]).bfloat16(), tmp_path / "a.pt")
    wide = save(tmp_path / "b.npy", np.array([[9.0, 1.0, 2.0]]))
    big = save(tmp_path / "c.npy", np.array([2**53, 5])), save(tmp_path / "d.npy", np.array([2**53 + 1, 5]))

    assert main(["tensor", "diff", str(tmp_path / "a.pt"), str(wide)]) == 1
    assert "a.pt is [2], b.npy is [1, 3]: expected one shape" in capsys.readouterr().err
    assert as_json(capsys, "diff", tmp_path / "a.pt", wide, "--other-index", "0, 1:")["differing"] == 0
    assert as_json(capsys, "diff", *big)["differing"] == 1


@pytest.mark.parametrize("words", [("show", "none"), ("diff", "a.npy", "none::x"), ("convert", "none", "b.npy")])
def test_a_path_that_is_not_there_is_refused_in_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a.npy", np.ones(2))

    assert main(["tensor", *words]) == 1

    message = "trainermon tensor: none does not exist: expected a tensor file, or a folder of them\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("words", [["--rtol", "nan"], ["--atol", "-1"], ["--atol", "inf"], ["--rtol", "x"]])
def test_a_tolerance_within_which_anything_is_equal_is_refused(words, tmp_path, capsys):
    torch.save(torch.ones(2), tmp_path / "a.pt")

    with pytest.raises(SystemExit):
        main(["tensor", "diff", str(tmp_path / "a.pt"), str(tmp_path / "a.pt"), *words])
    assert "is no finite number from 0 on" in capsys.readouterr().err


def test_diff_of_folders_pairs_files_by_name(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder / "rank0").mkdir(parents=True)
        save(tmp_path / folder / "rank0" / "same.npy", np.ones(3))
        save(tmp_path / folder / "rank0" / "other.npy", np.full(4, ord(folder)))
        save(tmp_path / folder / "rank0" / "shape.npy", np.ones(ord(folder)))
        save(tmp_path / folder / f"only_{folder}.npy", np.ones(1))

    tensor("diff", tmp_path / "a", tmp_path / "b")

    text = capsys.readouterr().out
    assert text.startswith("1 of 2 compared tensors differ; 2 on one side only, 1 of other shapes\n")
    assert "rank0/other.npy" in text
    assert "rank0/same.npy" not in text
    assert "other shape  rank0/shape.npy: [97] and [98]" in text
    assert f"only in {tmp_path / 'a'}: only_a.npy" in text
    assert f"only in {tmp_path / 'b'}: only_b.npy" in text


@pytest.mark.usefixtures("chunk")
def test_top_lists_the_largest_elements_in_order(faulty, capsys):
    path, values = faulty

    found = as_json(capsys, "top", path, "-n", 12, "-i", "1:")

    sizes = np.abs(np.where(np.isnan(values), math.inf, values))[1:].ravel()
    order = np.argsort(-sizes, kind="stable")[:12]
    expected = [[1 + place[0], *place[1:]] for place in (np.unravel_index(i, (5, 5, 4)) for i in order)]
    assert [extreme["position"] for extreme in found] == [list(map(int, place)) for place in expected]


@pytest.mark.usefixtures("chunk")
def test_top_of_two_lists_the_largest_differences(tmp_path, capsys):
    random = np.random.default_rng(2)
    ours, theirs = random.normal(size=(2, 30))
    theirs[11] = ours[11]

    found = as_json(capsys, "top", save(tmp_path / "a.npy", ours), save(tmp_path / "b.npy", theirs), "-n", 40)

    assert [extreme["position"][0] for extreme in found] == np.argsort(-abs(ours - theirs))[:29].tolist()
    assert found[0]["values"] == pytest.approx(
        [*(side[found[0]["position"][0]] for side in (ours, theirs)), abs(ours - theirs).max()]
    )


@pytest.mark.usefixtures("chunk")
def test_hist_counts_as_numpy_does(faulty, capsys):
    path, values = faulty

    found = as_json(capsys, "hist", path, "--bins", 9)

    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite.astype(np.float64), 9)
    assert found["counts"] == counts.tolist()
    assert found["edges"] == pytest.approx(edges.tolist())
    assert (found["nans"], found["infs"]) == (1, 2)


def test_hist_by_powers_of_two_tells_what_a_dtype_cuts_off(tmp_path, capsys):
    path = save(tmp_path / "a.npy", np.array([0, 1, 1.5, -2, 1e-6, 1e6, 5e-324, 1.7e308, math.nan]))

    found = as_json(capsys, "hist", path, "--log")
    tensor("hist", path, "--log")

    assert sum(found["counts"]) == 7
    assert (found["zeros"], found["nans"]) == (1, 1)
    bins = dict(zip(found["edges"], found["counts"], strict=False))
    assert {edge: count for edge, count in bins.items() if count} == {
        5e-324: 1, 2.0**-20: 1, 1: 2, 2: 1, 2.0**19: 1, 2.0**1023: 1,
    }  # fmt: skip
    assert "float16: 22.22% below its least normal number, 22.22% above its range" in capsys.readouterr().out


def test_hist_draws_an_svg_of_any_name(tmp_path):
    path = save(tmp_path / "a<script>&.npy", np.arange(50.0))

    tensor("hist", path, "--svg", tmp_path / "a.svg")

    drawing = ET.parse(tmp_path / "a.svg").getroot()
    assert any(text.text == "a<script>&.npy" for text in drawing.iter("{http://www.w3.org/2000/svg}text"))
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}rect"))) == 20


@pytest.mark.parametrize("values", [np.zeros(0), np.full(3, math.nan), np.full(3, 2.0), np.array(1.5)])
@pytest.mark.parametrize("action", ["show", "top", "hist", "hist --log"])
def test_odd_tensors_are_shown_too(action, values, tmp_path, capsys):
    tensor(*action.split(), save(tmp_path / "a.npy", values))

    assert capsys.readouterr().out


def dumped(folder, task):
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    with torch.no_grad():
        model[2].weight[1, 2] = math.inf
    debugger = PrecisionDebugger(dump_path=str(folder), task=task, level="L0")
    debugger.start(model)
    model(torch.ones(5, 3)).sum().backward()
    debugger.stop()
    debugger.close()
    return folder / "step0" / "rank0"


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_show_lists_a_dump_in_the_order_of_its_calls(task, tmp_path, capsys):
    place = dumped(tmp_path, task)

    tensor("show", place)
    lines = capsys.readouterr().out.splitlines()
    tensor("show", f"{place}::Linear.forward", "--nonfinite")
    bad = capsys.readouterr().out

    names = [line.split()[0].removesuffix(".pt") for line in lines[1:]]
    assert names[:3] == [
        f"Module.0.Linear.forward.0.{slot}" for slot in ("input.0", "parameters.weight", "parameters.bias")
    ]
    assert names.index("Module.0.Linear.forward.0.output.0") < names.index("Module.2.Linear.forward.0.output.0")
    assert bad.count("\n") == 3
    assert "Module.2.Linear.forward.0.parameters.weight" in bad
    assert "Module.2.Linear.forward.0.output.0" in bad


def test_diff_of_dumps_names_what_differs_without_their_folder_of_tensors(tmp_path, capsys):
    places = [dumped(tmp_path / name, "tensor") for name in ("a", "b")]
    name = "Module.2.Linear.forward.0.output.0.pt"
    torch.save(torch.full((5, 2), 7.0), places[0] / "dump_tensor_data" / name)

    tensor("diff", *places)

    assert f"\n  {name} " in capsys.readouterr().out


def test_show_tells_the_line_that_made_a_dumped_tensor(tmp_path, capsys):
    folder = dumped(tmp_path, "tensor") / "dump_tensor_data"

    for name in ("Module.2.Linear.forward.0.output.0.pt", "Module.2.Linear.backward.0.input.0.pt"):
        tensor("show", folder / name)

        assert f"called in  File {__file__}, line " in capsys.readouterr().out


def test_names_cannot_command_the_terminal(tmp_path, capsys):
    torch.save({"\x1b[2Jevil\n": torch.ones(2), "b": torch.ones(1)}, tmp_path / "a.pt")

    tensor("show", tmp_path / "a.pt")

    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert r"a.pt::\x1b[2Jevil\n" in text


def test_convert_writes_a_folder_in_another_format(tmp_path, capsys):
    (tmp_path / "in" / "rank1").mkdir(parents=True)
    torch.save(torch.ones(2).bfloat16(), tmp_path / "in" / "rank1" / "a.pt")
    torch.save({"x": torch.zeros(1), "../../y": torch.zeros(2)}, tmp_path / "in" / "b.pt")

    tensor("convert", tmp_path / "in", tmp_path / "out", "--to", "npy")

    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.npy"))
    assert written == ["out/b..._.._y.npy", "out/b.x.npy", "out/rank1/a.npy"]
    assert "float32[2], from bfloat16, exactly" in capsys.readouterr().out


def test_what_cannot_be_converted_leaves_nothing_behind(tmp_path):
    torch.save(torch.ones(2, dtype=torch.complex64), tmp_path / "a.pt")

    for words in (["a.pt", "b.npy", "--dtype", "float32"], ["a.pt", "b.npy", "--dtype", "bfloat16"], ["a.pt", "b.txt"]):
        assert main(["tensor", "convert", *(str(tmp_path / word) if "." in word else word for word in words)]) == 1

    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    with pytest.raises(DumpError):
        parse_index("x", (1,))


@pytest.mark.parametrize("count", ["0", "-1", "many", "1.5", "100001"])
def test_a_number_of_lines_that_is_none_is_refused(count, faulty, capsys):
    with pytest.raises(SystemExit):
        main(["tensor", "top", str(faulty[0]), f"-n={count}"])
    assert f"{count!r} is not a number from 1 to 100000" in capsys.readouterr().err


def test_what_lists_nothing_says_why(tmp_path, capsys):
    (tmp_path / "dump").mkdir()
    equal = save(tmp_path / "dump" / "a.npy", np.ones(2)), save(tmp_path / "dump" / "b.npy", np.ones(2))
    empty = save(tmp_path / "c.npy", np.ones(0))
    said = []
    for words in (("show", tmp_path / "dump", "--nonfinite"), ("top", *equal), ("top", empty)):
        tensor(*words)
        said.append(capsys.readouterr().out)

    assert said == ["every tensor is finite\n", "no element differs\n", "the tensor is empty\n"]


def test_a_list_as_json_has_the_numbers_of_each(tmp_path, capsys):
    save(tmp_path / "a.npy", np.array([3.0, 4.0]))
    save(tmp_path / "b.npy", np.array([1.0, np.inf]))

    found = as_json(capsys, "show", tmp_path)
    bad = as_json(capsys, "show", tmp_path, "--nonfinite")

    assert [(one["label"], one["norm"], one["positive_infs"]) for one in found] == [
        ("a.npy", 5.0, 0),
        ("b.npy", 1.0, 1),
    ]
    assert bad == found[1:]


def test_a_file_and_a_folder_are_no_pair(tmp_path, faulty, capsys):
    assert main(["tensor", "diff", str(faulty[0]), str(tmp_path)]) == 1
    assert f"{faulty[0]} and {tmp_path}: expected two files or two folders" in capsys.readouterr().err


def test_diff_of_folders_as_json_tells_pairs_and_what_has_none(tmp_path, capsys):
    for folder, other in (("a", 3.0), ("b", 5.0)):
        (tmp_path / folder).mkdir()
        save(tmp_path / folder / "x.npy", np.array([1.0, other]))
        save(tmp_path / folder / "shape.npy", np.ones(int(other)))
        save(tmp_path / folder / f"{folder}.npy", np.ones(1))

    found = as_json(capsys, "diff", tmp_path / "a", tmp_path / "b")

    [pair] = found["pairs"]
    assert (pair["differing"], pair["max_absolute"], pair["first"][0]["position"]) == (1, 2.0, [1])
    assert found["unmatched"] == [f"only in {tmp_path / 'a'}: a.npy", f"only in {tmp_path / 'b'}: b.npy"]
    assert found["shapes"] == ["shape.npy: [3] and [5]"]


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (lambda _: None, 0, "0 of 3 tensors differ\n"),
        (lambda folder: (folder / "x.npy").unlink(), 4, "0 of 2 compared tensors differ; 1 on one side only\n"),
        (lambda folder: (folder / "x.npy").write_bytes(b"junk"), 4, "0 of 2 compared tensors differ; 1 not read\n"),
        (lambda folder: save(folder / "x.npy", np.ones(2)), 3, "0 of 2 compared tensors differ; 1 of other shapes\n"),
        (lambda folder: save(folder / "x.npy", np.ones(3) + 1), 3, "1 of 3 tensors differ\n"),
    ],
)
def test_what_was_not_compared_is_not_counted_as_equal(change, status, said, tmp_path, capsys):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        for name in "xyz":
            save(tmp_path / folder / f"{name}.npy", np.ones(3))
    change(tmp_path / "b")

    words = ["tensor", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"]
    assert main(words) == status

    assert capsys.readouterr().out.startswith(said)
    assert main([*words, "--json"]) == status


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (2.0, 3)])
def test_the_status_tells_whether_two_tensors_differ(value, status, tmp_path):
    save(tmp_path / "a.npy", np.ones(3))
    save(tmp_path / "b.npy", np.full(3, value))

    assert main(["tensor", "diff", str(tmp_path / "a.npy"), str(tmp_path / "b.npy"), "--exit-code"]) == status


def test_diff_of_equal_folders_lists_no_tensor(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        torch.save({"x": torch.ones(2), "y": torch.ones(1)}, tmp_path / folder / "state.pt")

    tensor("diff", tmp_path / "a", tmp_path / "b")

    assert capsys.readouterr().out == "0 of 2 tensors differ\n"


@pytest.mark.parametrize("words", [("show", "a"), ("show", "a", "--nonfinite"), ("diff", "a", "a")])
def test_an_index_into_many_tensors_is_refused(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    for name in ("x", "y"):
        save(tmp_path / "a" / f"{name}.npy", np.ones(3))

    assert main(["tensor", *words, "-i", "0"]) == 1
    assert "an index chooses a part of one tensor, a is a list: name one, as PATH::NAME" in capsys.readouterr().err


def test_hist_of_a_part_counts_that_part(faulty, capsys):
    path, values = faulty

    found = as_json(capsys, "hist", path, "-i", "2", "--bins", 4)

    assert found["counts"] == np.histogram(values[2].astype(np.float64), 4)[0].tolist()


def test_a_complex_element_is_a_list_of_two_in_json(tmp_path, capsys):
    path = save(tmp_path / "a.npy", np.array([1 + 1j, 3 - 4j, complex(math.inf, 0)]))

    found = as_json(capsys, "top", path)

    assert [extreme["values"][0] for extreme in found] == [["Infinity", 0.0], [3.0, -4.0], [1.0, 1.0]]


def test_a_name_that_fits_nothing_or_too_much_says_what_to_write(tmp_path, capsys):
    torch.save({"q.weight": torch.ones(1), "k.weight": torch.ones(1)}, tmp_path / "a.pt")
    statistics = dumped(tmp_path / "dump", "statistics")

    for target, message in [
        (f"{tmp_path / 'a.pt'}::bias", "holds no tensor named like 'bias'; without ::bias all are shown"),
        (f"{tmp_path / 'a.pt'}::weight", "several tensors that fit, a.pt::q.weight and a.pt::k.weight among them"),
        (statistics, "holds no tensor file: the dump has statistics only; dump with task tensor"),
    ]:
        assert main(["tensor", "hist", str(target)]) == 1
        assert message in capsys.readouterr().err
    assert as_json(capsys, "hist", f"{tmp_path / 'a.pt'}::q.w")["counts"]


def test_a_file_that_its_dump_does_not_know_is_shown_without_a_line_of_code(tmp_path, capsys):
    folder = dumped(tmp_path, "tensor") / "dump_tensor_data"
    torch.save(torch.ones(2), folder / "stray.pt")

    tensor("show", folder / "stray.pt")

    assert "called in" not in capsys.readouterr().out
