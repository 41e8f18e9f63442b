"""`trainermon compare` on a terminal and as files."""

import csv
import json
import zipfile
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.analysis.damaged_dumps import run_of
from tests.server_programs import find_program
from trainermon.analysis.compare.output.files import FORMATS
from trainermon.cli import main

RECORDED = Path(__file__).with_name("recorded")
FAULTY, SOUND = str(RECORDED / "faulty"), str(RECORDED / "sound")


def test_the_summary_is_one_screen_and_begins_with_the_cause(capsys):
    assert main(["compare", FAULTY, SOUND]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "The first difference arose in Module.layers.1.Block.forward.0, record_with_msprobe.py:41: what it gave to "
    )
    assert "rows      1 error, 144 warning, 101 pass, 6 unmatched" in lines
    assert any("record_with_msprobe.py" in line for line in lines if line.startswith("called in"))
    assert len(lines) <= 40
    assert max(map(len, lines[1:])) <= 180


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_written(name, tmp_path, capsys):
    assert main(["compare", FAULTY, SOUND, "-o", str(tmp_path), "-f", name]) == 0

    path, _ = sorted(tmp_path.iterdir(), key=lambda path: path.name.startswith("advisor"))
    assert path.name.startswith("compare_result_step0_rank0_")
    assert path.suffix == f".{name}"
    content = path.read_bytes() if name != "xlsx" else zipfile.ZipFile(path).read("xl/worksheets/sheet1.xml")
    strings = b"" if name != "xlsx" else content
    assert b"Module.layers.1.Block.forward.0" in content + strings


