"""No call shows what the model's own forward does: where all calls agree, a difference in its results is found."""

import pytest
import torch
from torch import nn

from trainermon import PrecisionDebugger
from trainermon.cli import main

DIFFERS = 3


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(8, 8), nn.Linear(8, 3), factor

    def forward(self, given):
        return {"scores": self.last(self.first(given)) * self.factor}


def dumped(folder, task, factor, scale=1.0):
    torch.manual_seed(0)
    model = Scaled(factor)
    debugger = PrecisionDebugger(dump_path=str(folder), level="L0", task=task)
    debugger.start(model)
    with torch.no_grad():
        model(torch.randn(6, 8) * scale)
    debugger.stop()
    debugger.step()
    debugger.close()
    PrecisionDebugger.close()
    return str(folder)


def answer(capsys, *words):
    code = main([*words, "--exit-code"])
    return code, capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_a_result_that_the_model_scales_is_found(tmp_path, capsys, monkeypatch, task):
    monkeypatch.chdir(tmp_path)
    ours, theirs = dumped(tmp_path / "a", task, 1.1), dumped(tmp_path / "b", task, 1.0)

    words = "The first difference arose in Module.root.Scaled.forward.0: its results differ by 0.091 of their size"
    for command in ("compare", "graph"):
        code, said = answer(capsys, command, ours, theirs)
        assert code == DIFFERS
        assert said.startswith(words)
    code, said = answer(capsys, "diagnose", ours, "--against", theirs)
    assert code == DIFFERS
    assert said.startswith("The run first differs from the reference")


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_rounding_of_its_calls_is_none_of_its_own(tmp_path, capsys, monkeypatch, task):
    monkeypatch.chdir(tmp_path)
    ours, theirs = dumped(tmp_path / "a", task, 1.0, 1 + 2e-7), dumped(tmp_path / "b", task, 1.0)

    code, said = answer(capsys, "compare", ours, theirs)

    assert code == 0
    assert said.startswith("The dumps agree")
