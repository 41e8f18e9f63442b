"""Steps that are made twice or undone are told, and what sound loops do between steps is not."""

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

STEPS, FROM = 40, 10
CONFIG = {"wg_distribution": True, "param_distribution": True, "agent": {"start": False}}
State = dict[str, Tensor]


class Loop:
    """A sound training; what a script does otherwise is a method of a subclass."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.model.register_parameter("scale", self.scale)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.batch = torch.randn(16, 8)
        self.saved = self.copied()
        self.old = self.saved["2.weight"]

    def loss(self, step: int) -> Tensor:
        return self.loss_of(torch.randn(16, 8))

    def loss_of(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.model(batch) * self.scale - 1).square().mean()
        return loss

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def update(self, step: int) -> None:
        self.optimizer.step()

    def after(self, step: int) -> None:
        """Do what is done at the end of a step."""

    def copied(self) -> State:
        return copy.deepcopy(self.model.state_dict())


class TwiceEach(Loop):
    def update(self, step: int) -> None:
        self.optimizer.step()
        if step >= FROM:
            self.optimizer.step()


class TwiceAtTimes(Loop):
    def update(self, step: int) -> None:
        self.optimizer.step()
        if step >= FROM and step % 4 == 0:
            self.optimizer.step()


class OldCopy(Loop):
    """One layer is written over by what it was in the beginning, after each second step."""

    def after(self, step: int) -> None:
        if step == FROM:
            self.old = self.copied()["2.weight"]
        if step > FROM and step % 2 == 0:
            with torch.no_grad():
                self.model.get_parameter("2.weight").copy_(self.old)


class OldCopyByData(OldCopy):
    def after(self, step: int) -> None:
        if step == FROM:
            self.old = self.copied()["2.weight"]
        if step > FROM and step % 3 == 0:
            self.model.get_parameter("2.weight").data = self.old.clone()


class OneBatch(Loop):
    def loss(self, step: int) -> Tensor:
        return self.loss_of(self.batch)


class OneBatchWithoutRate(OneBatch):
    def update(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.0 if step < FROM else 1e-2
        self.optimizer.step()


class ZerosInPlace(OneBatch):
    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)


class SharpnessAware(Loop):
    """Each step has two backwards: one before the weights are moved, one where they are."""

    def update(self, step: int) -> None:
        held = self.copied()
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(p.grad, alpha=0.05)
        self.optimizer.zero_grad()
        self.loss(step).backward()
        self.model.load_state_dict(held)
        self.optimizer.step()


class SwappedForEvaluation(Loop):
    def after(self, step: int) -> None:
        held = self.copied()
        self.model.load_state_dict({name: tensor * 0.99 for name, tensor in held.items()})
        with torch.no_grad():
            self.model(self.batch)
        self.model.load_state_dict(held)


class Lookahead(Loop):
    def after(self, step: int) -> None:
        if step == 0:
            self.slow = self.copied()
        if step % 5 == 4:
            now = self.copied()
            self.slow = {name: tensor + 0.5 * (now[name] - tensor) for name, tensor in self.slow.items()}
            self.model.load_state_dict(self.slow)


class Averaged(Loop):
    def after(self, step: int) -> None:
        if step == FROM:
            self.mean = self.copied()
        if step == STEPS - 4:
            self.model.load_state_dict({name: (tensor + self.mean[name]) / 2 for name, tensor in self.copied().items()})


class Clamped(Loop):
    """As a temperature that may not grow, and a critic whose weights lie at their bounds."""

    def after(self, step: int) -> None:
        with torch.no_grad():
            self.scale.clamp_(max=2.0)
            for p in self.model[0].parameters():
                p.copy_(p.sign() * 0.05)


class RolledBack(Loop):
    """Takes back all of a step after a spike of the loss, three times in a row."""

    def after(self, step: int) -> None:
        if FROM <= step < FROM + 6 and step % 2:
            self.model.load_state_dict(self.saved)
        self.saved = self.copied()


class Reloaded(Loop):
    def after(self, step: int) -> None:
        if step == FROM:
            self.saved = self.copied()
        if step == FROM + 10:
            self.model.load_state_dict(self.saved)


class Accumulated(Loop):
    """Steps after each second backward, and clears then."""

    def update(self, step: int) -> None:
        self.loss(step).backward()
        self.optimizer.step()


class WithClosure(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=1e-2, max_iter=2)

    def update(self, step: int) -> None:
        def closure() -> float:
            self.optimizer.zero_grad()
            loss = self.loss(step)
            loss.backward()
            return loss.item()

        self.optimizer.step(closure)


def train(folder: Path, made: Callable[[], Loop]) -> Path:
    loop = made()
    monitor = TrainerMon(CONFIG | {"output_dir": str(folder), "spool_dir": str(folder)})
    monitor.set_monitor(loop.model, loop.optimizer)
    for step in range(STEPS):
        loop.clear()
        loss = loop.loss(step)
        monitor.record(loss=loss)
        loss.backward()
        loop.update(step)
        loop.after(step)
    monitor.close()
    return only_spool(folder)


@pytest.mark.parametrize(
    ("made", "rule", "first_step"),
    [
        (TwiceEach, "steps-repeated", FROM + 1),
        (TwiceAtTimes, "steps-repeated", FROM + 3),  # the first one after it that is a multiple of four
        (OldCopy, "parameters-undone", FROM + 5),  # the second time in eight steps
        (OldCopyByData, "parameters-undone", FROM + 6),
    ],
)
def test_steps_that_are_made_twice_or_undone_are_told(
    tmp_path: Path, made: Callable[[], Loop], rule: str, first_step: int
) -> None:
    found = alerts_of(written(train(tmp_path, made), 0))

    assert set(found) == {rule}
    assert found[rule].first_step == first_step
    if rule == "parameters-undone":
        assert {finding.series.name for finding in found[rule].findings} == {"2.weight"}


class FlippedBit(Loop):
    def after(self, step: int) -> None:
        if step == 2:  # long before any usual range is known
            self.model.get_parameter("2.weight").data.view(torch.int32)[1, 1] ^= 1 << 30


class ScaledGradient(Loop):
    """Plain SGD, whose step shows the size of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)

    def update(self, step: int) -> None:
        gradient = self.model.get_parameter("2.weight").grad
        if step == 2 and gradient is not None:
            gradient *= 65536.0**2
        self.optimizer.step()


