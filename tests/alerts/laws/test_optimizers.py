"""What the optimizer holds: a parameter that nobody steps is told, and one that another optimizer steps is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.alerts.laws.test_settings import alerts_of
from tests.alerts.laws.test_trainings import written
from tests.journal_rows import only_spool
from trainermon import TrainerMon

CONFIG = {"param_distribution": True, "wg_distribution": True, "agent": {"start": False}}


def train(folder: Path, left_out: str) -> Path:
    """Train a model of two layers whose second one is left out of the watched optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if left_out == "frozen":
        model[2].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
    other = torch.optim.SGD(model[2].parameters(), lr=1e-3)
    monitor = TrainerMon(CONFIG | {"output_dir": str(folder), "spool_dir": str(folder)})
    monitor.set_monitor(model, optimizer)
    for step in range(30):
        model.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean()
        monitor.record(loss=loss)
        loss.backward()
        if left_out == "another's" or (left_out == "another's, rarely" and step % 5 == 0):
            other.step()
        optimizer.step()
    monitor.close()
    return only_spool(folder)


@pytest.mark.parametrize("left_out", ["forgotten", "another's", "another's, rarely", "frozen"])
def test_parameters_that_no_optimizer_steps_are_told(tmp_path: Path, left_out: str) -> None:
    found = alerts_of(written(train(tmp_path, left_out), 0))

    assert set(found) == ({"parameters-not-stepped"} if left_out == "forgotten" else set())
    for alert in found.values():
        assert {finding.series.name for finding in alert.findings} == {"2.weight", "2.bias"}


@pytest.mark.parametrize("is_replaced", [True, False])
def test_the_note_says_whether_the_optimizer_holds_what_the_model_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_replaced: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters() if is_replaced else model[0].parameters())
    if is_replaced:
        model[1] = nn.Linear(4, 2)
    with TrainerMon(CONFIG | {"output_dir": str(tmp_path), "spool_dir": str(tmp_path)}) as monitor:
        monitor.set_monitor(model, optimizer)

    assert "2 of 4 parameters that require a gradient are in no group" in caplog.text
    assert ("it holds 2 others" in caplog.text) == is_replaced
