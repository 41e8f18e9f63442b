"""Small models of five families, and a step of one recorded as a dump: what pairs of dumps are made of."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trainermon import PrecisionDebugger
from trainermon.dump.function_modes import put_in, take_out


class Block(nn.Module):
    """Attention-less mixing, then a gated product; both are added to what came in."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden):
        hidden = hidden + self.drop(self.mix(self.norm(hidden)))
        return hidden + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList([Block(16) for _ in range(3)])
        self.head = nn.Linear(16, 40)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), ids.roll(1, 1).flatten())

    @staticmethod
    def batch(size):
        return torch.arange(size * 12).reshape(size, 12) * 7 % 40


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.1), nn.Identity())
        self.out = nn.Linear(8, 10)

    def forward(self, images):
        hidden = functional.relu(self.norm(self.stem(images)))
        hidden = self.body(hidden) + hidden
        return functional.cross_entropy(self.out(hidden.mean((2, 3))).float(), torch.arange(len(images)) % 10)

    @staticmethod
    def batch(size):
        return torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(4))


class Table(nn.Module):
    """Two towers over the same columns, their product, and a click that it foretells."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 8))
        self.right = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Identity(), nn.Linear(24, 8))
        self.out = nn.Linear(8, 1)

    def forward(self, rows):
        score = self.out(self.left(rows) * self.right(rows)).squeeze(-1)
        return functional.binary_cross_entropy_with_logits(score.float(), (torch.arange(len(rows)) % 2).float())

    @staticmethod
    def batch(size):
        return torch.randn(4 * size, 12, generator=torch.Generator().manual_seed(4))


class Series(nn.Module):
    """One cell, called at each of four times."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.full((16,), 0.1))
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(6, 16)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(16, 6)

    def forward(self, series):
        state = self.start.expand(len(series), 16)
        for time in range(4):
            state = torch.tanh(self.drop(self.inner(state)) + self.outer(series[:, time]))
        return functional.mse_loss(self.out(state).float(), series[:, -1].float())

    @staticmethod
    def batch(size):
        return torch.randn(4 * size, 5, 6, generator=torch.Generator().manual_seed(4))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden):
        return self.down(functional.silu(self.gate(hidden)))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.router = nn.Linear(16, 3)
        self.drop = nn.Dropout(0.1)
        self.experts = nn.ModuleList([Expert() for _ in range(3)])
        self.head = nn.Linear(16, 40)

    def forward(self, ids):
        hidden = self.drop(self.embed(ids)).flatten(0, 1)
        weights, chosen = self.router(hidden).softmax(-1).max(-1)
        result = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            (at,) = torch.where(chosen == number)
            result = result.index_add(0, at, expert(hidden[at]) * weights[at, None])
        return functional.cross_entropy(self.head(hidden + result).float(), ids.roll(1, 1).flatten())

    batch = staticmethod(Language.batch)


FAMILIES = {kind.__name__.lower(): kind for kind in (Language, Images, Table, Series, Experts)}


def build(family, *, train=False):
    """Return a family's model with seeded weights, by default as in evaluation: dropout returns what it is given."""
    torch.manual_seed(1)
    return FAMILIES[family]().train(train)


class Changed(TorchFunctionMode):
    """Changes what functions return before a dump sees it: `change(name, result)` of each tensor."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return self.change(func.__name__, result) if isinstance(result, torch.Tensor) else result


def record(folder, model, *, level="mix", change=None, size=2, steps=1, lr=0.0, dtype=torch.float32):
    """Record steps of a model below `folder`, and return it; `size` is that of the batch.

    `change(name, result)` returns what a function is to return instead.
    """
    batch = model.batch(size)
    batch = batch.to(dtype) if batch.is_floating_point() else batch
    model = model.to(dtype)
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    debugger = PrecisionDebugger(dump_path=str(folder), level=level, task="tensor", step=list(range(steps)))
    for _ in range(steps):
        debugger.start(model)
        mode = Changed(change) if change else None
        if mode:
            put_in(mode)  # below the dump's own
        optimiser.zero_grad()
        model(batch).backward()
        if mode:
            take_out(mode)
        debugger.stop()
        optimiser.step()
        debugger.step()
    debugger.close()
    return folder