@pytest.mark.parametrize(("made", "first_step"), [(FlippedBit, 3), (ScaledGradient, 2)])
def test_a_parameter_that_leaps_is_told_from_the_start(
    tmp_path: Path, made: Callable[[], Loop], first_step: int
) -> None:
    found = alerts_of(written(train(tmp_path, made), 0))

    assert found["parameter-leap"].first_step == first_step
    assert {finding.series.name for finding in found["parameter-leap"].findings} >= {"2.weight"}


class FromZero(Loop):
    """A low-rank pair and a scale, some of which begin at zero, and a rate that warms up from zero."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for name in ("2.weight", "2.bias"):
                self.model.get_parameter(name).zero_()
            self.scale.fill_(1e-6)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def update(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 1e-2 * step / STEPS
        super().update(step)


class FromZeroBySGD(FromZero):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    "made",
    [
        Loop,
        FromZero,
        FromZeroBySGD,
        OneBatch,
        OneBatchWithoutRate,
        ZerosInPlace,
        SharpnessAware,
        SwappedForEvaluation,
        Lookahead,
        Averaged,
        Clamped,
        RolledBack,
        Reloaded,
        Accumulated,
        WithClosure,
    ],
)
def test_what_sound_loops_do_between_steps_is_not_told(tmp_path: Path, made: Callable[[], Loop]) -> None:
    told = {"steps-repeated", "parameters-undone", "parameter-leap"}
    assert not told & set(alerts_of(written(train(tmp_path, made), 0)))
