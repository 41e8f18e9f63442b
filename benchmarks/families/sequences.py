"""Models of sequences without attention: an LSTM and a state space model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.families import text
from benchmarks.families.family import Batch, Family

WIDTH, STATES = 32, 8


class Lstm(nn.Module):
    """Two layers of LSTM between embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(text.VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(WIDTH, text.VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embed(ids))[0])
        return logits


class Selective(nn.Module):
    """A selective state space layer, its recurrence written out step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.x_proj, self.dt_proj = nn.Linear(WIDTH, 2 * STATES + 1, bias=False), nn.Linear(1, WIDTH)
        self.A_log = nn.Parameter(torch.arange(1.0, STATES + 1).log().repeat(WIDTH, 1))
        self.D = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        u = functional.silu(self.conv(u.mT)[..., : x.shape[1]].mT)
        dt, b, c = self.x_proj(u).split([1, STATES, STATES], -1)
        dt = functional.softplus(self.dt_proj(dt))
        decay, drive = torch.exp(-dt[..., None] * self.A_log.exp()), (dt * u)[..., None] * b[:, :, None]
        state, outputs = torch.zeros_like(drive[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            outputs.append((state * c[:, t, None]).sum(-1))
        y: Tensor = self.out_proj((torch.stack(outputs, 1) + self.D * u) * functional.silu(gate))
        return x + y


class StateSpace(nn.Module):
    """Selective layers between embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(text.VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Selective() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, text.VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _next_token(model: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten())


SEQUENCES = (
    Family(name="lstm", build=Lstm, draw=text.continued, loss=_next_token, rate=1e-2),
    Family(name="mamba", build=StateSpace, draw=text.continued, loss=_next_token),
)
