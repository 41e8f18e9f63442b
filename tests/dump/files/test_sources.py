import ast
import importlib.util
import inspect
import json
import linecache
import sys
from typing import Any

import pytest
import torch

from trainermon.core.errors import ConfigError, DumpError
from trainermon.dump.debugger import PrecisionDebugger
from trainermon.dump.files.reader import load_raw
from trainermon.dump.files.sources import parse_frame, read_sources, sources_text

MODEL = """
import functools
import torch
from torch import nn


def doubled(function):
    @functools.wraps(function)
    def around(*args):
        return 2 * function(*args)
    return around


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    @doubled
    def mixed(self, x):
        parts = [torch.tanh(self.fc(x) * factor) for factor in (1, 2)]
        return torch.stack(
            parts,
            dim=0,
        ).sum(0)

    def forward(self, x):
        squash = lambda y: torch.sigmoid(y)
        return squash(self.mixed(x))
"""
SECRET = "".join(("correct", "horse"))  # the source of this test is kept too, and may not hold it
PADDING = "".join(f"\n\ndef unused_{number}():\n    return {number}\n" for number in range(80))


@pytest.fixture(autouse=True)
def no_debugger_is_left():
    yield
    PrecisionDebugger.close()


def module_of(path, monkeypatch):
    spec = importlib.util.spec_from_file_location("sourced_model", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def dumped(model, folder, **options):
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps({"dump_path": str(folder), "level": "mix", **options}))
    PrecisionDebugger.close()
    debugger = PrecisionDebugger(config)
    debugger.start(model)
    model(torch.ones(2, 4)).sum().backward()
    debugger.stop()
    debugger.step()
    return next(folder.glob("step0/rank*"))


@pytest.fixture
def long_model(tmp_path, monkeypatch):
    path = tmp_path / "long_model.py"
    path.write_text(MODEL + PADDING)
    return module_of(path, monkeypatch), path


@pytest.mark.parametrize("source", ["functions", "files"])
def test_every_line_of_every_stack_is_kept(long_model, tmp_path, source):
    module, path = long_model

    directory = dumped(module.Gate(), tmp_path / "out", source=source)

    sources = read_sources(directory)
    frames = [parse_frame(text) for _, stack in load_raw(directory).stacks.values() for text in stack]
    for frame in frames:
        if frame.file.endswith(".py"):
            part = sources.files[frame.file].around(frame.line)
            assert part.lines[frame.line - part.first].strip() == frame.code
    assert {frame.function for frame in frames if frame.file == str(path)} >= {"forward", "mixed", "<lambda>", "around"}


def test_functions_are_whole_and_the_others_are_not_kept(long_model, tmp_path):
    module, path = long_model

    directory = dumped(module.Gate(), tmp_path / "out")

    file = read_sources(directory).files[str(path)]
    kept = "\n".join("\n".join(part.lines) for part in file.parts)
    for function in (module.Gate.forward, module.Gate.mixed.__wrapped__):
        assert inspect.getsource(function).rstrip() in kept
    assert "unused_40" not in kept
    assert file.num_lines == len(path.read_text().splitlines())


NESTED = """def outer():
    x = 1

    def inner():
        y = 2

        def innermost():
            return y

        return innermost

    def beside():
        return x

    return inner, beside


z = 3


class Box:
    @property
    def first(self):
        return 1

    def second(self):
        return lambda: 2
"""


def test_of_functions_within_one_another_the_innermost_is_kept(tmp_path):
    path = tmp_path / "nested.py"
    path.write_text(NESTED)
    lines = path.read_text().split("\n")
    functions = [
        (min([node.lineno, *(part.lineno for part in node.decorator_list)]), node.end_lineno)
        for node in ast.walk(ast.parse(NESTED))
        if isinstance(node, ast.FunctionDef)
    ]
    for wanted in range(1, NESTED.count("\n") + 1):
        around = [one for one in functions if one[0] <= wanted <= one[1]]
        first, last = min(around, key=lambda one: one[1] - one[0], default=(wanted, wanted))

        text = sources_text([f"File {path}, line {wanted}, in f, \n x"], [], whole_files=False)

        ((begin, kept),) = json.loads(text)["files"][str(path)]["parts"]
        assert begin == first
        assert kept.split("\n") == lines[first - 1 : last]


def test_a_class_is_found_where_inspect_finds_it(long_model, tmp_path):
    module, path = long_model

    place = read_sources(dumped(module.Gate(), tmp_path / "out")).classes["Gate"]

    assert place == (str(path), inspect.getsourcelines(module.Gate)[1], inspect.getsourcelines(module.Gate.forward)[1])


def test_what_ran_is_kept_although_the_file_is_edited_during_the_run(long_model, tmp_path):
    module, path = long_model
    dumped(module.Gate(), tmp_path / "before")
    path.write_text("# another one\n" * 40 + MODEL)

    directory = dumped(module.Gate(), tmp_path / "after")

    file = read_sources(directory).files[str(path)]
    assert any("return squash(self.mixed(x))" in line for part in file.parts for line in part.lines)
    assert not any("another one" in line for part in file.parts for line in part.lines)


