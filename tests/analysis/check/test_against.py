"""`trainermon check against`: msprobe's own files and verdicts, recorded by `record_against.py`, and what it loses."""

import csv
import dataclasses
import json
import math
from pathlib import Path

import pytest

from tests.analysis.check.against_cases import TARGET, check_of, write_ours
from trainermon.accuracy.legacy_metrics import LegacyMetrics
from trainermon.accuracy.rules import Rules
from trainermon.analysis.check.against.comparison import DETAIL_COLUMNS, RESULT_COLUMNS, compare_details
from trainermon.analysis.check.against.pairs import pair_verdict
from trainermon.analysis.check.details import LEGACY_COLUMNS, write_details
from trainermon.analysis.check.details_rows import DetailsRow, read_details
from trainermon.cli import main
from trainermon.core.errors import DumpError

RECORDED = Path(__file__).with_name("recorded")
VERSIONS = {"msprobe_26": Rules.MSPROBE, "msprobe_8": Rules.MSPROBE8}
PAIRS = [(folder, prefix) for folder in VERSIONS for prefix in ("", "ours_")]


def table(path):
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))


def compared(tmp_path, target, golden, *options):
    assert main(["check", "against", str(target), str(golden), "-o", str(tmp_path), *options]) == 0
    [result] = tmp_path.glob("api_precision_compare_result_*.csv")
    [details] = tmp_path.glob("api_precision_compare_details_*.csv")
    return table(result), table(details)


def is_number(cell):
    return cell.strip() and not cell.strip().isalpha() and cell[0] in "-0123456789"


@pytest.mark.parametrize(("folder", "prefix"), PAIRS)
def test_words_and_numbers_are_those_of_msprobe_for_its_files_and_for_ours(tmp_path, folder, prefix):
    recorded = RECORDED / folder
    files = recorded / f"{prefix}target.csv", recorded / f"{prefix}golden.csv"

    result, details = compared(tmp_path, *files, "--rules", VERSIONS[folder].value)

    assert tuple(result[0]) == RESULT_COLUMNS == tuple(table(recorded / f"{prefix}result.csv")[0])
    words = {row[0]: row[1:3] for row in result[1:]}
    theirs = {row[0]: row[1:3] for row in table(recorded / f"{prefix}result.csv")[1:]}
    assert {words.pop(name)[0] for name in ("Torch.only_target.0", "Torch.only_golden.0")} == {"unmatched"}
    theirs["Torch.linalg.svd.0"] = ["SKIP", " "]  # it says SKIP of a backward that there is not
    assert words == theirs
    assert tuple(details[0]) == DETAIL_COLUMNS == tuple(table(recorded / f"{prefix}details.csv")[0])
    rows = {row[0]: row for row in details}
    for row in table(recorded / f"{prefix}details.csv")[1:]:
        for title, mine, other in zip(DETAIL_COLUMNS, rows[row[0]], row, strict=True):
            if is_number(other):
                assert float(mine) == pytest.approx(float(other), abs=1e-9), (row[0], title)
            elif title != "Message":
                assert mine == other, (row[0], title)


@pytest.mark.parametrize("folder", VERSIONS)
def test_our_file_of_details_has_msprobes_columns_and_numbers(tmp_path, folder):
    write_details(check_of(TARGET, VERSIONS[folder]), tmp_path / "details.csv")

    ours, theirs = table(tmp_path / "details.csv"), table(RECORDED / folder / "target.csv")

    assert tuple(theirs[0]) == LEGACY_COLUMNS == tuple(ours[0][: len(LEGACY_COLUMNS)])
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        for title, one, two in zip(LEGACY_COLUMNS, mine, other[:-1], strict=False):
            if is_number(two):
                # it prints the digits of float32
                assert float(one) == pytest.approx(float(two), rel=1e-7, abs=1e-9), (mine[0], title)
            else:
                assert one.lower() == two.lower(), (mine[0], title)


