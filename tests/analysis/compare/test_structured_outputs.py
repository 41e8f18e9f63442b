"""What a module returns in a structure of any kind is compared, by every tool that compares dumps."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon import PrecisionDebugger
from trainermon.cli import main

DIFFERS, PARTLY_COMPARED = 3, 4


class NamedPair(NamedTuple):
    hidden: object
    scale: object


@dataclasses.dataclass
class DataPair:
    hidden: object
    scale: object


class PlainPair:
    def __init__(self, hidden, scale):
        self.hidden, self.scale = hidden, scale


STRUCTURES = {
    "named tuple": lambda hidden: NamedPair(hidden, 2.0),
    "packed sequence": lambda hidden: nn.utils.rnn.pack_sequence([hidden]),
    "dataclass": lambda hidden: DataPair(hidden, 2.0),
    "dict in a tuple": lambda hidden: ({"hidden": hidden}, None),
    "named tuple in a list": lambda hidden: [NamedPair(hidden, 2.0)],
    "object": lambda hidden: PlainPair(hidden, 2.0),
    "object in an object": lambda hidden: PlainPair([PlainPair(hidden, 2.0)], 2.0),
    "dataclass in a named tuple": lambda hidden: NamedPair(DataPair(hidden, 2.0), 2.0),
}
TOOLS = {
    "compare": lambda ours, theirs: ["compare", ours, theirs],
    "graph": lambda ours, theirs: ["graph", ours, theirs],
    "diagnose": lambda ours, theirs: ["diagnose", ours, "--against", theirs],
}


class Returning(nn.Module):
    def __init__(self, structure, factor):
        super().__init__()
        self.structure, self.factor = structure, factor

    def forward(self, given):
        return self.structure(given * self.factor)


class Around(nn.Module):
    """Uses nothing of what the module within returns: a difference is in that alone."""

    def __init__(self, structure, factor):
        super().__init__()
        self.within, self.last = Returning(structure, factor), nn.Linear(4, 2)

    def forward(self, given):
        self.within(given)
        return self.last(given)


def dumped(folder, structure, factor=1.0):
    torch.manual_seed(0)
    model = Around(structure, factor)
    debugger = PrecisionDebugger(dump_path=str(folder), level="L0", task="statistics")
    debugger.start(model)
    model(torch.randn(5, 4)).sum().backward()
    debugger.stop()
    debugger.step()
    debugger.close()
    return str(folder)


def outcome(capsys, tool, tmp_path):
    code = main([*TOOLS[tool](str(tmp_path / "ours"), str(tmp_path / "theirs")), "--exit-code"])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_difference_in_it_is_found(tmp_path, capsys, monkeypatch, tool, name):
    monkeypatch.chdir(tmp_path)
    dumped(tmp_path / "ours", STRUCTURES[name], factor=7.0)
    dumped(tmp_path / "theirs", STRUCTURES[name])

    code, said = outcome(capsys, tool, tmp_path)

    assert "within" in said
    assert code == DIFFERS


@pytest.mark.parametrize("tool", TOOLS)
def test_a_dump_of_msprobe_is_read_alike(tmp_path, capsys, monkeypatch, tool):
    monkeypatch.chdir(tmp_path)
    for name, value in (("ours", 7.0), ("theirs", 1.0)):
        pair = {"hidden": tensor(value=value), "scale": {"type": "float", "value": 2.0}}
        call = forward(tensor(), output=None) | {"output": pair}
        write_dump(tmp_path / name / "step0/rank0", {"Module.within.Returning.forward.0": call})

    code, said = outcome(capsys, tool, tmp_path)

    assert "within" in said
    assert code == DIFFERS


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_dump_cannot_see_into_does_not_agree(tmp_path, capsys, monkeypatch, tool):
    monkeypatch.chdir(tmp_path)
    dumped(tmp_path / "ours", lambda hidden: {hidden}, factor=7.0)
    dumped(tmp_path / "theirs", lambda hidden: {hidden})

    code, said = outcome(capsys, tool, tmp_path)

    assert "not compared" in said
    assert code == PARTLY_COMPARED
