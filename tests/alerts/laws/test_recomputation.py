"""Activation checkpointing that does not repeat the forward is told; every sound use of it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.alerts.laws.test_settings import alerts_of
from tests.alerts.laws.test_trainings import written
from tests.journal_rows import only_spool
from trainermon import TrainerMon

Again = Callable[[nn.Module, torch.Tensor], torch.Tensor]
RULE = "recomputation-differs"
WIDTH = 64


class Block(nn.Module):
    """Two matrices with a dropout between them, around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.relu(self.up(x))))


class Network(nn.Module):
    """Blocks that are called through `again`."""

    def __init__(self, again: Again, *, calls: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.again, self.calls = again, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self.blocks) * self.calls:
            x = self.again(block, x) if self.training else block(x)
        return self.head(x)


def without_state(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def without_state_reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True, preserve_rng_state=False)


def reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)


def not_reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def nested(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: checkpoint(block, y, use_reentrant=False), x, use_reentrant=False)


class _Plainly(torch.autograd.Function):
    """Recomputes a block as a backward would that knows nothing of autocast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        ctx.block, ctx.kept = block, (x.detach(), torch.get_rng_state())
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        x, state = ctx.kept
        with torch.enable_grad(), torch.random.fork_rng():
            torch.set_rng_state(state)
            ctx.block(x.requires_grad_()).backward(gradient)
        return x.grad, None


def other_type(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return _Plainly.apply(x, block)


class Counted:
    """Scales what a block returns by how often it was called, a global that the forward reads."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def scaled(y: torch.Tensor) -> torch.Tensor:
            self.times += 1
            return block(y * (1.0 + 0.01 * (self.times % 5)))

        return checkpoint(scaled, x, use_reentrant=False)


def train(folder: Path, again: Again, *, calls: int = 1, micro_steps: int = 1, autocast: bool = False) -> Path:
    """Train on random inputs with dropout, and evaluate in between."""
    torch.manual_seed(0)
    model = Network(again, calls=calls)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"xy_distribution": True, "agent": {"start": False}}
    monitor = TrainerMon(config | {"output_dir": str(folder), "spool_dir": str(folder)})
    monitor.set_monitor(model, optimizer, grad_acc_steps=micro_steps)
    for _ in range(25):
        optimizer.zero_grad()
        for _ in range(micro_steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(16, WIDTH, requires_grad=True)).float().square().mean()
            loss.backward()
        monitor.record(loss=loss)
        optimizer.step()
        with torch.no_grad():
            model.eval()(torch.randn(4, WIDTH))
            model.train()
    monitor.close()
    return only_spool(folder)


@pytest.mark.parametrize("again", [without_state, without_state_reentrant, other_type, Counted()])
def test_what_is_computed_otherwise_in_the_backward_is_told_on_the_first_step(tmp_path: Path, again: Again) -> None:
    found = alerts_of(written(train(tmp_path, again, autocast=again is other_type), 0))

    assert RULE in found
    assert found[RULE].first_step == 0
    assert all(finding.series.name.startswith("blocks.") for finding in found[RULE].findings)


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("again", [reentrant, not_reentrant, nested])
@pytest.mark.parametrize("autocast", [False, True])
def test_nothing_is_said_of_what_is_repeated(tmp_path: Path, again: Again, micro_steps: int, autocast: bool) -> None:
    steps = written(train(tmp_path, again, micro_steps=micro_steps, autocast=autocast), 0)

    repeated = [key for key in steps[-1][0].series if key.kind == "actv_recomputed"]
    assert {key.name for key in repeated} >= {f"blocks.{n}.up" for n in range(3)}
    assert {key.micro_step for key in repeated} == ({None} if micro_steps == 1 else set(range(micro_steps)))
    assert RULE not in alerts_of(steps)


def test_modules_that_are_called_twice_are_not_judged(tmp_path: Path) -> None:
    assert RULE not in alerts_of(written(train(tmp_path, not_reentrant, calls=2), 0))


@pytest.mark.parametrize(("interval", "steps"), [(20, [0, 20]), (5, [0, 5, 10, 15, 20]), (0, [])])
def test_it_is_read_at_the_interval_of_checksums(tmp_path: Path, interval: int, steps: list[int]) -> None:
    torch.manual_seed(0)
    model = Network(not_reentrant)
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"xy_distribution": True, "checksum_interval": interval, "agent": {"start": False}}
    with TrainerMon(config | {"output_dir": str(tmp_path), "spool_dir": str(tmp_path)}) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(21):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()

    shown = [
        block.step
        for header, block in written(only_spool(tmp_path), 0)
        if any(header.series[number].kind == "actv_recomputed" for number in block.series)
    ]
    assert shown == steps
