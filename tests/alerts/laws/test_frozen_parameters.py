"""Frozen parameters that go on moving are told, and those that something moves on purpose are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.alerts.laws.test_settings import alerts_of
from tests.alerts.laws.test_trainings import written
from tests.journal_rows import only_spool
from trainermon import TrainerMon

STEPS, FREEZE = 50, 5
FROZEN = {"body.0.weight", "body.0.bias"}
CONFIG = {"wg_distribution": True, "param_distribution": True, "agent": {"start": False}}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.body(x)))
        return logits


class Loop:
    """Freezes the first layer after a few steps."""

    clears = True

    def __init__(self) -> None:
        self.model = Network()
        self.optimizer = self.made_optimizer()

    def made_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)

    def begin(self, step: int) -> None:
        if step == FREEZE:
            self.model.body[0].requires_grad_(requires_grad=False)

    def end(self, step: int) -> None:
        """Do what is done behind the step."""


class MomentumGoesOn(Loop):
    clears = False


class DecayByHand(Loop):
    def end(self, step: int) -> None:
        for p in self.model.parameters():
            p.data.mul_(1 - 1e-3)


class PlainDescent(Loop):
    """Zeros that are left in `.grad` move nothing without momentum and decay."""

    clears = False

    def made_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=1e-2)


class DecayOfTrained(Loop):
    def end(self, step: int) -> None:
        for p in self.model.parameters():
            if p.requires_grad:
                p.data.mul_(1 - 1e-3)


class Teacher(Loop):
    """Holds an average of what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = self.model.body
        self.model.teacher = copy.deepcopy(self.trained).requires_grad_(requires_grad=False)

    def end(self, step: int) -> None:
        with torch.no_grad():
            for old, new in zip(self.model.teacher.parameters(), self.trained.parameters(), strict=True):
                old.lerp_(new, 0.05)


class Statistics(Loop):
    """Running statistics, a code book and a temperature, in parameters."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"mean": (16,), "codes": (8, 4), "temperature": ()}
        for name, shape in shapes.items():
            self.model.register_parameter(name, nn.Parameter(torch.ones(shape), requires_grad=False))

    def end(self, step: int) -> None:
        for name in ("mean", "codes"):
            p = self.model.get_parameter(name)
            p.data = 0.9 * p.data + 0.1 * torch.randn(p.shape)
        self.model.get_parameter("temperature").data.mul_(0.99)


def train(folder: Path, made: Callable[[], Loop]) -> Path:
    torch.manual_seed(0)
    loop = made()
    monitor = TrainerMon(CONFIG | {"output_dir": str(folder), "spool_dir": str(folder)})
    monitor.set_monitor(loop.model, loop.optimizer)
    for step in range(STEPS):
        loop.begin(step)
        loss = (loop.model(torch.randn(16, 8)) - 1).square().mean()
        monitor.record(loss=loss)
        loss.backward()
        loop.optimizer.step()
        loop.end(step)
        loop.optimizer.zero_grad(set_to_none=loop.clears)
    monitor.close()
    return only_spool(folder)


@pytest.mark.parametrize("made", [MomentumGoesOn, DecayByHand])
def test_frozen_parameters_that_go_on_moving_are_told(tmp_path: Path, made: type[Loop]) -> None:
    found = alerts_of(written(train(tmp_path, made), 0))

    assert set(found) == {"frozen-parameters-move"}
    alert = found["frozen-parameters-move"]
    assert alert.first_step == 41  # the second look, seen when the next step begins
    assert {finding.series.name for finding in alert.findings} == FROZEN


@pytest.mark.parametrize("made", [Loop, PlainDescent, DecayOfTrained, Teacher, Statistics])
def test_what_rests_or_is_moved_on_purpose_is_not_told(tmp_path: Path, made: type[Loop]) -> None:
    assert alerts_of(written(train(tmp_path, made), 0)) == {}
