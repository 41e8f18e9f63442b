"""Dumps that mindstudio-probe recorded, compared by us: its rows and its numbers, and verdicts that name the cause."""

import csv
import math
from pathlib import Path

import pytest

from trainermon.analysis.compare import compare
from trainermon.analysis.compare.comparison import Mode
from trainermon.analysis.compare.output.tables import header, table

RECORDED = Path(__file__).with_name("recorded")
NUMBERS = ("Max diff", "Min diff", "Mean diff", "L2norm diff")
SHARES = ("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr")
STATISTICS = ("NPU max", "NPU min", "NPU mean", "NPU l2norm", "Bench max", "Bench min", "Bench mean", "Bench l2norm")


@pytest.fixture(scope="module")
def theirs():
    with (RECORDED / "faulty_against_sound.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def faulty():
    (comparison,) = compare(RECORDED / "faulty", RECORDED / "sound")
    return comparison


@pytest.fixture(scope="module")
def ours(faulty):
    return [dict(zip(header(faulty.mode), cells, strict=True)) for cells in table(faulty)]


def test_the_same_rows_are_paired_in_the_same_order(ours, theirs):
    pairs = [[(row["NPU Name"], row["Bench Name"]) for row in rows] for rows in (ours, theirs)]

    assert pairs[0] == pairs[1]


@pytest.mark.parametrize(
    "column",
    [
        name
        for name in header(Mode.STATISTICS)
        if name.startswith(("NPU Dt", "NPU Tensor", "NPU Re", "Bench ", "Requ")) and "nonfinite" not in name
    ],
)
def test_attributes_are_the_same(column, ours, theirs):
    assert [str(row[column]) for row in ours] == [row[column] for row in theirs]


@pytest.mark.parametrize("column", [*NUMBERS, *SHARES, *STATISTICS])
def test_numbers_are_the_same(column, ours, theirs):
    def number(value):
        text = str(value).removesuffix("%")
        return float(text) if text.replace("-", "").replace(".", "").replace("e", "").isdigit() else text

    different = [
        (mine["NPU Name"], mine[column], its[column])
        for mine, its in zip(ours, theirs, strict=True)
        if number(mine[column])
        != (pytest.approx(number(its[column])) if isinstance(number(its[column]), float) else number(its[column]))
    ]

    assert different == []


def test_what_it_finds_fault_with_is_found_here_and_called_the_same(ours, theirs):
    verdicts = {(its["Result"], mine["Result"]) for mine, its in zip(ours, theirs, strict=True)}

    assert {its for its, _ in verdicts} <= {"pass", "warning", "error"}
    assert ("warning", "warning") in verdicts
    assert not verdicts & {("warning", "pass"), ("error", "pass"), ("error", "warning")}


def test_only_the_module_in_which_the_fault_is_gets_the_blame(faulty):
    assert [call.key for call in faulty.blamed] == ["Module.layers.1.Block.forward.0"]
    assert faulty.call_counts()["error"] == 1


def test_what_follows_is_not_passed_over(faulty):
    result = {call.key: call.result for call in faulty.calls}

    assert result["Functional.linear.3.forward"] == "warning"
    assert result["Module.head.Linear.forward.0"] == "warning"
    assert result["Module.layers.0.Block.forward.0"] == "pass"
    assert result["Tensor.mul_.0.forward"] == "unmatched"


def test_a_nan_is_an_error_wherever_it_comes_to_and_blamed_where_it_began():
    (comparison,) = compare(RECORDED / "nan", RECORDED / "sound")

    assert [call.key for call in comparison.blamed] == ["Module.layers.1.Block.forward.0"]
    reached = [row for row in comparison.rows() if row.target and row.golden and row.target.nonfinite]
    assert reached
    assert all(row.result == "error" and math.isnan(row.difference.relative) for row in reached)


def test_a_dump_agrees_with_itself():
    (comparison,) = compare(RECORDED / "sound", RECORDED / "sound")

    assert comparison.row_counts() == {"pass": 246}


def test_the_golden_side_s_own_calls_are_listed_as_well():
    (comparison,) = compare(RECORDED / "sound", RECORDED / "faulty")

    only_golden = [call.key for call in comparison.calls if call.target is None]
    assert only_golden == ["Tensor.mul_.0.forward", "Tensor.mul_.0.backward"]