def test_the_cell_of_a_notebook_is_kept(tmp_path):
    name = "<ipython-input-3-abcdef>"
    lines = MODEL.splitlines(keepends=True)
    linecache.cache[name] = (len(MODEL), None, lines, name)
    try:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(MODEL, name, "exec"), space)
        directory = dumped(space["Gate"](), tmp_path / "out")
    finally:
        del linecache.cache[name]

    kept = "\n".join("\n".join(part.lines) for part in read_sources(directory).files[name].parts)
    assert "return squash(self.mixed(x))" in kept
    assert "import functools" not in kept


SHORT_SCRIPT = """import sys
import torch
from torch import nn

API_TOKEN = "hf_{secret}"
DBPASS = "{secret}"


def unrelated():
    host = "example.com"
    password = "{secret}"


class Gate(nn.Module):
    def forward(self, x, token="{secret}"):
        return torch.tanh(x * self.scale)


def beside():
    return login("me", secret="{secret}")
"""


@pytest.mark.parametrize("source", ["functions", "files"])
def test_no_secret_of_a_short_script_is_in_any_file_of_a_dump(tmp_path, monkeypatch, source):
    secret = SECRET
    path = tmp_path / "short.py"
    call = f"    y = gate(x) if dict(token='{secret}') else x  # password={secret}\n"
    path.write_text(SHORT_SCRIPT.format(secret=secret) + f"\n\ndef called(gate, x):\n{call}    return y\n")
    module = module_of(path, monkeypatch)
    gate = module.Gate()
    gate.scale = torch.nn.Parameter(torch.ones(()))

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = gate

        def forward(self, x):
            return module.called(self.gate, x)

    directory = dumped(Outer(), tmp_path / "out", source=source)

    for file in directory.rglob("*.json"):
        assert secret not in file.read_text(), file.name
    kept = "\n".join("\n".join(part.lines) for part in read_sources(directory).files[str(path)].parts)
    assert "torch.tanh(x * self.scale)" in kept
    assert ("unrelated" in kept, "beside" in kept, "API_TOKEN" in kept) == ((source == "files"),) * 3


def test_secrets_that_another_tool_left_in_a_dump_are_not_read(long_model, tmp_path):
    directory = dumped(long_model[0].Gate(), tmp_path / "out")
    for name in ("stack.json", "sources.json"):
        text = (directory / name).read_text().replace("return squash(self.mixed(x))", f"login(token='{SECRET}')")
        (directory / name).write_text(text)

    assert "login(token='<redacted>')" in str(load_raw(directory).stacks)
    assert SECRET not in f"{load_raw(directory).stacks} {read_sources(directory)}"


def test_files_with_the_same_code_keep_their_own_names(tmp_path, monkeypatch):
    for name in ("first", "second"):
        path = tmp_path / f"{name}.py"
        path.write_text(MODEL)
        directory = dumped(module_of(path, monkeypatch).Gate(), tmp_path / name)

        assert {file for file in read_sources(directory).files if file.startswith(str(tmp_path))} == {str(path)}


def test_off_keeps_nothing(long_model, tmp_path):
    directory = dumped(long_model[0].Gate(), tmp_path / "out", source="off")

    assert not (directory / "sources.json").exists()
    assert read_sources(directory).files == {}


def test_another_word_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"source.*whole.*functions.*files.*off"):
        dumped(torch.nn.Linear(4, 4), tmp_path / "out", source="whole")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"files": {"a": {}}}',
        '{"files": {}, "classes": {"A": [1]}}',
        '{"files": {}, "classes": {"A": ["a", 1e999, 1]}}',
    ],
)
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "sources.json").write_text(text)

    with pytest.raises(DumpError, match=r"sources\.json cannot be read .* delete it"):
        read_sources(tmp_path)


def test_a_loader_that_fails_costs_the_sources_alone(long_model, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no lines today")

    monkeypatch.setattr("trainermon.dump.writer.sources_text", broken)
    directory = dumped(long_model[0].Gate(), tmp_path / "out")

    info = json.loads((directory / "dump_info.json").read_text())
    assert "no lines today" in info["first_error"]
    assert load_raw(directory).data


@pytest.mark.parametrize("module", [None, 3, property()])
def test_a_class_without_the_name_of_a_module_costs_itself_alone(long_model, module):
    odd = type("Odd", (torch.nn.Module,), {"__module__": module})

    found = json.loads(sources_text([], [odd, long_model[0].Gate], whole_files=False))

    assert list(found["classes"]) == ["Gate"]


@pytest.mark.parametrize("text", ["File /etc/passwd, line 1, in f, \n root", "File /a/b.txt, line 1, in f", "nonsense"])
def test_only_python_is_kept(text, tmp_path):
    assert json.loads(sources_text([text], (), whole_files=True))["files"] == {}


@pytest.mark.parametrize("name", ["<stdin>", "<string>", "<frozen x>"])
def test_of_a_script_that_is_in_no_file_nothing_is_kept_and_its_frames_have_no_secret(name):
    code = "api_key = 'quietriverbend7'\nclass Net:\n    def forward(self):\n        return api_key\n"
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, name, "exec"), space)  # as Python itself runs `-c` and what it reads from stdin
    frame = f"File {name}, line 1, in <module>, \n api_key = 'quietriverbend7'"

    text = sources_text([frame], [space["Net"]], whole_files=True)

    assert json.loads(text) == {"schema": 1, "files": {}, "classes": {}}
    parsed = parse_frame(frame)
    assert parsed is not None
    assert parsed.code == "api_key = '<redacted>'"