@pytest.mark.parametrize("rules", VERSIONS.values())
def test_the_files_that_msprobe_was_given_are_those_we_write(tmp_path, rules):
    [folder] = [name for name, one in VERSIONS.items() if one is rules]

    for path in write_ours(tmp_path, rules):
        assert path.read_bytes() == (RECORDED / folder / path.name).read_bytes()


def test_a_nan_that_msprobe_passes_is_an_error_by_our_rules(tmp_path):
    files = RECORDED / "msprobe_26" / "target.csv", RECORDED / "msprobe_26" / "golden.csv"

    words = {row[0]: row[1] for row in compared(tmp_path, *files)[0][1:]}

    assert words["Functional.softmax.3"] == "error"
    assert words["Functional.softmax.4"] == words["Functional.softmax.0"] == "pass"
    theirs = {row[0]: row[1] for row in table(RECORDED / "msprobe_26" / "result.csv")}
    assert theirs["Functional.softmax.3"] == "pass"


def rows_of(name):
    return read_details(RECORDED / "msprobe_26" / name)


def test_a_result_that_a_file_has_twice_costs_only_itself():
    target, golden = rows_of("target.csv"), rows_of("golden.csv")
    twice = next(row for row in golden if row.call == "Torch.exp.0")

    against = compare_details(target, [*golden, twice], Rules.MSPROBE)
    plain = compare_details(target, golden, Rules.MSPROBE)

    [exp] = [call for call in against.calls if call.name == "Torch.exp.0"]
    assert (exp.forward, exp.message) == ("SKIP", "the golden file has 2 rows of this name")
    assert [c for c in against.calls if c != exp] == [c for c in plain.calls if c.name != "Torch.exp.0"]


def test_the_vendors_rule_judges_the_target_alone():
    against = compare_details(rows_of("target.csv"), rows_of("golden.csv"), Rules.CANN)

    words = {call.name: call.forward for call in against.calls}
    assert (words["Functional.softmax.0"], words["Functional.softmax.1"]) == ("pass", "error")
    assert words["Functional.softmax.3"] == words["Torch.argmax.1"] == "error"
    assert words["Torch.argmax.0"] == "pass"


def row(status, *, worst=math.nan, dtype="float32", rmse=None, message=""):
    return DetailsRow(
        name="Functional.dropout.0.forward.output.0",
        dtype=dtype,
        shape="(4, 4)",
        metrics=LegacyMetrics(rmse=rmse),
        status=status,
        message=message,
        worst=worst,
        is_ours=True,
    )


def test_our_own_verdict_is_kept_where_msprobe_measures_nothing():
    for dtype in ("", "float64", "complex64"):
        error = row("error", dtype=dtype, message="kept values are not x / (1 - p)")
        verdict = pair_verdict(error, row("pass", dtype=dtype), Rules.TRAINERMON)

        assert (verdict.status, verdict.message) == ("error", "kept values are not x / (1 - p)")
        assert pair_verdict(error, row("pass", dtype=dtype), Rules.MSPROBE).status == "SKIP"


@pytest.mark.parametrize(
    ("target", "golden", "status"),
    [
        (row("error", worst=6.0, rmse=0.3), row("error", worst=2.1, rmse=0.11), "warning"),
        (row("error", worst=6.0, rmse=0.3), row("error", worst=1.9, rmse=0.11), "error"),
        (row("error", worst=6.0, rmse=0.3), row("error", worst=2.1, rmse=0.09), "error"),
        (row("error", worst=math.inf, rmse=0.3), row("error", worst=math.inf, rmse=0.3), "error"),
        (row("warning", worst=1.5, rmse=0.3), row("pass", worst=0.5, rmse=0.1), "warning"),
    ],
)
def test_an_error_is_a_warning_where_the_golden_device_is_a_third_as_far_off(target, golden, status):
    assert pair_verdict(target, golden, Rules.TRAINERMON).status == status


def measured(operation, **metrics):
    name = f"Functional.{operation}.0.forward.output.0"
    return dataclasses.replace(row("pass"), name=name, metrics=LegacyMetrics(**metrics), is_ours=False)


