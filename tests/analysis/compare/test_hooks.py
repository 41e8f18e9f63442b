"""A hook that the script registers while a step is dumped changes a gradient after the dump has seen it."""

import pytest
import torch
from torch import nn

from trainermon import PrecisionDebugger
from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import headline
from trainermon.analysis.compare.verdicts import NOT_COMPARED


def dumped(folder, level, factor=1.0, *, is_late=True):
    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    model = nn.Sequential(first, nn.Linear(8, 3))
    debugger = PrecisionDebugger(dump_path=str(folder), level=level, task="statistics")
    if not is_late:
        first.weight.register_hook(lambda gradient: gradient * factor)
    debugger.start(model)
    loss = model(torch.randn(6, 8)).square().mean()
    if is_late:
        first.weight.register_hook(lambda gradient: gradient * factor)
    loss.backward()
    debugger.stop()
    debugger.step()
    debugger.close()
    PrecisionDebugger.close()
    return folder


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_such_a_gradient_is_not_said_to_agree(tmp_path, level):
    (comparison,) = compare(dumped(tmp_path / "a", level, 1.01), dumped(tmp_path / "b", level, is_late=False))

    assert comparison.row_counts()[NOT_COMPARED] == 1
    assert headline(comparison).startswith(
        "1 row was not compared, Module.0.Linear.parameters_grad.0.weight: a hook registered since the dump began may "
        "have changed it in the target"
    )


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_hook_from_before_is_seen(tmp_path, level):
    ours, theirs = (dumped(tmp_path / name, level, factor, is_late=False) for name, factor in (("a", 1.01), ("b", 1.0)))

    (comparison,) = compare(ours, theirs)

    assert not comparison.row_counts()[NOT_COMPARED]
    assert comparison.blamed[0].key == "Module.0.Linear.parameters_grad.0"
