"""The files of a comparison: msprobe's own sheets where these are right, and readers of each format as the truth."""

import csv
import io
import json
import math
import re
from pathlib import Path

import openpyxl
import pytest
from playwright.sync_api import sync_playwright

from tests.server_programs import find_program
from trainermon import cli
from trainermon.analysis.environment.compare import compare_packs
from trainermon.analysis.environment.differences import DifferenceLevel
from trainermon.analysis.environment.output.files import write_files
from trainermon.analysis.environment.output.page import render_page
from trainermon.analysis.environment.packs import read_pack
from trainermon.analysis.environment.rules import LevelRules
from trainermon.core.environment.pack import EnvironmentPack

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture(scope="module")
def comparison():
    return compare_packs(read_pack(RECORDED / "bench.zip"), read_pack(RECORDED / "cmp.zip"), LevelRules())


@pytest.fixture(scope="module")
def sheets(comparison, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    write_files(comparison, folder, ["xlsx"])
    book = openpyxl.load_workbook(folder / "result.xlsx")
    return {sheet.title: [list(row) for row in sheet.iter_rows(values_only=True)] for sheet in book}


@pytest.fixture(scope="module")
def of_msprobe():
    return json.loads((RECORDED / "result.json").read_text())


def test_the_sheets_have_the_columns_of_msprobe(sheets, of_msprobe):
    assert {name: rows[0] for name, rows in sheets.items()} == {
        name: sheet["columns"] for name, sheet in of_msprobe.items()
    }


@pytest.mark.parametrize("name", ["weights", "dataset", "random", "pip"])
def test_the_rows_are_those_of_msprobe(name, sheets, of_msprobe):
    expected = [row for row in of_msprobe[name]["data"] if row[0] != "random.random" or name == "random"]

    assert sorted(map(rounded, sheets[name][1:])) == sorted(map(rounded, expected))


def rounded(row):
    return tuple(
        str(f"{cell:.9f}" if isinstance(cell, float | int) and not isinstance(cell, bool) else cell) for cell in row
    )


def test_the_sheet_of_variables_has_both_sides_the_right_way_round(sheets):
    """Msprobe's own says of the side that set NCCL_ALGO that it did not."""
    assert sheets["env"][1:] == [
        ["NCCL_ALGO", "only bench has this env", "Ring", "", "error"],
        ["OMP_NUM_THREADS", "OMP_NUM_THREADS", "4", "8", "error"],
        ["only cmp has this env", "CUDA_LAUNCH_BLOCKING", "", "1", "info"],
    ]


def test_the_summary_has_every_section_and_msprobes_words(sheets):
    assert dict(sheets["summary"][1:]) == {
        "env": "error",
        "pip": "pass",
        "hyperparameters": "error",
        "random": "error",
        "dataset": "pass",
        "weights": "error",
    }


def test_hyperparameters_have_msprobes_words(sheets):
    assert sheets["hyperparameters"][1:] == [
        ["hyperparameters_static.json", "lr", "lr", "1e-4", "2e-4", "pure name", "error"]
    ]


def test_weights_on_one_side_only_and_other_ranks_are_errors():
    """Msprobe lets these pass."""
    weight = {"max": 1.0, "min": 0.0, "mean": 0.5, "norm": 1.0}
    one = EnvironmentPack(sections={}, ranks={0: {"weights": {"a": weight}, "data": {"0": {"args.0": weight}}}})
    other = EnvironmentPack(sections={}, ranks={0: {"weights": {"b": weight}, "data": {"1": {"args.0": weight}}}})

    comparison = compare_packs(one, other, LevelRules())

    assert comparison.sections == {"data": DifferenceLevel.ERROR, "weights": DifferenceLevel.ERROR}
    assert len(comparison.of(DifferenceLevel.ERROR)) == 4


def test_json_says_everything(comparison, tmp_path):
    write_files(comparison, tmp_path, ["json"], everything=True)

    document = json.loads((tmp_path / "environment.json").read_text())

    assert document["version"] == 1
    assert document["counts"]["error"] == len(comparison.of(DifferenceLevel.ERROR))
    assert len(document["settings"]) == len(comparison.rows)
    row = next(row for row in document["settings"] if row["names"] == ["lr", "lr"])
    assert (row["section"], row["level"], row["values"]) == ("hyperparameters", "error", ["1e-4", "2e-4"])


EVIL = '=cmd()|<script>alert(1)</script>`"\x1b[31m\ud800'


def test_foreign_text_does_no_harm_in_any_format(tmp_path):
    one = EnvironmentPack(source=EVIL, sections={"variables": {EVIL: EVIL, "X": 1e999, "Y": math.nan}})
    comparison = compare_packs(one, EnvironmentPack(sections={"variables": {}}), LevelRules())

    write_files(comparison, tmp_path, ["json", "md", "html", "xlsx", "csv"])

    page = (tmp_path / "environment.html").read_text()
    assert "<script>alert" not in page
    assert len(re.findall("<script", page)) == 1
    rows = list(csv.reader(io.StringIO((tmp_path / "environment.csv").read_text())))
    assert all(not cell.startswith("=") for row in rows for cell in row)
    assert "<script>" not in (tmp_path / "environment.md").read_text()
    sheet = openpyxl.load_workbook(tmp_path / "result.xlsx")["env"]
    assert sheet.cell(2, 1).data_type == "s"
    assert "\x1b" not in page + (tmp_path / "environment.md").read_text()


def test_the_page_allows_its_own_script_only(comparison):
    page = render_page(comparison)

    assert re.search(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[\w+/=]+'", page)
    assert comparison.headline in page
    assert page.count('<tr class="') == len(comparison.rows)


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_a_browser_filters_the_page_and_loads_nothing(width, scheme, comparison, tmp_path):
    path, complaints = tmp_path / "page.html", []
    path.write_text(render_page(comparison))

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_program("chromium"), args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(path.as_uri())
        wide = page.evaluate("document.documentElement.scrollWidth")
        seen = [page.locator("tbody tr:visible").count()]
        page.fill("#find", "nccl_algo")
        seen.append(page.locator("tbody tr:visible").count())
        page.uncheck("#error")
        seen.append(page.locator("tbody tr:visible").count())
        browser.close()

    grave = [row for row in comparison.rows if row.level is not DifferenceLevel.SAME]
    assert (complaints, wide <= width) == ([path.as_uri()], True)
    assert seen == [len(grave), sum(row.name == "NCCL_ALGO" for row in grave), 0]


def test_the_command_writes_what_it_is_asked_for(tmp_path, capsys):
    words = ["env", "compare", str(RECORDED / "bench.zip"), str(RECORDED / "cmp.zip"), "-o", str(tmp_path / "new")]

    assert cli.main([*words, "-f", "csv,md"]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["environment.csv", "environment.md"]
    assert [cli.main([*words, "-f", name]) for name in ("pdf", " , ")] == [1, 1]
    assert "expected some of json,md,html,xlsx,csv" in capsys.readouterr().err
