"""A healthy run of a real model gives no alert, from the first step on; a fault in the same run gives one clear alert.

Placeholder rows, first gradients, quickly falling losses and zero-initialised weights are where monitors cry wolf.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.alerts.series import header, row
from tests.journal_rows import spool_named
from trainermon import TrainerMon
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.journal import BlockRecord, HeaderRecord, JournalReader, SeriesRecord
from trainermon.core.values import Alert, Kind, SeriesKey, StatBlock

Fault = Callable[[Any, torch.optim.Optimizer, int], None]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.out(torch.relu(self.fc(self.ln_2(x))))


class TinyGPT(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2, length: int = 32) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.register_buffer("places", torch.arange(length), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(self.places)
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


class Recorder:
    """The rows of one step after the other, in the order in which the series were first seen."""

    def __init__(self) -> None:
        self.keys: list[SeriesKey] = []
        self._rows: dict[SeriesKey, list[float]] = {}

    def note(self, kind: Kind, name: str, tensor: torch.Tensor, slot: str = "") -> None:
        key = SeriesKey(kind, name, slot)
        if key not in self.keys:
            self.keys.append(key)
        self._rows[key] = row(tensor.detach().numpy().ravel())

    def note_call(self, name: str, _: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self.note(Kind.ACTV, name, inputs[0], "input.0")
        self.note(Kind.ACTV, name, output, "output.0")

    def take(self, step: int) -> StatBlock:
        ids = [number for number, key in enumerate(self.keys) if key in self._rows]
        values = np.array([self._rows[self.keys[number]] for number in ids]).T.copy()
        self._rows.clear()
        return StatBlock(step=step, time_s=float(step), series=np.array(ids, np.uint32), values=values)


def losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, fault: Fault
) -> Iterator[tuple[float, torch.Tensor]]:
    """Yield the learning rate and the loss of each step, whose gradients are there and not yet used."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = rate = 3e-3 * min(1.0, (step + 1) / 50) * (1.0 - 0.9 * step / num_steps)
        fault(model, optimizer, step)
        batch = torch.stack([text[at : at + 33] for at in torch.randint(len(text) - 40, (8,))])
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        yield rate, loss


def train(num_steps: int, fault: Fault) -> Iterator[tuple[list[SeriesKey], StatBlock]]:
    torch.manual_seed(0)
    model, recorder = TinyGPT(), Recorder()
    optimizer = torch.optim.AdamW(model.parameters())
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            module.register_forward_hook(partial(recorder.note_call, name))
    for step, (rate, loss) in enumerate(losses(model, optimizer, num_steps, fault)):
        recorder.note(Kind.LOSS, "loss", loss)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
        for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
            recorder.note(Kind.GRAD_REDUCED, name, parameter.grad)
            recorder.note(Kind.PARAM_UPDATED, name, parameter)
            recorder.note(Kind.UPDATE, name, (parameter - old) / rate)
        yield recorder.keys, recorder.take(step)


def no_fault(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def infinite_weight(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 30:
        with torch.no_grad():
            model.get_parameter("h.1.fc.weight")[3, 5] = float("inf")


def huge_rate(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if 120 <= step < 123:
        optimizer.param_groups[0]["lr"] *= 300.0


def alerts(num_steps: int, fault: Fault) -> list[Alert]:
    engine = RuleEngine(load_rules())
    return [alert for keys, block in train(num_steps, fault) for alert in engine.evaluate(header(), keys, block)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


EVERYTHING = {
    "monitor_mbs_grad": True,
    "param_distribution": True,
    "mv_distribution": True,
    "ur_distribution": True,
    "mg_direction": True,
    "xy_distribution": True,
    "recording_l2_features": True,
    "l2_targets": {"attention_hook": ["h.0", "h.1"], "linear_hook": []},
}


def test_healthy_run_gives_no_alert_from_its_first_step_on_whatever_is_collected(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyGPT()
    model.h[1].forward = partial(checkpoint, model.h[1].forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters())
    places = {"spool_dir": str(tmp_path / "spool"), "output_dir": str(tmp_path), "run_id": "run"}
    with TrainerMon({**EVERYTHING, **places, "agent": {"start": False}}) as monitor:
        monitor.set_monitor(model, optimizer)
        for _, loss in losses(model, optimizer, 200, no_fault):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            monitor.record(loss=loss, tokens=256.0)
            optimizer.step()

    engine, keys, found = RuleEngine(load_rules()), [], []
    reader = JournalReader(spool_named(tmp_path / "spool" / "run"), 0)
    while records := reader.poll():
        for record in records:
            if isinstance(record, HeaderRecord):
                keys = list(record.header.series)
            elif isinstance(record, SeriesRecord):
                keys += record.keys
            elif isinstance(record, BlockRecord):
                found += engine.evaluate(header(), keys, record.block)
    assert found == []
    assert {key.kind for key in keys} == set(Kind) - {
        Kind.COMM,
        Kind.STATE,
        Kind.CHECKSUM,
        Kind.BUFFER,
        Kind.PARAM_USED,
    }


def test_weight_that_becomes_infinite_gives_one_alert_on_that_step() -> None:
    assert [(alert.rule, alert.step) for alert in alerts(60, infinite_weight)] == [("gradient-nonfinite", 30)]


def test_rate_that_is_far_too_high_is_found_within_five_steps() -> None:
    found = alerts(128, huge_rate)

    assert found
    assert {alert.rule for alert in found} <= {"loss-spike", "gradient-spike", "activation-spike", "update-spike"}
    assert min(alert.step for alert in found) < 125
