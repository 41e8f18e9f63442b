"""Several steps with one batch, as with rollouts, are made on purpose; batches that a loader yields twice are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.alerts.laws.test_settings import alerts_of
from tests.alerts.laws.test_trainings import written
from tests.journal_rows import only_spool
from trainermon import TrainerMon

STEPS = 60
CONFIG = {"wg_distribution": True, "xy_distribution": True, "agent": {"start": False}}


def kept(number: int) -> Iterator[Tensor]:
    while True:
        batch = torch.randn(16, 8)
        yield from [batch] * number


def of_workers(number: int) -> Iterator[Tensor]:
    return (batch.clone() for batch in kept(number))


def refilled(number: int) -> Iterator[Tensor]:
    """One tensor for all batches, as pinned memory is."""
    place = torch.empty(16, 8)
    return (place.copy_(batch) for batch in kept(number))


def in_inference_mode(number: int) -> Iterator[Tensor]:
    while True:
        with torch.inference_mode():
            batch = torch.randn(16, 8)
        yield from [batch] * number


def train(folder: Path, batches: Iterator[Tensor], *, is_frozen: bool = False) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model[0].requires_grad_(not is_frozen)  # what computes without a gradient takes tensors of inference mode
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = TrainerMon(CONFIG | {"output_dir": str(folder), "spool_dir": str(folder)})
    monitor.set_monitor(model, optimizer)
    for _, batch in zip(range(STEPS), batches, strict=False):
        with torch.no_grad():
            model(batch)
        loss = (model(batch) - 1).square().mean()
        monitor.record(loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    monitor.close()
    return only_spool(folder)


@pytest.mark.parametrize("number", [2, 3, 4, 10])
def test_several_steps_with_each_batch_are_meant(tmp_path: Path, number: int) -> None:
    assert alerts_of(written(train(tmp_path, kept(number)), 0)) == {}


def test_tensors_of_inference_mode_are_taken_as_others(tmp_path: Path) -> None:
    steps = written(train(tmp_path, in_inference_mode(2), is_frozen=True), 0)

    assert len(steps) == STEPS
    assert alerts_of(steps) == {}


@pytest.mark.parametrize("batches", [of_workers, refilled])
@pytest.mark.parametrize("number", [2, 4])
def test_numbers_that_come_again_in_other_tensors_are_told(tmp_path: Path, batches: type, number: int) -> None:
    assert set(alerts_of(written(train(tmp_path, batches(number)), 0))) == {"inputs-come-twice"}
