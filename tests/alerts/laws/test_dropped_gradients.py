"""Gradients that are cleared within a step, or never, are told, and what sound loops do with them is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.alerts.laws.test_settings import alerts_of
from tests.alerts.laws.test_trainings import written
from tests.journal_rows import only_spool
from trainermon import TrainerMon

STEPS, FROM, MICRO = 30, 10, 4
CONFIG = {"wg_distribution": True, "param_distribution": True, "agent": {"start": False}}
RULE = "gradients-thrown-away"


class Accumulation:
    """A sound training of several micro steps a step; what a script does otherwise is a method of a subclass."""

    told = MICRO

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)

    def loss(self) -> Tensor:
        loss: Tensor = (self.model(torch.randn(16, 8)) - 1).square().mean() / MICRO
        return loss

    def micro_step(self, step: int, number: int) -> None:
        self.loss().backward()

    def step(self, step: int) -> None:
        for number in range(MICRO):
            self.micro_step(step, number)
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class ClearsEach(Accumulation):
    def micro_step(self, step: int, number: int) -> None:
        if step >= FROM:
            self.optimizer.zero_grad()
        self.loss().backward()


class ClearsEachAndClips(ClearsEach):
    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        super().update()


class ClearsInTheMiddle(Accumulation):
    def micro_step(self, step: int, number: int) -> None:
        if step >= FROM and number == 2:
            self.model.zero_grad()
        self.loss().backward()


class Clips(Accumulation):
    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        super().update()


class Epochs(Accumulation):
    """An epoch has six batches: the two that are left over are thrown away, or make a smaller step."""

    is_smaller = False

    def step(self, step: int) -> None:
        super().step(step)
        for number in range(2):
            self.micro_step(step, number)
        if self.is_smaller:
            self.update()
        self.optimizer.zero_grad()


class SmallerSteps(Epochs):
    is_smaller = True


class SharpnessAware(Accumulation):
    """Goes over the micro steps once more where the weights have been moved to; or says that a step has all of them."""

    def step(self, step: int) -> None:
        held = [p.detach().clone() for p in self.model.parameters()]
        for number in range(MICRO):
            self.micro_step(step, number)
        with torch.no_grad():
            for p in self.model.parameters():
                assert p.grad is not None
                p.add_(p.grad, alpha=0.05)
        self.optimizer.zero_grad()
        for number in range(MICRO):
            self.micro_step(step, number)
        with torch.no_grad():
            for p, old in zip(self.model.parameters(), held, strict=True):
                p.copy_(old)
        self.update()


class SharpnessAwareTold(SharpnessAware):
    told = 2 * MICRO


class PutTogether(Accumulation):
    """Keeps the gradients of each micro step, as to project them, and writes into `.grad` what it makes of them."""

    def step(self, step: int) -> None:
        kept = []
        for number in range(MICRO):
            self.optimizer.zero_grad()
            self.micro_step(step, number)
            kept.append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])
        for p, parts in zip(self.model.parameters(), zip(*kept, strict=True), strict=True):
            self.put(p, torch.stack(parts).sum(0))
        self.update()

    def put(self, parameter: Tensor, gradient: Tensor) -> None:
        parameter.grad = gradient


class PutInPlace(PutTogether):
    def put(self, parameter: Tensor, gradient: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(gradient)


class BySets(Accumulation):
    """Asks autograd for gradients and sets them, so that there is nothing to clear."""

    told = 1

    def step(self, step: int) -> None:
        parameters = [*self.model.parameters()]
        for parameter, gradient in zip(parameters, torch.autograd.grad(self.loss(), parameters), strict=True):
            parameter.grad = gradient
        self.optimizer.step()


class PenaltyOfGradients(Accumulation):
    """Asks for gradients before those of the last step are cleared, in place."""

    told = 1

    def step(self, step: int) -> None:
        loss = self.loss()
        gradients = torch.autograd.grad(loss, [*self.model.parameters()], create_graph=True)
        self.optimizer.zero_grad(set_to_none=False)
        (loss + sum(gradient.square().sum() for gradient in gradients)).backward()
        self.optimizer.step()


class NeverClears(Accumulation):
    def update(self) -> None:
        self.optimizer.step()


def train(folder: Path, made: Callable[[], Accumulation]) -> Path:
    loop = made()
    monitor = TrainerMon(CONFIG | {"output_dir": str(folder), "spool_dir": str(folder)})
    monitor.set_monitor(loop.model, loop.optimizer, loop.told)
    for step in range(STEPS):
        loop.step(step)
    monitor.close()
    return only_spool(folder)


@pytest.mark.parametrize(("made", "number"), [(ClearsEach, 3), (ClearsEachAndClips, 3), (ClearsInTheMiddle, 2)])
def test_gradients_of_micro_steps_that_are_thrown_away_are_told(
    tmp_path: Path, made: Callable[[], Accumulation], number: int
) -> None:
    found = alerts_of(written(train(tmp_path, made), 0))

    assert set(found) == {RULE}
    assert found[RULE].first_step == FROM
    assert f"uses nothing of {number} of them" in found[RULE].message


def test_gradients_that_are_never_cleared_are_still_told(tmp_path: Path) -> None:
    assert set(alerts_of(written(train(tmp_path, NeverClears), 0))) == {"gradients-not-cleared"}


@pytest.mark.parametrize(
    "made",
    [
        Accumulation,
        Clips,
        Epochs,
        SmallerSteps,
        SharpnessAware,
        SharpnessAwareTold,
        PutTogether,
        PutInPlace,
        BySets,
        PenaltyOfGradients,
    ],
)
def test_what_sound_loops_do_with_gradients_is_not_told(tmp_path: Path, made: Callable[[], Accumulation]) -> None:
    assert alerts_of(written(train(tmp_path, made), 0)) == {}