def test_json_is_strict_and_names_what_is_blamed(capsys):
    main(["compare", str(RECORDED / "nan"), SOUND, "--json"])

    (document,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["blamed"] == ["Module.layers.1.Block.forward.0"]
    assert document["rows"]["error"] == 145
    (blamed,) = [result for result in document["results"] if result.get("blamed")]
    assert blamed["output_error"] == "NaN"


def test_every_csv_row_has_as_many_cells_as_the_header(tmp_path, capsys):
    main(["compare", FAULTY, SOUND, "-o", str(tmp_path), "-f", "csv"])

    with next(tmp_path.glob("*.csv")).open(newline="") as file:
        rows = list(csv.reader(file))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert rows[0][25:28] == ["Result", "Err_message", "NPU_Stack_Info"]


def test_text_of_a_dump_cannot_become_markup(tmp_path, capsys):
    from trainermon.analysis.compare import compare
    from trainermon.analysis.compare.output.pages import write_html

    folder = tmp_path / "rank0"
    folder.mkdir()
    dump = json.loads((RECORDED / "faulty/step0/rank0/dump.json").read_text())
    dump["data"] = {"<script>alert(1)</script>.0.forward": dump["data"]["Tensor.mul_.0.forward"]}
    (folder / "dump.json").write_text(json.dumps(dump))
    (comparison,) = compare(folder, RECORDED / "sound/step0/rank0")
    write_html(comparison, tmp_path / "page.html")

    assert "<script>" not in (tmp_path / "page.html").read_text()


@pytest.mark.server
def test_the_page_fits_a_telephone(tmp_path, capsys):
    main(["compare", str(RECORDED / "faulty"), SOUND, "-o", str(tmp_path), "-f", "html"])
    (path,) = tmp_path.glob("*.html")

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_program("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 390, "height": 800})
        page.goto(path.as_uri())
        page.locator("details", has_text="to blame").locator("summary").click()
        width = page.evaluate("document.documentElement.scrollWidth")
        chromium.close()

    assert width <= 390


def test_text_of_a_dump_cannot_become_a_formula(tmp_path, capsys):
    name = "=HYPERLINK(1).0.forward"
    dump = write_dump(
        tmp_path / "a", {name: forward(tensor(), output=tensor(value=2.0)), "-1+1.0.forward": forward(output=tensor())}
    )

    main(["compare", str(dump), SOUND, "-o", str(tmp_path / "out")])

    capsys.readouterr()
    (path,) = (tmp_path / "out").glob("*.csv")
    with path.open(encoding="utf-8", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert "'=HYPERLINK(1).0.forward.input.0" in cells
    assert "'-1+1.0.forward.output.0" in cells
    assert not [cell for cell in cells if cell.startswith(("=", "@", "-1+"))]
    assert [cell for cell in cells if cell.startswith("-") and float(cell.removesuffix("%")) < 0]


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")

    assert main(["compare", FAULTY, SOUND, "-o", str(tmp_path / "file")]) == 1

    assert f"cannot write into {tmp_path / 'file'}" in capsys.readouterr().err


def test_a_folder_without_a_dump_is_refused(tmp_path, capsys):
    assert main(["compare", str(tmp_path), SOUND]) == 1

    assert "holds no dump: expected dump.json" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_exit_status_tells_a_script_whether_the_dumps_differ(words, tmp_path, capsys):
    lonely = tmp_path / "rank0"
    lonely.mkdir()
    (lonely / "dump.json").write_text('{"task": "statistics", "level": "L1", "data": {}}')

    statuses = [main(["compare", target, SOUND, "--exit-code", *words]) for target in (FAULTY, SOUND, str(lonely))]
    assert statuses == [3, 0, 4]


def test_a_mode_that_both_dumps_lack_is_refused(capsys):
    assert main(["compare", FAULTY, SOUND, "--mode", "tensor"]) == 1

    assert "cannot compare by tensor" in capsys.readouterr().err


def test_another_number_within_the_blamed_module_is_told(tmp_path, capsys):
    norm, add = "Module.norm.RMSNorm.forward.0", "Tensor.__add__.0.forward"
    for name, epsilon in (("target", 1e-3), ("golden", 1e-6)):
        number = {"type": "float", "value": epsilon}
        data = {
            add: forward(tensor(value=1.0), number, output=tensor(value=1.0 + epsilon)),
            norm: forward(tensor(value=1.0), output=tensor(value=1.0 - epsilon)),
        }
        write_dump(tmp_path / name, data, construct={add: norm, norm: None})

    main(["compare", str(tmp_path / "target"), str(tmp_path / "golden")])

    text = capsys.readouterr().out
    assert f"to blame  {norm}" in text
    assert f"within it {add} (input.1 is 0.001, 1e-06 in the golden dump)" in text


def test_a_call_on_one_side_only_is_shown_before_steps_that_agree(tmp_path, capsys):
    call = forward(tensor(), output=tensor())
    for name, extra in (("ours", ("Tensor.flip.0.forward",)), ("theirs", ())):
        write_dump(tmp_path / name / "step0" / "rank0", {"Tensor.relu.0.forward": call})
        write_dump(tmp_path / name / "step1" / "rank0", dict.fromkeys(("Tensor.relu.0.forward", *extra), call))

    assert main(["compare", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0

    out = capsys.readouterr().out
    assert "rows have equal statistics, but 2 rows are on one side only" in out
    assert "target    " in out
    assert f"{tmp_path}/ours/step1/rank0" in out


@pytest.mark.parametrize("words", [["-f", "csv,md"], ["-f", "csv", "-f", "md"], ["-f", "csv, md"]])
def test_formats_may_be_given_with_commas_or_one_by_one(words, tmp_path):
    sides = [run_of(tmp_path / side, ranks=1) for side in ("target", "golden")]

    assert main(["compare", *map(str, sides), "-o", str(tmp_path / "out"), *words, "-c"]) == 0

    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".csv", ".md"}


def test_an_unknown_format_is_refused_with_those_that_are_known(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["compare", str(tmp_path), str(tmp_path), "-f", "csv,txt"])

    assert f"found 'txt', expected some of {', '.join(FORMATS)}" in capsys.readouterr().err
