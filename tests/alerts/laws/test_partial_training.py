"""Trainings of some layers at a time, which are sound: nothing is said of them, and they are watched to their end."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.alerts.laws.test_settings import alerts_of
from tests.alerts.laws.test_trainings import written
from tests.journal_rows import only_spool
from trainermon import TrainerMon

STEPS, EVERY = 80, 25
CONFIG = {
    "wg_distribution": True,
    "mv_distribution": True,
    "param_distribution": True,
    "ur_distribution": True,
    "agent": {"start": False},
}


class Stack(nn.Module):
    """Four layers between an embedding and a head, which learn a permutation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.head = nn.Linear(8, 32)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits

    def parts(self) -> Sequence[nn.Module]:
        """Return all parts, from the input on."""
        return [self.embed, *self.layers, self.head]


class Schedule:
    """What trains: all of it, throughout; others are subclasses."""

    def __init__(self, model: Stack) -> None:
        self.model = model
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def begin(self, step: int) -> None:
        """Freeze and unfreeze what is due."""


class SampledLayers(Schedule):
    """Every so often another layer, at random, beside embedding and head."""

    def begin(self, step: int) -> None:
        if step % EVERY == 0:
            chosen = random.Random(step).randrange(4)
            for number, layer in enumerate(self.model.layers):
                layer.requires_grad_(number == chosen)
            self.chosen()

    def chosen(self) -> None:
        """Tell the optimizer."""


class SampledWithoutMomentum(SampledLayers):
    """Zeros in the place of gradients move nothing then."""

    def __init__(self, model: Stack) -> None:
        super().__init__(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class SampledAnew(SampledLayers):
    """With a group and a state of its own for what is trained."""

    def chosen(self) -> None:
        self.optimizer.state.clear()
        self.optimizer.param_groups[0]["params"] = [p for p in self.model.parameters() if p.requires_grad]


class Blocks(Schedule):
    """One block at a time and nothing else; the others were frozen before the monitor began."""

    def __init__(self, model: Stack) -> None:
        super().__init__(model)
        self.begin(0)

    def begin(self, step: int) -> None:
        for number, part in enumerate(reversed(self.model.parts())):
            part.requires_grad_(number == step // 15 % 6)


class BlocksByGroup(Schedule):
    """All require a gradient, and the optimizer's only group holds one block at a time."""

    def begin(self, step: int) -> None:
        if step % 15 == 0:
            trained = [self.model.embed, self.model.layers[step // 15 % 4], self.model.head]
            self.optimizer.param_groups[0]["params"] = [p for part in trained for p in part.parameters()]


class GraduallyUnfrozen(Schedule):
    """From the head down, a part every so often, with a group of a lower rate."""

    def __init__(self, model: Stack) -> None:
        super().__init__(model)
        model.requires_grad_(requires_grad=False)
        model.head.requires_grad_()
        self.optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)

    def begin(self, step: int) -> None:
        if step and step % 12 == 0 and step // 12 < 6:
            part = [*reversed(self.model.parts())][step // 12].requires_grad_()
            self.optimizer.add_param_group({"params": [*part.parameters()], "lr": 1e-2 / 2.6 ** (step // 12)})


class GraduallyFrozen(Schedule):
    """From the input up, each part when the schedule of its rate has ended."""

    def __init__(self, model: Stack) -> None:
        super().__init__(model)
        groups = [{"params": [*part.parameters()], "lr": 0.1} for part in model.parts()]
        self.optimizer = torch.optim.SGD(groups, momentum=0.9)

    def begin(self, step: int) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            end = STEPS * (0.301 + 0.7 * number / 5)
            group["lr"] = 0.05 * (1 + math.cos(math.pi * step / end)) if step < end else 0.0
            if step >= end:
                self.model.parts()[number].requires_grad_(requires_grad=False)


SOUND = (SampledLayers, SampledAnew, Blocks, BlocksByGroup, GraduallyUnfrozen, GraduallyFrozen)


def train(
    folder: Path, made: Callable[[Stack], Schedule], *, every: int = 1, accumulated: int = 1, clears: bool = True
) -> Path:
    torch.manual_seed(0)
    schedule = made(Stack())
    settings = {"step_interval": every, "output_dir": str(folder), "spool_dir": str(folder)}
    monitor = TrainerMon(CONFIG | settings)
    monitor.set_monitor(schedule.model, schedule.optimizer, grad_acc_steps=accumulated)
    draw = torch.Generator().manual_seed(1)
    to = torch.randperm(32, generator=draw)
    for step in range(STEPS):
        schedule.begin(step)
        for _ in range(accumulated):
            ids = torch.randint(0, 32, (32,), generator=draw)
            loss = nn.functional.cross_entropy(schedule.model(ids), to[ids]) / accumulated
            if every == 1:
                monitor.record(loss=loss)
            loss.backward()
        schedule.optimizer.step()
        schedule.model.zero_grad(set_to_none=clears)
    monitor.close()
    return only_spool(folder)


def noted(made: type[Schedule]) -> set[str]:
    """Return the note, which is no warning, on parts that are frozen for good."""
    return {"parameters-frozen"} if made is GraduallyFrozen else set()


@pytest.mark.parametrize("made", SOUND)
def test_nothing_is_said_of_layers_that_take_turns(tmp_path: Path, made: type[Schedule]) -> None:
    assert set(alerts_of(written(train(tmp_path, made), 0))) == noted(made)


@pytest.mark.parametrize("made", [SampledWithoutMomentum, GraduallyFrozen])
def test_nor_of_the_zeros_that_a_loop_leaves_in_frozen_ones(tmp_path: Path, made: type[Schedule]) -> None:
    assert set(alerts_of(written(train(tmp_path, made, clears=False), 0))) == noted(made)


@pytest.mark.parametrize("made", [SampledLayers, Blocks])
def test_they_are_watched_where_not_every_step_is_collected(tmp_path: Path, made: type[Schedule]) -> None:
    steps = written(train(tmp_path, made, every=4), 0)

    assert [block.step for _, block in steps] == [*range(0, STEPS, 4)]
    assert alerts_of(steps) == {}


def test_backwards_of_what_was_unfrozen_later_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps = written(train(tmp_path, Blocks, accumulated=2), 0)

    assert len(steps) == STEPS
    assert alerts_of(steps) == {}
    assert "backward passes that were seen" not in caplog.text


def test_a_layer_that_is_cut_off_while_others_take_turns_is_told(tmp_path: Path) -> None:
    class Cut(SampledLayers):
        def __init__(self, model: Stack) -> None:
            model.register_parameter("unused", nn.Parameter(torch.ones(4)))
            super().__init__(model)

    alert = alerts_of(written(train(tmp_path, Cut), 0))["parameter-without-gradient"]

    assert {finding.series.name for finding in alert.findings} == {"unused"}
