"""`advisor_*.txt`: the line of the table, the row to look at, and advice that fits its place and its operation."""

import csv
import re
from pathlib import Path

import pytest

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.compare import compare
from trainermon.cli import main

RECORDED = Path(__file__).parents[1] / "recorded"


def read(folder):
    (path,) = folder.glob("advisor_*.txt")
    return path.read_text(encoding="utf-8")


def pair(tmp_path, name, *, given=(1.0, 1.0), gave=(2.0, 3.0)):
    """Write two dumps of one call that were given and gave these values, and return the advice on them."""
    for side, given_value, gave_value in zip("ab", given, gave, strict=True):
        call = forward(tensor(value=given_value), output=tensor(value=gave_value))
        write_dump(tmp_path / side, {f"{name}.forward": call})
    compare(tmp_path / "a", tmp_path / "b", output_path=tmp_path / "out")
    return read(tmp_path / "out")


def test_the_line_is_that_of_the_suspect_in_the_table(tmp_path):
    (comparison,) = compare(RECORDED / "faulty", RECORDED / "sound", output_path=tmp_path)

    found = re.match(r"Line: (\d+)\nSuspect Nodes: (.+)\nExpert Advice: Equal inputs gave unequal", read(tmp_path))
    with next(tmp_path.glob("*.csv")).open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[int(found[1]) - 1][0] == found[2]
    assert found[2].startswith(comparison.blamed[0].key)
    assert rows[int(found[1]) - 1][rows[0].index("Result")] == "error"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Functional.layer_norm.0", "Its sums are taken in an order"),
        ("Functional.conv2d.0", "Its sums are taken in an order"),
        ("Torch.matmul.0", "Its sums are taken in an order"),
        ("Functional.batch_norm.0", "Batch normalisation"),
        ("Functional.dropout.0", "It draws random numbers"),
        ("Functional.scaled_dot_product_attention.0", "Fused attention"),
        ("Distributed.all_reduce.0", "A collective"),
        ("Functional.softmax.0", "An elementary function"),
    ],
)
def test_advice_goes_by_the_class_of_the_operation(tmp_path, name, words):
    text = pair(tmp_path, name)

    assert f"Suspect Nodes: {name}.forward.output.0" in text
    assert "the difference arose in this call" in text
    assert words in text


@pytest.mark.parametrize("name", ["Tensor.expand.0", "Tensor.view.0", "Functional.normalize.0", "Functional.pad.0"])
def test_an_operation_without_a_class_gets_none(tmp_path, name):
    text = pair(tmp_path, name)

    assert text.count(". ") == 1
    assert "task tensor" in text


def test_a_difference_that_came_in_is_looked_for_before(tmp_path):
    text = pair(tmp_path, "Functional.layer_norm.0", given=(1.0, 2.0), gave=(2.0, 2.5))

    assert "Suspect Nodes: Functional.layer_norm.0.forward.input.0" in text
    assert "What went in differs already" in text
    assert "order" not in text


def test_a_value_that_is_not_finite_on_one_side_is_no_matter_of_rounding(tmp_path):
    text = pair(tmp_path, "Functional.layer_norm.0", gave=(float("nan"), 2.0))

    assert "A value is NaN or Inf on one side only" in text


def test_where_nothing_differs_the_advice_is_to_look_elsewhere(tmp_path):
    text = pair(tmp_path, "Functional.layer_norm.0", gave=(2.0, 2.0))

    assert text.startswith("Line: None\nSuspect Nodes: None\nExpert Advice: No row differs")


def test_the_command_writes_it_beside_its_files_unless_it_shall_not(tmp_path, capsys):
    sides = [str(RECORDED / "faulty"), str(RECORDED / "sound")]

    main(["compare", *sides, "-o", str(tmp_path / "with")])
    main(["compare", *sides, "-o", str(tmp_path / "without"), "-c"])

    assert read(tmp_path / "with").startswith("Line: ")
    assert not list((tmp_path / "without").glob("advisor*"))
    assert "advisor_step0_rank0_" in capsys.readouterr().out


def test_a_call_that_was_given_another_argument_by_the_code_around_it_is_what_to_look_at(tmp_path, capsys):
    module, function = "Module.act.GELU.forward.0", "Functional.gelu.0.forward"
    for side, mode in (("a", "tanh"), ("b", "none")):
        call = forward(tensor(), output=tensor(), approximate={"type": "str", "value": mode})
        data = {function: call, module: forward(tensor(), output=tensor())}
        write_dump(tmp_path / side, data, construct={function: module, module: None})

    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "out")]) == 0

    said = capsys.readouterr().out
    assert f"{function} in act (GELU) was given tanh, where the golden dump has none (input.approximate)" in said
    assert "inf" not in said.split("wrote")[0].replace(str(tmp_path), "")
    assert f"Suspect Nodes: {function}.input.approximate\nExpert Advice: The code around this call" in read(
        tmp_path / "out"
    )
