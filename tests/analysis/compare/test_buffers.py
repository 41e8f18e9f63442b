"""Buffers that a checkpoint has are compared as they stood before a module's first forward."""

import pytest
import torch
from torch import nn

from trainermon import PrecisionDebugger
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import headline


class Centred(nn.Module):
    """Keeps a state that nothing reads, one that no checkpoint has, and a normalisation's."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("centre", torch.ones(8))
        self.register_buffer("cache", torch.ones(8), persistent=False)

    def forward(self, given):
        return self.last(self.norm(self.first(given)))


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Centred()

    def forward(self, given):
        return self.net(given)


def dumped(folder, *, buffer="", weight=1.0, batches=2, level="L0"):
    torch.manual_seed(0)
    model = Around()
    with torch.no_grad():
        model.net.first.weight *= weight
        if buffer:
            model.net.get_buffer(buffer)[2] = 1.5
    debugger = PrecisionDebugger(dump_path=str(folder), level=level, task="statistics")
    debugger.start(model)
    for _ in range(batches):
        model(torch.randn(6, 4)).square().sum().backward()
    debugger.stop()
    debugger.step()
    debugger.close()
    return folder


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize(
    ("buffer", "key"),
    [("centre", "Module.net.Centred.forward.0"), ("norm.running_var", "Module.net.norm.BatchNorm1d.forward.0")],
)
def test_one_that_differs_is_named(tmp_path, buffer, key, level):
    ours, theirs = dumped(tmp_path / "a", buffer=buffer, level=level), dumped(tmp_path / "b", level=level)

    (comparison,) = compare(ours, theirs)

    said = headline(comparison)
    assert said.startswith(f"The first difference came in with {key}.buffers.{buffer.rpartition('.')[2]}")
    assert "the buffer differs by" in said


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_those_that_the_step_itself_makes_are_not_to_blame(tmp_path, level):
    (alike,) = compare(dumped(tmp_path / "a", weight=1 + 1e-6, level=level), dumped(tmp_path / "b", level=level))
    (apart,) = compare(dumped(tmp_path / "c", weight=1.1, level=level), tmp_path / "b")

    assert headline(alike).startswith("The dumps agree")
    assert not any(call.origin.startswith("buffers") for call in apart.blamed)


def test_one_that_no_checkpoint_has_is_made_from_the_model_s_settings(tmp_path):
    (comparison,) = compare(dumped(tmp_path / "a", buffer="cache"), dumped(tmp_path / "b"))

    assert headline(comparison).startswith("The dumps agree")
