"""What `trainermon check run` prints of verdicts made by hand: how many, which, where, and what it left out."""

import csv
import json
import math

import pytest

from trainermon.accuracy.judge import Judgement, Status
from trainermon.accuracy.places import Place
from trainermon.analysis.check.checking import CallsCheck, CheckedCall
from trainermon.analysis.check.screen import described, headline, render_text
from trainermon.analysis.check.tables import write_files
from trainermon.core.errors import DumpError


def call(number, status=Status.PASS, reason="", *, line="", **values):
    judgement = Judgement(status=status, reason=reason, **values)
    return CheckedCall(key=f"Functional.linear.{number}.forward", judgements=(judgement,), line=line)


def skipped(number, reason):
    return CheckedCall(key=f"Functional.dropout.{number}.forward", skipped=reason)


def check_of(*calls):
    return CallsCheck(source="step0/rank0", calls=calls)


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ((), "no call to judge: none was recorded, or none is chosen (--only takes whole keys, as '*.linear.*')"),
        ((skipped(0, "it draws random numbers"),), "no call could be judged"),
        ((call(0), call(1), skipped(0, "x")), "all 2 forward calls are right"),
        ((call(0), call(1, Status.WARNING)), "none of 2 forward calls is wrong; 1 has a warning"),
        (
            (call(0), call(1, Status.ERROR), call(2, Status.WARNING)),
            "1 of 3 forward calls is wrong; first: Functional.linear.1.forward",
        ),
        (
            (call(3, Status.ERROR, line="train.py:88"), call(1, Status.ERROR)),
            "2 of 2 forward calls are wrong; first: Functional.linear.3.forward, train.py:88",
        ),
    ],
)
def test_the_headline_tells_the_worst_there_is(calls, text):
    assert headline(check_of(*calls)) == text


def test_a_wrong_call_is_told_with_excess_place_and_both_values():
    place = Place(kind="row", begin=(3, 0), end=(4, 8), number=8)
    wrong = call(
        0, Status.ERROR, "inexact", worst=12.44, index=(3, 7), device_value=0.51, golden_value=0.5, place=place
    )
    nan = call(1, Status.ERROR, "not finite", worst=math.inf, index=(0,), device_value=math.nan, golden_value=1 + 2j)
    shape = call(2, Status.ERROR, "its shape is [2], not [3]")

    assert described(wrong) == ("inexact: 12.4 × what is allowed at [3, 7]: 0.51, not 0.5; row [3, 0:8], 8 elements")
    assert described(nan) == "not finite: at [0]: nan, not 1+2j"
    assert described(shape) == "its shape is [2], not [3]"
    assert described(CheckedCall(key="Functional.item.0.forward")) == "it returned no tensor"


def test_errors_come_before_warnings_and_long_lists_are_cut_with_their_number():
    calls = [call(number, Status.WARNING, "coarse") for number in range(2)]
    calls += [call(number, Status.ERROR, "inexact") for number in range(12)]
    calls += [skipped(number, f"reason {number}") for number in range(8)]
    calls += [skipped(8, "reason 7"), skipped(9, "reason 5")]

    lines = render_text([check_of(*calls)]).splitlines()

    assert lines[:2] == [
        "step0/rank0",
        "  12 of 14 forward calls are wrong; first: Functional.linear.0.forward",
    ]
    assert [text.split()[0] for text in lines[2:12]] == ["error"] * 10
    assert lines[12] == "          and 2 more"
    assert [text.split()[0] for text in lines[13:15]] == ["warning"] * 2
    assert lines[15:] == [
        "  skipped 2: reason 5",
        "  skipped 2: reason 7",
        *(f"  skipped 1: reason {number}" for number in range(4)),
        "  skipped 2 for other reasons: see the csv file",
    ]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(DumpError, match=f"cannot write into {tmp_path / 'file' / 'out'}"):
        write_files(check_of(), tmp_path / "file" / "out", ["csv"], "now")


def test_a_reason_cannot_command_a_spreadsheet_and_a_complex_value_is_a_pair_in_json(tmp_path):
    wrong = call(0, Status.ERROR, "=cmd()", device_value=complex(math.nan, 2), golden_value=-math.inf)

    table, _details, document = write_files(check_of(wrong), tmp_path, ["csv", "json"], "now")

    with table.open(encoding="utf-8-sig", newline="") as file:
        assert list(csv.reader(file))[1] == ["Functional.linear.0", "error", "", "'=cmd()", ""]
    [output] = json.loads(document.read_text())["calls"][0]["outputs"]
    assert (output["device_value"], output["golden_value"]) == (["NaN", 2.0], "-Infinity")
    assert [path.name for path in (table, document)] == [
        "accuracy_checking_result_now.csv",
        "accuracy_checking_result_now.json",
    ]
