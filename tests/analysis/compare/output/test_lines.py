"""The table in files: written by blocks or cell by cell it is the same, and an independent reader finds it again."""

import csv
import math
import subprocess
import sys
import zipfile
from xml.etree import ElementTree

import openpyxl
import pytest
from openpyxl.utils import get_column_letter

from tests.analysis.compare.record import RECORDED
from tests.analysis.compare.test_verdicts import chain
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import headline
from trainermon.analysis.compare.output import lines as lines_module
from trainermon.analysis.compare.output.files import write_csv
from trainermon.analysis.compare.output.tables import header, table
from trainermon.analysis.compare.output.workbook import write_xlsx

SPREADSHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
SIDES = {
    "faulty": ("faulty", "sound"),
    "nan": ("nan", "sound"),
    "golden only": ("sound", "faulty"),
    "itself": ("sound",) * 2,
}


@pytest.fixture(scope="module", params=SIDES)
def comparison(request):
    (found,) = compare(*(RECORDED / name for name in SIDES[request.param]))
    return found


def alike(read, cell):
    """Whether a cell of a file holds `cell`: a number as exact, in whatever form, a text as it is."""
    text, wanted = ("" if value is None else str(value) for value in (read, cell))
    if text == wanted:
        return True
    try:
        return float(text.removesuffix("%")) == float(wanted.removesuffix("%"))
    except ValueError:
        return False


def differing(rows, comparison):
    expected = [header(comparison.mode), *table(comparison)]
    assert len(rows) == len(expected)
    return [
        (index, title, read, cell)
        for index, (row, cells) in enumerate(zip(rows, expected, strict=True))
        for title, read, cell in zip(header(comparison.mode), row, cells, strict=True)
        if not alike(read, cell)
    ]


@pytest.mark.parametrize("block", [1, 7, 8192])
def test_a_csv_file_holds_the_table(block, comparison, tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "BLOCK", block)
    write_csv(comparison, tmp_path / "x.csv")

    with (tmp_path / "x.csv").open(newline="", encoding="utf-8") as file:
        assert differing(list(csv.reader(file)), comparison) == []


def test_a_spreadsheet_holds_the_table(comparison, tmp_path):
    write_xlsx(comparison, tmp_path / "x.xlsx")

    sheet = openpyxl.load_workbook(tmp_path / "x.xlsx")["compare_result"]
    assert differing(list(sheet.iter_rows(values_only=True)), comparison) == []
    assert sheet.freeze_panes == "B2"
    assert sheet.auto_filter.ref == f"A1:AF{sheet.max_row}"


def test_every_cell_says_where_it_is_as_gnumeric_needs_it(comparison, tmp_path):
    write_xlsx(comparison, tmp_path / "x.xlsx")

    text = zipfile.ZipFile(tmp_path / "x.xlsx").read("xl/worksheets/sheet1.xml").decode()
    places = [cell.get("r") for cell in ElementTree.fromstring(text).iter(f"{{{SPREADSHEET}}}c")]
    width = len(header(comparison.mode))
    assert places == [f"{get_column_letter(index % width + 1)}{index // width + 1}" for index in range(len(places))]


def test_rows_have_the_colour_of_their_result(tmp_path):
    (comparison,) = compare(RECORDED / "faulty", RECORDED / "sound")
    write_xlsx(comparison, tmp_path / "x.xlsx")

    sheet = openpyxl.load_workbook(tmp_path / "x.xlsx")["compare_result"]
    found = {(row[25].value, cell.fill.fgColor.rgb) for row in sheet.iter_rows(min_row=2) for cell in row}
    assert found == {
        ("error", "FFF8CBAD"),
        ("warning", "FFFFF2CC"),
        ("unmatched", "FFE7E6E6"),
        ("pass", "00000000"),
    }


def test_odd_names_keep_within_their_cells(tmp_path):
    name = 'Functional.a,"b"\n<c>&\x07.0.forward'
    for side in "ab":
        folder = chain(tmp_path / side, [1.0, 2.0])
        text = (folder / "dump.json").read_text()
        escaped = name.replace('"', '\\"').replace("\n", "\\n").replace("\x07", "\\u0007")
        (folder / "dump.json").write_text(text.replace("Functional.gelu.0.forward", escaped))
    (comparison,) = compare(tmp_path / "a", tmp_path / "b")
    write_csv(comparison, tmp_path / "x.csv")
    write_xlsx(comparison, tmp_path / "x.xlsx")

    with (tmp_path / "x.csv").open(newline="") as file:
        assert [row[0] for row in csv.reader(file)][1:] == [f"{name}.input.0", f"{name}.output.0"]
    cell = openpyxl.load_workbook(tmp_path / "x.xlsx")["compare_result"]["A2"].value
    assert cell == f"{name}.input.0".replace("\x07", "\ufffd")


@pytest.mark.parametrize("golden", [0.0, math.inf, None])
def test_what_is_no_finite_number_is_written_in_msprobe_s_words(golden, tmp_path):
    ours, theirs = chain(tmp_path / "a", [1.0, 1.0], mean=0.5), chain(tmp_path / "b", [1.0, 1.0], mean=golden)
    (comparison,) = compare(ours, theirs)
    write_csv(comparison, tmp_path / "x.csv")

    with (tmp_path / "x.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    assert (row["Mean diff"], row["MeanRelativeErr"], row["Bench mean"]) == {
        0.0: ("0.5", "inf", "0.0"),
        math.inf: ("-inf", "Nan", "inf"),
        None: ("N/A", "N/A", "None"),
    }[golden]


def test_without_orjson_the_table_is_the_same(tmp_path):
    (comparison,) = compare(RECORDED / "nan", RECORDED / "sound")
    code = "import sys; sys.modules['orjson'] = None; from trainermon.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["compare", comparison.target, comparison.golden, "-o", tmp_path, "-f", "csv"]
    subprocess.run([sys.executable, "-c", code, *map(str, words)], check=True, capture_output=True, timeout=900)

    (path,) = tmp_path.glob("*.csv")
    with path.open(newline="", encoding="utf-8") as file:
        assert differing(list(csv.reader(file)), comparison) == []


def test_the_first_sheet_holds_the_answer(tmp_path):
    (comparison,) = compare(RECORDED / "faulty", RECORDED / "sound")
    write_xlsx(comparison, tmp_path / "x.xlsx")

    book = openpyxl.load_workbook(tmp_path / "x.xlsx")

    assert book.sheetnames == ["answer", "compare_result"]
    cells = {row[0]: row[1] for row in book["answer"].iter_rows(min_row=2, max_col=2, values_only=True) if row[0]}
    assert book["answer"]["A1"].value == headline(comparison)
    assert cells["rows"] == "1 error, 144 warning, 101 pass, 6 unmatched"
    assert cells["to blame"].startswith("Module.layers.1.Block.forward.0: ")
