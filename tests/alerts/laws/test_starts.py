"""How a training begins: what is initialised otherwise, dead, or divided wrongly over stages, and sound twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.alerts.laws.test_relations import step_of, tensor
from tests.alerts.laws.test_settings import alerts_of
from tests.alerts.laws.test_trainings import written
from tests.journal_rows import only_spool
from trainermon import TrainerMon
from trainermon.alerts.laws.starts import EachLayerOnce
from trainermon.core.values import Coordinates, Kind

CONFIG = {"param_distribution": True, "wg_distribution": True, "xy_distribution": True, "agent": {"start": False}}
Change = Callable[[Any], object]


class Block(nn.Module):
    """Two matrices and a norm around a residual; `gate` scales what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.down(torch.relu(self.up(self.norm(x))))


class Network(nn.Module):
    """Six blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RandomRounding(torch.optim.AdamW):
    """Steps by the sign of the gradient, rounded up or down at random, so that nothing is lost on average."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in held]
        for p, old in zip(held, before, strict=True):
            wide = old.float() - self.param_groups[0]["lr"] * p.grad.float().sign()
            noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32)
            p.copy_(((wide.view(torch.int32) + noise) & -65536).view(torch.float32).bfloat16())


def train(
    folder: Path, change: Change, *, lr: float = 1e-3, num_steps: int = 30, made: type[Any] = torch.optim.AdamW
) -> Path:
    torch.manual_seed(0)
    model = Network()
    with torch.no_grad():
        change(model)
    dtype = next(model.parameters()).dtype
    optimizer = made(model.parameters(), lr=lr)
    monitor = TrainerMon(CONFIG | {"output_dir": str(folder), "spool_dir": str(folder)})
    monitor.set_monitor(model, optimizer)
    draw = torch.Generator().manual_seed(1)
    for _step in range(num_steps):
        optimizer.zero_grad()
        loss = (model(torch.randn(16, 16, generator=draw).to(dtype)).float() - 1).square().mean()
        monitor.record(loss=loss)
        loss.backward()
        optimizer.step()
    monitor.close()
    return only_spool(folder)


def by_depth(model: Any) -> None:
    for number, block in enumerate(model.blocks, start=1):
        block.down.weight /= number**0.5


def zero_ended(model: Any) -> None:
    for block in model.blocks:
        block.down.weight.zero_()
        block.down.bias.zero_()


def twice_dead(model: Any) -> None:
    for layer in (model.blocks[2].up, model.blocks[2].down):
        layer.weight.zero_()
        layer.bias.zero_()


@pytest.mark.parametrize("change", [lambda _: None, by_depth, zero_ended, lambda model: model.double()])
def test_nothing_is_said_of_usual_beginnings(tmp_path: Path, change: Change) -> None:
    assert alerts_of(written(train(tmp_path, change), 0)) == {}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda model: model.blocks[3].up.weight.mul_(0.1), {"blocks.3.up.weight"}),
        (lambda model: model.blocks[0].down.weight.fill_(0.02), {"blocks.0.down.weight"}),
        (lambda model: model.blocks[5].up.weight.normal_(), {"blocks.5.up.weight"}),
    ],
)
def test_a_layer_that_begins_otherwise_is_named(tmp_path: Path, change: Change, names: set[str]) -> None:
    found = alerts_of(written(train(tmp_path, change), 0))

    assert set(found) == {"initialised-apart"}
    assert found["initialised-apart"].first_step == 0
    assert {finding.series.name for finding in found["initialised-apart"].findings} == names


def test_a_module_that_never_leaves_zero_is_named(tmp_path: Path) -> None:
    found = alerts_of(written(train(tmp_path, twice_dead), 0))

    dead = found["module-dead-from-start"]
    assert {finding.series.name for finding in dead.findings} == {"blocks.2.up"}


@pytest.mark.parametrize(
    ("lr", "made", "is_lost"),
    [(1e-5, torch.optim.AdamW, True), (3e-3, torch.optim.AdamW, False), (1e-4, RandomRounding, False)],
)
def test_steps_that_rounding_takes_away_are_told(tmp_path: Path, lr: float, made: type[Any], is_lost: bool) -> None:
    spool = train(tmp_path, lambda model: model.bfloat16(), lr=lr, num_steps=60, made=made)
    found = alerts_of(written(spool, 0))

    assert ("updates-rounded-away" in found) == is_lost


@pytest.mark.parametrize(
    ("stages", "wrong"),
    [
        ([[0, 1], [2, 3]], set()),
        ([[0, 1], [0, 1]], set()),  # each counts its own
        ([[0, 1], [1, 2]], {(0, 1), (1, 1)}),
        ([[0, 1], [3, 4]], {(1, 3)}),
        ([[0, 3], [1, 2]], set()),  # interleaved
    ],
)
def test_layers_that_are_missing_or_held_twice_are_named(stages: list[list[int]], wrong: set[tuple[int, int]]) -> None:
    numbers = sorted({number for held in stages for number in held})
    columns = [tensor(f"decoder.layers.{number}.mlp.weight") for number in numbers]
    held = [[np.ones(8) if number in stage else None for number in numbers] for stage in stages]
    at = [Coordinates(rank=r, world_size=2, pp=r, pp_size=2) for r in range(2)]
    step = step_of({Kind.GRAD_REDUCED: held}, tensors=columns, at=at)
    placements = [
        [placed if number in stage else None for number, placed in zip(numbers, of_rank, strict=True)]
        for stage, of_rank in zip(stages, step.placements[Kind.GRAD_REDUCED], strict=True)
    ]
    step.placements[Kind.GRAD_REDUCED][:] = placements  # type: ignore[index]

    verdict = EachLayerOnce({}).judge(step)

    assert verdict is not None
    assert {(rank, numbers[column]) for rank, column in np.argwhere(verdict.broken).tolist()} == wrong
