"""`trainermon source`, on dumps of a model that is written to a file, run, and edited between two dumps."""

import ast
import json
import shutil
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tests.analysis.source.trained_script import RELU, SCRIPT, line_of, trained
from trainermon.analysis.source.excerpts import excerpt
from trainermon.cli import main
from trainermon.core.errors import DumpError
from trainermon.dump.files.sources import read_sources


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("source") / "sound", SCRIPT)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("source") / "faulty", SCRIPT.replace(RELU, RELU + " * 1.125"))


@pytest.fixture(scope="module")
def infinite(tmp_path_factory):
    text = SCRIPT.replace(RELU, "        h = torch.log(torch.relu(h) * 0)")
    return trained(tmp_path_factory.mktemp("source") / "infinite", text)


def document(capsys, *words):
    assert main(["source", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_every_call_belongs_to_the_line_that_made_it(sound, capsys):
    lines = {line["line"]: line for line in document(capsys, sound)["lines"]}

    calls = {line_of(SCRIPT, part): part for part in ("self.fc1(x)", "torch.relu(h)", "self.fc2(h) + x", "= block(x)")}
    # of three blocks: a Linear and the linear in it; a relu; a Linear, the linear in it and an addition; the block
    assert [lines[number]["forwards"] for number in calls] == [6, 3, 9, 3]
    assert [lines[number]["backwards"] for number in calls] == [6, 3, 9, 3]
    assert all(part in lines[number]["code"] for number, part in calls.items())
    assert {line["verdict"] for line in lines.values()} == {"none"}


def test_the_counts_are_those_of_the_dump(sound, capsys):
    keys = json.loads(next(sound.rglob("dump.json")).read_bytes())["data"]
    directions = Counter(
        "backward" if ".backward" in key else "forward" for key in keys if "parameters_grad" not in key
    )

    lines = document(capsys, sound)["lines"]

    assert sum(line["forwards"] for line in lines) == directions["forward"]
    assert sum(line["backwards"] for line in lines) == directions["backward"]


def test_the_line_that_makes_infinities_comes_first(infinite, capsys):
    text = (infinite.parent / "train.py").read_text()
    assert main(["source", str(infinite)]) == 0

    shown = capsys.readouterr().out.splitlines()

    first = next(line for line in shown if line.startswith("▲"))
    assert first.split()[1] == str(line_of(text, "torch.log"))
    assert "h = torch.log(torch.relu(h) * 0)" in first


def test_what_is_said_of_several_steps_stands_once(infinite, tmp_path, capsys):
    for step in ("step0", "step1"):
        shutil.copytree(infinite / "step0", tmp_path / step)

    one, both = document(capsys, infinite)["lines"], document(capsys, tmp_path)["lines"]

    assert [line["messages"] for line in both] == [line["messages"] for line in one]
    assert sum(len(line["messages"]) for line in one) > 0


def test_code_that_differs_is_shown_above_the_numbers(faulty, sound, capsys):
    found = document(capsys, faulty, sound)

    (difference,) = found["different_code"]
    changed = [line for line in difference["diff"] if line[0] in "+-"]
    assert changed == [f"-{RELU}", f"+{RELU} * 1.125"]
    assert any(line["verdict"] in ("warning", "error", "blamed") for line in found["lines"])
    main(["source", str(faulty), str(sound)])
    shown = capsys.readouterr().out
    assert shown.index("The code differs, too") < shown.index("▲")


def test_equal_code_is_no_difference(sound, capsys):
    assert document(capsys, sound, sound)["different_code"] == []


def test_all_lines_of_a_file_are_shown_as_they_stand_in_it(sound, capsys):
    main(["source", str(sound), "--lines", "train.py"])

    shown = capsys.readouterr().out.splitlines()

    lines = dict(enumerate(SCRIPT.splitlines(), 1))
    rows = {int(row[2:7]): row[30:] for row in shown[3:] if row[2:7].strip().isdigit()}
    assert rows == {number: lines[number] for number in rows}
    assert line_of(SCRIPT, "torch.relu(h)") in rows


def test_lines_around_one_are_shown(sound, capsys):
    number = line_of(SCRIPT, "torch.relu(h)")
    main(["source", str(sound), "--lines", f"train.py:{number}"])

    shown = capsys.readouterr().out

    assert "torch.relu(h)" in shown
    assert "debugger.step()" not in shown


@pytest.mark.parametrize("line", ["abc", "", "1.5", "-3"])
def test_a_line_that_is_no_number_is_refused_by_name(line, sound, capsys):
    assert main(["source", str(sound), "--lines", f"train.py:{line}"]) == 1
    assert f"found {line!r} behind train.py, expected a number, as train.py:12" in capsys.readouterr().err


def test_a_file_without_calls_is_refused_and_those_with_calls_are_named(sound, capsys):
    assert main(["source", str(sound), "--lines", "model.py"]) == 1
    assert "model.py is none of the files with calls: expected one of" in capsys.readouterr().err


def test_a_line_that_was_not_kept_is_refused_and_the_range_is_named(sound, capsys):
    assert main(["source", str(sound), "--lines", "train.py:999"]) == 1
    assert "train.py has no line kept near 999: expected one of those from" in capsys.readouterr().err


def test_the_lines_are_those_that_ran_although_the_file_has_gone(tmp_path):
    dumps = trained(tmp_path / "gone", SCRIPT)
    (directory,) = dumps.glob("step0/rank*")
    frame = f"File {tmp_path}/gone/train.py, line {line_of(SCRIPT, 'torch.relu(h)')}, in forward, \n h = torch.relu(h)"
    (tmp_path / "gone" / "train.py").unlink()

    found = excerpt(frame, read_sources(directory))

    assert found.missing == ""
    assert [(number, text) for number, text in found.context if text == RELU] == [(found.line, RELU)]
    assert excerpt(frame).missing == "the file is not on this machine"


def test_kept_functions_are_python(sound):
    (directory,) = sound.glob("step0/rank*")

    file = read_sources(directory).files[str(sound.parent / "train.py")]

    part = file.around(line_of(SCRIPT, "torch.relu(h)"))
    kept = ast.parse(textwrap.dedent("\n".join(part.lines)))
    functions = [node for node in ast.walk(ast.parse(SCRIPT)) if isinstance(node, ast.FunctionDef)]
    assert ast.dump(kept.body[-1]) in [ast.dump(one) for one in functions]


def test_of_a_file_on_this_machine_the_function_alone_is_shown_without_secrets(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("password = 'abc'\ndef beside(): pass\ndef called(x):\n    f(x, token='abc')\n    return x\n")

    found = excerpt(f"File {path}, line 4, in called, \n f(x, token='abc')")

    assert found.context == ((3, "def called(x):"), (4, "    f(x, token='<redacted>')"), (5, "    return x"))


def test_the_exit_status_tells_of_lines_at_fault(sound, infinite, capsys):
    assert main(["source", str(sound), "--exit-code"]) == 0
    assert main(["source", str(infinite), "--exit-code"]) == 3
    capsys.readouterr()


def test_dumps_of_msprobe_have_lines_too(capsys):
    recorded = Path(__file__).parents[1] / "compare" / "recorded"

    found = document(capsys, recorded / "faulty", recorded / "sound")

    assert any(line["verdict"] == "blamed" and line["file"].endswith(".py") for line in found["lines"])


def test_a_damaged_file_of_sources_is_named(tmp_path, capsys):
    dumps = trained(tmp_path / "damaged", SCRIPT)
    (directory,) = dumps.glob("step0/rank*")
    (directory / "sources.json").write_text("{")

    with pytest.raises(DumpError, match=r"sources\.json cannot be read"):
        read_sources(directory)
    capsys.readouterr()
    assert main(["source", str(dumps), "--exit-code"]) == 4
    assert "sources.json cannot be read" in capsys.readouterr().out.splitlines()[0]


def test_code_is_text_on_the_page(tmp_path, capsys):
    hostile = SCRIPT.replace("self.fc1(x)", 'self.fc1(x)  # <script>alert("x")</script>')
    dumps = trained(tmp_path / "hostile", hostile)
    page = tmp_path / "page.html"

    main(["source", str(dumps), "-o", str(page)])

    capsys.readouterr()
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "default-src 'none'" in text


def test_of_what_went_wrong_within_a_library_its_line_and_the_own_one_are_told(tmp_path, capsys):
    library = tmp_path / "site-packages" / "layers.py"
    library.parent.mkdir()
    library.write_text(
        "import torch\n\n\ndef squashed(x):\n    return torch.log(x * 0)\n"
        "\n\ndef wrapped(x):\n    return doubled(squashed(x))\n"
        "\n\ndef doubled(x):\n    return x + x\n"
    )
    (library.parent / "wrappers.py").write_text("import layers\n\n\ndef around(x):\n    return layers.wrapped(x)\n")
    text = SCRIPT.replace("import sys", f"import sys; sys.path.insert(0, {str(library.parent)!r}); import wrappers")
    dumps = trained(tmp_path / "run", text.replace(RELU, "        h = wrappers.around(h)"))

    lines = [line for line in document(capsys, dumps)["lines"] if line["verdict"] == "blamed"]

    assert [line["code"] for line in lines] == ["h = wrappers.around(h)", "return torch.log(x * 0)"]
    main(["source", str(dumps)])
    shown = capsys.readouterr().out
    assert shown.index("return torch.log(x * 0)") < shown.index("h = wrappers.around(h)")
    assert shown.count("▲") == 2
    assert [shown.count(f"{file}\n") for file in ("train.py", "layers.py", "wrappers.py")] == [1, 1, 1]


def test_a_page_with_another_ending_is_refused_before_anything_is_read(tmp_path, capsys):
    assert main(["source", str(tmp_path), "-o", str(tmp_path / "x.pdf")]) == 1

    assert "x.pdf cannot be written: expected a name that ends in .html" in capsys.readouterr().err
    assert not (tmp_path / "x.pdf").exists()


HELPED = """
def twice(x):
    return x * 2.0


"""


def test_of_a_helper_that_several_modules_run_the_module_is_named(tmp_path, capsys):
    text = SCRIPT.replace("class ", f"{HELPED}class ", 1).replace(RELU, "        h = twice(torch.relu(h))")
    number = line_of(text, "return x * 2.0")
    infinite = trained(tmp_path / "infinite", text.replace("x * 2.0", "x * float('inf')"))
    (line,) = [one for one in document(capsys, infinite)["lines"] if one["messages"] and one["line"] == number]
    assert [one["module"] for one in line["messages"]] == ["blocks.0 (Block)"]
    assert main(["source", str(infinite)]) == 0
    assert " in blocks.0 (Block): " in capsys.readouterr().out
