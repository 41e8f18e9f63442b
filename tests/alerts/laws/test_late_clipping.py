"""Clipping behind the optimizer's step is told, and what sound loops do to gradients is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.alerts.laws.test_settings import alerts_of
from tests.alerts.laws.test_steps import Loop, train
from tests.alerts.laws.test_trainings import written

LIMIT = 0.01


class ClippedLate(Loop):
    def after(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)


class ClippedLateByHand(Loop):
    def after(self, step: int) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient *= min(1.0, LIMIT / norm.item())


class ValuesClippedLate(Loop):
    def after(self, step: int) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), LIMIT / 100)


class ClippedBetweenStepAndClear(ClippedLate):
    """Clears behind the next forward, as many loops do."""

    def loss(self, step: int) -> torch.Tensor:
        loss = super().loss(step)
        self.optimizer.zero_grad()
        return loss

    def clear(self) -> None:
        """Do nothing: too early."""


class Clipped(Loop):
    limit = LIMIT

    def update(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
        super().update(step)


class ClippedTwice(Clipped):
    def update(self, step: int) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), LIMIT)
        super().update(step)


class ClippedAgain(Clipped):
    """Clips once more, to the same norm: nothing changes."""

    def after(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)


class Logged(Clipped):
    """Has the norm told behind the step."""

    def after(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), math.inf)


class NotReached(Loop):
    def after(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e6)


class ZerosInPlace(Clipped):
    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)


class ClearedBehind(Clipped):
    def after(self, step: int) -> None:
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)


class KeptInPart(Loop):
    """Carries a part of the gradient over, on purpose."""

    def clear(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class UsedForAnother(Clipped):
    """Another loss has its gradient before the next step, and is clipped for an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def after(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT / 10)
        self.other.step()


class WithScaler(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def update(self, step: int) -> None:
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad.mul_(self.scaler.get_scale())  # as of a loss that was scaled
        self.scaler.scale(torch.ones(()))
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize("made", [ClippedLate, ClippedLateByHand, ValuesClippedLate, ClippedBetweenStepAndClear])
def test_clipping_behind_the_step_is_told(tmp_path: Path, made: type[Loop]) -> None:
    found = alerts_of(written(train(tmp_path, made), 0))

    assert set(found) == {"clipped-too-late"}
    assert found["clipped-too-late"].first_step == 3  # the third time, seen when the next step begins


@pytest.mark.parametrize(
    "made",
    [
        Clipped,
        ClippedTwice,
        ClippedAgain,
        Logged,
        NotReached,
        ZerosInPlace,
        ClearedBehind,
        KeptInPart,
        UsedForAnother,
        WithScaler,
    ],
)
def test_what_sound_loops_do_to_gradients_is_not_told(tmp_path: Path, made: type[Loop]) -> None:
    assert "clipped-too-late" not in alerts_of(written(train(tmp_path, made), 0))
