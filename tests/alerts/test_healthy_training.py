"""A healthy run of a real model gives no alert, from the first step on; a fault in the same run gives one clear alert.

Placeholder rows, first gradients, quickly falling losses and zero-initialised weights are where monitors cry wolf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.monitor.values import Alert, Coordinates, Kind, SeriesKey, StatBlock

HEADER: Any = SimpleNamespace(attempt=0, coordinates=Coordinates())
Fault = Callable[[nn.Module, int], None]


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


def moments(tensor: torch.Tensor) -> list[float]:
    values = tensor.detach().numpy().astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    some = finite.size > 0
    least, most = (finite.min(), finite.max()) if some else (np.inf, -np.inf)
    nans, infs = np.isnan(values).sum(), np.isinf(values).sum()
    return [values.size, least, most, finite.sum(), (finite**2).sum(), (values == 0).sum(), nans, infs]


def steps(num_steps: int, *, seed: int, fault: Fault | None = None) -> Iterator[tuple[list[SeriesKey], StatBlock]]:
    torch.manual_seed(seed)
    text = torch.frombuffer(bytearray(open(argparse_source(), "rb").read()), dtype=torch.uint8).long()
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keys: list[SeriesKey] = []
    ids: dict[SeriesKey, int] = {}
    rows: dict[int, list[float]] = {}

    def note(kind: Kind, name: str, tensor: torch.Tensor, slot: str = "") -> None:
        key = SeriesKey(kind, name, slot)
        if key not in ids:
            ids[key] = len(keys)
            keys.append(key)
        rows[ids[key]] = moments(tensor)

    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            module.register_forward_hook(
                lambda _, inputs, output, name=name: (
                    (
                        note(Kind.ACTV, name, inputs[0], "input.0"),
                        note(Kind.ACTV, name, output, "output.0"),
                    )[2:]
                    or None
                )
            )
    for step in range(num_steps):
        rows.clear()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50) * (1.0 - 0.9 * step / num_steps)
        if fault:
            fault(model, step)
        begin = torch.randint(len(text) - 40, (8,))
        batch = torch.stack([text[at : at + 33] for at in begin])
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        note(Kind.LOSS, "loss", loss)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            note(Kind.GRAD_REDUCED, name, parameter.grad)
        optimizer.step()
        for name, parameter in model.named_parameters():
            note(Kind.PARAM_UPDATED, name, parameter)
            note(Kind.UPDATE, name, (parameter - before[name]) / optimizer.param_groups[0]["lr"])
        order = sorted(rows)
        values = np.array([rows[index] for index in order]).T.copy()
        yield keys, StatBlock(step=step, time_s=float(step), series=np.array(order, np.uint32), values=values)


def argparse_source() -> str:
    import argparse

    return argparse.__file__


def alerts(num_steps: int, *, seed: int = 0, fault: Fault | None = None) -> list[Alert]:
    engine = RuleEngine(load_rules())
    found = []
    for keys, block in steps(num_steps, seed=seed, fault=fault):
        found += engine.evaluate(HEADER, keys, block)
    return found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_healthy_run_gives_no_alert() -> None:
    assert alerts(250) == []
