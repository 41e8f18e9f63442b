"""A dump that is cut off, or that lost an entry to an error, is never taken for a whole one: every tool says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainermon import PrecisionDebugger
from trainermon.cli import main
from trainermon.dump import encode
from trainermon.dump.files.reader import gap_notes, read_dump

_COMMANDS = {
    "compare": ["compare", "{a}", "{b}", "-o", "{out}"],
    "compared with it": ["compare", "{b}", "{a}", "-o", "{out}"],
    "graph": ["graph", "{a}"],
    "graph of both": ["graph", "{b}", "{a}"],
    "check": ["check", "run", "{a}"],
}


def _dump(folder: Path) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    debugger = PrecisionDebugger(dump_path=str(folder), level="mix", task="tensor")
    debugger.start(model)
    model(torch.randn(3, 4)).sum().backward()
    debugger.stop()
    debugger.step()
    debugger.close()
    return folder / "step0" / "rank0"


def _cut(folder: Path) -> Path:
    """Return a dump as a killed process leaves it: whole lines in the partial file, and half a line."""
    whole = _dump(folder)
    data = json.loads((whole / "dump.json").read_text())["data"]
    lines = [json.dumps({"key": key, "value": value}) for key, value in data.items()]
    first = json.dumps({"info": {"task": "tensor", "level": "mix", "complete": False}})
    (whole / "dump.partial.jsonl").write_text("\n".join([first, *lines[:-1], lines[-1][:20]]))
    (whole / "dump.json").unlink()
    return whole


def _without_an_entry(folder: Path) -> Path:
    """Return a dump whose dump.json lacks an entry, while the tensors of that entry are there."""
    whole = _dump(folder)
    dumped = json.loads((whole / "dump.json").read_text())
    del dumped["data"]["Functional.relu.0.forward"]
    (whole / "dump.json").write_text(json.dumps(dumped))
    return whole


def _with_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a dump in which one tensor, of shape [3, 2], cannot be described."""
    described = encode.tensor_form

    def refusing(tensor: torch.Tensor) -> object:
        if tuple(tensor.shape) == (3, 2):
            raise RuntimeError("a tensor that nobody can describe")
        return described(tensor)

    with monkeypatch.context() as patched:
        patched.setattr(encode, "tensor_form", refusing)
        return _dump(folder)


@pytest.mark.parametrize("command", _COMMANDS)
@pytest.mark.parametrize("gap", ["cut off", "not whole"])
def test_every_tool_names_the_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gap: str, command: str
) -> None:
    broken = _cut(tmp_path / "a") if gap == "cut off" else _with_an_error(tmp_path / "a", monkeypatch)
    whole = _dump(tmp_path / "b")
    capsys.readouterr()
    words = [word.format(a=broken, b=whole, out=tmp_path / "out") for word in _COMMANDS[command]]

    main(words)

    assert f"{broken} is {gap}" in capsys.readouterr().out
    assert gap_notes(whole) == ()


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_tool_counts_the_tensors_that_no_entry_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = [
        word.format(a=_without_an_entry(tmp_path / "a"), b=_dump(tmp_path / "b"), out=tmp_path / "out")
        for word in _COMMANDS[command]
    ]
    capsys.readouterr()

    status = main([*words, "--exit-code"])

    assert "dump_tensor_data has 2 files that no entry names" in capsys.readouterr().out
    assert status == (4 if command == "check" else status)


def test_a_dump_that_lost_an_entry_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = read_dump(_with_an_error(tmp_path / "a", monkeypatch))
    whole = read_dump(_dump(tmp_path / "b"))

    assert broken.info.errors > 0
    assert (broken.info.complete, broken.info.cut_off) == (False, False)
    assert (whole.info.complete, whole.info.errors) == (True, 0)