@pytest.mark.parametrize(("share", "status"), [(0.9989, "error"), (0.999, "pass")])
def test_a_convolution_of_version_8_needs_999_elements_in_1000(share, status):
    target = measured("conv2d", within_thousandth=share)

    assert pair_verdict(target, target, Rules.MSPROBE8).status == status


@pytest.mark.parametrize(
    ("one", "other", "status"),
    [
        (math.nan, math.nan, "pass"),
        (math.inf, math.inf, "pass"),
        (math.inf, -math.inf, "error"),
        (math.nan, math.inf, "error"),
        (math.nan, 1.0, "error"),
        (1.0, math.nan, "error"),
    ],
)
def test_measures_that_are_not_finite_must_be_so_on_both_sides(one, other, status):
    rest = dict.fromkeys(("small_share", "max_relative", "mean_relative", "balance"), 0.0)

    found = pair_verdict(measured("exp", rmse=one, **rest), measured("exp", rmse=other, **rest), Rules.MSPROBE)

    assert found.status == status


def changed(tmp_path, change):
    path = tmp_path / "changed.csv"
    rows = table(RECORDED / "msprobe_26" / "target.csv")
    change(rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


STATUS = LEGACY_COLUMNS.index("Status")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[1].append("1"), "found 24 cells, expected 23 as in the first line"),
        (lambda rows: rows[2].pop(), "found 22 cells, expected 23"),
        (lambda rows: rows[0].__setitem__(STATUS, "Word"), "lacks the column 'Status'"),
        (lambda rows: rows[0].append("Shape"), "has the column 'Shape' more than once"),
        (lambda rows: rows.clear(), "lacks the column"),
        (lambda rows: rows[3].__setitem__(4, "0,9"), "column '余弦相似度': found '0,9', expected a number or a blank"),
    ],
)
def test_a_file_of_another_form_is_refused_in_one_line(tmp_path, capsys, change, message):
    path = changed(tmp_path, change)

    with pytest.raises(DumpError) as caught:
        read_details(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

    assert main(["check", "against", str(path), str(RECORDED / "msprobe_26" / "golden.csv")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("content", [b"\xff\xfe\x00bad", None, b'"unclosed'])
def test_what_is_no_csv_file_is_refused(tmp_path, content):
    path = tmp_path / "details.csv"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(DumpError, match="details"):
        read_details(path)


def test_msprobes_options_are_understood_and_a_missing_file_is_named(tmp_path, capsys):
    target, golden = (str(RECORDED / "msprobe_26" / name) for name in ("target.csv", "golden.csv"))

    assert main(["check", "against", "-npu", target, "-gpu", golden, "--out_path", str(tmp_path), "--exit-code"]) == 3
    assert "calls compared: " in capsys.readouterr().out
    assert main(["check", "against", target, golden, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["calls"][0]["name"]) == (1, "Functional.softmax.0")
    assert main(["check", "against", target]) == 1
    assert "found 1 files of details, expected two" in capsys.readouterr().err


def test_nothing_compared_is_no_pass(tmp_path, capsys):
    whole, _ = write_ours(tmp_path)
    head = tmp_path / "head.csv"
    head.write_text(whole.read_text(encoding="utf-8-sig").splitlines()[0] + "\n")

    assert main(["check", "against", str(head), str(head), "--exit-code"]) == 1
    assert "nothing to compare" in capsys.readouterr().out


def test_another_word_than_a_verdict_is_refused(tmp_path, capsys):
    whole, _ = write_ours(tmp_path)
    spoilt = tmp_path / "spoilt.csv"
    spoilt.write_text(whole.read_text(encoding="utf-8-sig").replace(",pass,", ",perhaps,"))

    assert main(["check", "against", str(spoilt), str(whole)]) == 1
    assert "found 'perhaps', expected pass, warning, error or SKIP" in capsys.readouterr().err
