"""An argument that puts a result in another order, which its statistics do not show, is the cause of what follows."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from trainermon import PrecisionDebugger
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import headline

CHANGES = {
    "flip": lambda x, dim: x.flip(dim),
    "roll": lambda x, dim: x.roll(1, dim),
    "sort": lambda x, dim: x.sort(dim)[0],
    "argmax": lambda x, dim: x * x.argmax(dim, keepdim=True),
    "softmax": lambda x, dim: functional.softmax(x, dim=dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim),
}


class Between(nn.Module):
    def __init__(self, change, dim, scale=1.0):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.change, self.dim, self.scale = change, dim, scale

    def forward(self, x):
        x = self.first(x)
        x = self.change(x, self.dim)
        return self.last(x.reshape(-1, 6)) * self.scale


def dumped(folder, change, dim, level, **arguments):
    torch.manual_seed(0)
    model = Between(change, dim, **arguments)
    debugger = PrecisionDebugger(dump_path=str(folder), level=level, task="statistics")
    debugger.start(model)
    model(torch.randn(6, 6, 6)).pow(2).sum().backward()
    debugger.stop()
    debugger.step()
    debugger.close()
    return folder


def answer(tmp_path, change, dims, level="L1", **arguments):
    ours = dumped(tmp_path / "a", change, dims[0], level, **arguments)
    theirs = dumped(tmp_path / "b", change, dims[1], level)
    (comparison,) = compare(ours, theirs)
    return comparison


@pytest.mark.parametrize("level", ["L1", "mix"])
@pytest.mark.parametrize("name", CHANGES)
def test_it_is_named_before_what_it_changed(tmp_path, name, level):
    comparison = answer(tmp_path, CHANGES[name], (0, 2), level)

    said = headline(comparison)
    assert f".{name}.0.forward" in said.partition(" was given ")[0]
    assert " was given 0, where the golden dump has 2 (input." in said
    assert f".{name}.0.forward" in comparison.blamed[0].key


@pytest.mark.parametrize("dims", [(-1, 2), (2, -1)])
def test_one_dimension_by_two_numbers_changes_nothing(tmp_path, dims):
    comparison = answer(tmp_path, CHANGES["flip"], dims, scale=1.5)

    assert " was given 1.5, where the golden dump has 1.0" in headline(comparison)
    assert not [call for call in comparison.blamed if "flip" in call.key]


def test_alone_it_is_said_and_blames_nothing(tmp_path):
    """Nothing shows that it matters."""
    comparison = answer(tmp_path, lambda x, dim: x.flip(dim)[:0], (0, 2))

    assert not comparison.blamed
    assert "flip.0.forward on, which was given 0, where the golden dump has 2 (input." in headline(comparison)


def test_what_a_module_gives_a_function_in_it_is_named(tmp_path):
    for side, dim in (("a", 0), ("b", 1)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Softmax(dim), nn.Linear(6, 2))
        debugger = PrecisionDebugger(dump_path=str(tmp_path / side), level="mix", task="statistics")
        debugger.start(model)
        model(torch.randn(6, 6)).sum().backward()
        debugger.stop()
        debugger.step()
        debugger.close()
    (comparison,) = compare(tmp_path / "a", tmp_path / "b")

    said = "The first difference: Functional.softmax.0.forward in 1 (Softmax) was given 0, where the golden dump has 1 "
    assert headline(comparison).startswith(f"{said}(input.dim), called in ")


class Given(nn.Module):
    """Is given settings, and uses them outside of functions."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 6)

    def forward(self, given, **settings):
        return self.last(given)


class Giving(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.inner, self.settings = Given(), settings

    def forward(self, given):
        return self.inner(given, **self.settings)


@pytest.mark.parametrize("shape", [(6,), (6, 6)])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((False, True), "which was given False, where the golden dump has True (input.setting)"),
        ((3, 1), "which was given 3, where the golden dump has 1 (input.setting)"),
        ((0.5, 0.25), "which was given 0.5, where the golden dump has 0.25 (input.setting)"),
        ((torch.ones(2), torch.zeros(2)), "which was given other inputs (input.setting)"),
    ],
)
def test_a_setting_that_nothing_shows_is_named_with_both_values(tmp_path, values, words, shape):
    for name, value in zip("ab", values, strict=True):
        torch.manual_seed(0)
        model = Giving({"setting": value})
        debugger = PrecisionDebugger(dump_path=str(tmp_path / name), level="L0", task="statistics")
        debugger.start(model)
        model(torch.randn(shape)).sum().backward()
        debugger.stop()
        debugger.close()
        PrecisionDebugger.close()

    (comparison,) = compare(tmp_path / "a", tmp_path / "b")

    assert f"Module.inner.Given.forward.0 on, {words}" in headline(comparison)
