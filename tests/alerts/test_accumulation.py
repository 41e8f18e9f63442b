"""Optimizer steps that come before all batches are accumulated are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.alerts.laws.test_trainings import written
from tests.journal_rows import only_spool
from trainermon import TrainerMon
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.values import Alert, AlertState

CONFIG = {"wg_distribution": True, "agent": {"start": False}}
RULE = "accumulation-cut-short"
EPOCH = 7  # batches


def alerts(folder: Path, *, told: int, accumulated: int, says_rest: bool = True) -> list[Alert]:
    """Train epochs of seven batches; the last step of each has what is left."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with TrainerMon(CONFIG | {"output_dir": str(folder), "spool_dir": str(folder)}) as monitor:
        monitor.set_monitor(model, optimizer, grad_acc_steps=told)
        for batch in range(4 * EPOCH):
            is_last = batch % EPOCH == EPOCH - 1
            if is_last and says_rest:
                monitor.expect_micro_steps(1)
            model(torch.randn(8, 4)).square().mean().backward()
            if is_last or batch % EPOCH % accumulated == accumulated - 1:
                optimizer.step()
                optimizer.zero_grad()
    engine = RuleEngine(load_rules())
    found = [
        alert
        for header, block in written(only_spool(folder), 0)
        for alert in engine.evaluate(header, header.series, block)
    ]
    return [alert for alert in found if alert.rule == RULE and alert.state is AlertState.FIRING]


def test_steps_before_all_batches_are_told_on_the_third(tmp_path: Path) -> None:
    (found,) = alerts(tmp_path, told=3, accumulated=1)

    assert (found.first_step, found.step) == (0, 2)
    assert "the last 3 optimizer steps were made without 2 of the batches" in found.message


@pytest.mark.parametrize("says_rest", [True, False])
@pytest.mark.parametrize(("told", "accumulated"), [(2, 2), (3, 3), (1, 1), (1, 3)])
def test_nothing_is_said_of_steps_that_have_what_was_said(
    tmp_path: Path, told: int, accumulated: int, *, says_rest: bool
) -> None:
    assert alerts(tmp_path, told=told, accumulated=accumulated, says_rest=says_rest) == []
