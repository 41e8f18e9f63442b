"""A part that loses its gradient after the start is told, and what is left without one on purpose is not."""

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
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.catalogue import FROZEN_LATER
from trainermon.core.values import Severity
from trainermon.monitor.taps.loop.lost_gradients import AFTER

STEPS, CUT = 70, 30
WEIGHTS = ("weight", "bias")
CONFIG = {"wg_distribution": True, "agent": {"start": False}}


class Network(nn.Module):
    """Three layers; returns the loss of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.deep(x, step).square().mean()

    def deep(self, x: Tensor, step: int, *, cut: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if cut is not None and number == 1 and step >= CUT:
                x = cut(x)
        return x


class Branched(Network):
    """With two heads and three branches; a step uses some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
        self.mixture = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))


class Detached(Network):
    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.deep(x, step, cut=lambda x: x.detach()).square().mean()


class Reloaded(Network):
    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.deep(x, step, cut=lambda x: torch.from_numpy(x.detach().numpy().copy())).square().mean()


class WithoutGraph(Network):
    def forward(self, x: Tensor, step: int) -> Tensor:
        with torch.set_grad_enabled(step < CUT):
            x = self.layers[1](self.layers[0](x))
        return self.layers[2](x).square().mean()


class LossDropped(Branched):
    def forward(self, x: Tensor, step: int) -> Tensor:
        main, other = (head(self.layers[2](x)).square().mean() for head in self.heads)
        return main if step >= CUT else main + other


class LayerDropped(Network):
    def forward(self, x: Tensor, step: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            is_used = number != 1 or (step * 7919) % 100 < (90 if step < CUT else 2)
            x = torch.tanh(layer(x)) if is_used else x
        return x.square().mean()


class TasksInTurns(Branched):
    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.heads[(step // 25) % 2](self.deep(x, step)).square().mean()


class LanguageEnds(Branched):
    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.deep(x, step)
        return sum(head(x).square().mean() for head in self.heads[: 2 if step < CUT else 1])


class NoTokens(Branched):
    def forward(self, x: Tensor, step: int) -> Tensor:
        parts = x.chunk(3) if step < CUT else (*x.chunk(2), x[:0])
        return torch.cat([one(part) for one, part in zip(self.mixture, parts, strict=True)]).square().mean()


class NotCalled(Branched):
    def forward(self, x: Tensor, step: int) -> Tensor:
        used = self.mixture if step < CUT else self.mixture[:2]
        return torch.stack([one(x) for one in used]).mean(0).square().mean()


class Adversaries(Branched):
    """Layers generate, heads judge: they take turns, and what generates runs in both."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        made = self.deep(x, step)
        return self.heads[0](made if step % 2 else made.detach()).square().mean()


class AdversariesInBlocks(Branched):
    def forward(self, x: Tensor, step: int) -> Tensor:
        is_judging = (step // 25) % 2 == 1
        self.heads.requires_grad_(is_judging)
        made = self.deep(x, step)
        return self.heads[0](made.detach() if is_judging else made).square().mean()


def nothing(_model: Network, _optimizer: torch.optim.Optimizer, _step: int) -> None:
    """Do nothing."""


def freeze(model: Network, _optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == CUT:
        model.layers[0].requires_grad_(requires_grad=False)


def freeze_one_after_the_other(model: Network, _optimizer: torch.optim.Optimizer, step: int) -> None:
    if step % 10 == 0 and CUT <= step < CUT + 20:
        model.layers[(step - CUT) // 10].requires_grad_(requires_grad=False)


def freeze_for_a_while(model: Network, _optimizer: torch.optim.Optimizer, step: int) -> None:
    if step in {CUT, CUT + 15}:
        model.layers[0].requires_grad_(requires_grad=step != CUT)


def take_out(model: Network, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == CUT:
        optimizer.param_groups[0]["params"] = [*model.layers[2].parameters()]


Change = Callable[[Network, torch.optim.Optimizer, int], None]


def train(folder: Path, made: type[Network], change: Change = nothing, *, every: int = 1, clears: bool = True) -> Path:
    torch.manual_seed(0)
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"step_interval": every, "output_dir": str(folder), "spool_dir": str(folder)}
    monitor = TrainerMon(CONFIG | settings)
    monitor.set_monitor(model, optimizer)
    for step in range(STEPS * every):
        change(model, optimizer, step // every)
        optimizer.zero_grad(set_to_none=clears)
        loss = model(torch.randn(12, 8), step // every)
        monitor.record(loss=loss)
        loss.backward()
        optimizer.step()
    monitor.close()
    assert not any(module._forward_pre_hooks for module in model.modules())
    return only_spool(folder)


@pytest.mark.parametrize(
    ("made", "lost"),
    [
        (Detached, {"layers.0", "layers.1"}),
        (Reloaded, {"layers.0", "layers.1"}),
        (WithoutGraph, {"layers.0", "layers.1"}),
        (LossDropped, {"heads.1"}),
    ],
)
def test_a_part_that_is_cut_off_after_the_start_is_told(tmp_path: Path, made: type[Network], lost: set[str]) -> None:
    found = alerts_of(written(train(tmp_path, made), 0))

    alert = found["gradient-lost"]
    assert alert.first_step == CUT + AFTER
    assert {finding.series.name for finding in alert.findings} == {f"{one}.{of}" for one in lost for of in WEIGHTS}
    assert f"{2 * len(lost)} trainable parameters have no gradient any more" in alert.message


def test_a_part_that_is_frozen_later_is_noted_once(tmp_path: Path) -> None:
    frozen = {f"layers.0.{of}" for of in WEIGHTS}
    for change in (freeze, freeze_for_a_while):
        steps = written(train(tmp_path / change.__name__, Network, change), 0)

        alert = alerts_of(steps)["parameters-frozen"]

        assert (alert.first_step, alert.severity) == (CUT + AFTER - 1, Severity.INFO)
        assert {finding.series.name for finding in alert.findings} == frozen
        told = [b.step for h, b in steps if FROZEN_LATER in {h.series[i].slot for i in b.series}]
        assert told == [CUT + AFTER - 1]


def test_it_is_told_where_not_every_step_is_collected(tmp_path: Path) -> None:
    found = alerts_of(written(train(tmp_path, Detached, every=3), 0))

    assert found["gradient-lost"].first_step == 3 * (CUT + AFTER)


def test_zeros_in_the_place_of_gradients_are_left_to_the_rule_of_zeros(tmp_path: Path) -> None:
    engine = RuleEngine(load_rules())
    steps = written(train(tmp_path, Detached, clears=False), 0)
    found = {alert.rule for header, block in steps for alert in engine.evaluate(header, header.series, block)}

    assert "gradient-dead" in found
    assert "gradient-lost" not in found


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (Network, nothing),
        (Network, freeze),
        (Network, freeze_one_after_the_other),
        (Network, take_out),
        (LayerDropped, nothing),
        (TasksInTurns, nothing),
        (LanguageEnds, nothing),
        (NoTokens, nothing),
        (NotCalled, nothing),
        (Adversaries, nothing),
        (AdversariesInBlocks, nothing),
    ],
)
def test_what_is_without_a_gradient_on_purpose_is_not_told(tmp_path: Path, made: type[Network], change: Change) -> None:
    assert "gradient-lost" not in alerts_of(written(train(tmp_path, made, change), 0))
