"""The csv file of details: msprobe's columns as it writes them, and ours behind."""

import csv

import torch
from torch import nn

from tests.analysis.check.test_check import dumped
from trainermon import PrecisionDebugger
from trainermon.accuracy.judge import Status
from trainermon.accuracy.rules import ChosenRules, Rules
from trainermon.analysis.check.checking import CallsCheck, CheckedCall, check_dump, dumps_below
from trainermon.analysis.check.details import BLANK, LEGACY_COLUMNS, OWN_COLUMNS, safe_cell, write_details
from trainermon.cli import main


def written(folder):
    [path] = folder.glob("accuracy_checking_details_*.csv")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def one_nan(numbers):
    numbers[5] = torch.nan


def test_a_run_writes_a_row_for_each_result(tmp_path):
    folder, out = dumped(tmp_path / "dump", alter=one_nan), tmp_path / "out"

    assert main(["check", "run", str(folder), "-o", str(out)]) == 0
    rows = written(out)

    assert list(rows[0]) == [*LEGACY_COLUMNS, *OWN_COLUMNS]
    first = rows[0]
    assert (first["API Name"], first["Bench Dtype"]) == ("Functional.linear.0.forward.output.0", "torch.float64")
    assert (first["DEVICE Dtype"], first["Shape"]) == ("torch.float32", "(16, 64)")
    assert (first["Status"], first["Reason"], first["NaN/Inf Device"]) == ("error", "not finite", "1")
    assert (first["余弦相似度"], first["双百指标"], first["相对误差错误率"]) == ("nan", BLANK, BLANK)
    assert first["Worst Index"] == "[0, 5]"
    assert first["Origin"].startswith("test_check.py:")
    assert len(rows[1]["均方根误差"].partition(".")[2]) == 14


def test_the_rules_of_msprobe_pass_what_ours_do_not(tmp_path):
    def double_small(numbers):
        numbers.mul_(1.0004)

    folder = dumped(tmp_path / "dump", alter=double_small)

    assert main(["check", "run", str(folder), "--exit-code"]) == 3
    assert main(["check", "run", str(folder), "--exit-code", "--rules", "msprobe"]) == 0
    assert main(["check", "run", str(folder), "-o", str(tmp_path / "out"), "--rules", "msprobe8"]) == 0
    assert written(tmp_path / "out")[0]["ULP误差平均值"] != BLANK


def test_msprobes_golden_result_is_of_the_numbers_as_written(tmp_path):
    """26.2.0 has a warning for this call: -1e9 is 1 755 648 off the next number of bfloat16."""
    debugger = PrecisionDebugger(dump_path=str(tmp_path), task="tensor", level="L1")
    debugger.start(nn.Linear(1, 1))
    torch.randn(16, 16).bfloat16().masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -1e9)
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    [folder] = dumps_below(tmp_path)

    words = {}
    for rules in (Rules.TRAINERMON, Rules.MSPROBE):
        check = check_dump(folder, wanted=lambda key: "masked_fill" in key, rules=ChosenRules(rules))
        [words[rules]] = check.calls[0].judgements
    legacy = words[Rules.MSPROBE].legacy

    assert (words[Rules.TRAINERMON].status, words[Rules.MSPROBE].status) == (Status.PASS, Status.WARNING)
    assert legacy is not None
    assert legacy.metrics.max_absolute == 1755648


def test_a_call_that_was_not_judged_has_a_row_of_blanks(tmp_path):
    call = CheckedCall(key="Functional.dropout.0.forward", skipped="=random", line="=1+1")

    write_details(CallsCheck(source="", calls=(call,)), tmp_path / "details.csv")
    header, row = csv.reader((tmp_path / "details.csv").read_text(encoding="utf-8-sig").splitlines())
    cells = dict(zip(header, row, strict=True))

    assert cells["API Name"] == "Functional.dropout.0.forward.output.0"
    assert (cells["Status"], cells["Message"], cells["Origin"]) == ("SKIP", "'=random", "'=1+1")
    assert (cells["DEVICE Dtype"], cells["msprobe Status"]) == (BLANK, BLANK)


def test_rows_of_a_backward_stand_behind_those_of_its_forward(tmp_path):
    keys = [f"Functional.relu.{n}.{direction}" for direction in ("forward", "backward") for n in (0, 1)]
    calls = tuple(CheckedCall(key=key, skipped="random") for key in keys)

    write_details(CallsCheck(source="", calls=calls), tmp_path / "details.csv")
    rows = list(csv.reader((tmp_path / "details.csv").read_text(encoding="utf-8-sig").splitlines()))[1:]

    assert [row[0].removesuffix(".output.0") for row in rows] == [keys[0], keys[2], keys[1], keys[3]]


def test_a_cell_that_a_spreadsheet_would_run_is_quoted_and_a_number_is_not():
    assert [safe_cell(text) for text in ("=1", "-inf", "-0.5", "-x", "@a", "nan", "(-1+2j)")] == [
        "'=1",
        "-inf",
        "-0.5",
        "'-x",
        "'@a",
        "nan",
        "(-1+2j)",
    ]
