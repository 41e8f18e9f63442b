"""A model of tables: embedded categories and numbers, mixed by an MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.families.family import Batch, Family

BATCH, NUMBERS, CATEGORIES, LEVELS = 64, 8, 4, 50


class TabularMlp(nn.Module):
    """Categories, most of whose levels are rare, and numbers through three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(LEVELS, 4) for _ in range(CATEGORIES))
        self.norm = nn.LayerNorm(NUMBERS)
        width = NUMBERS + 4 * CATEGORIES
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, numbers: Tensor, levels: Tensor) -> Tensor:
        embedded = [embed(levels[:, i]) for i, embed in enumerate(self.embed)]
        value: Tensor = self.head(self.mlp(torch.cat([self.norm(numbers), *embedded], -1)))
        return value.squeeze(-1)


def rows(generator: Generator) -> Batch:
    """Return `numbers` `[BATCH, NUMBERS]`, `levels` `[BATCH, CATEGORIES]`, low ones often, and `targets`."""
    numbers = torch.randn(BATCH, NUMBERS, generator=generator)
    levels = (torch.rand(BATCH, CATEGORIES, generator=generator) ** 3 * LEVELS).long()
    targets = numbers[:, 0] * numbers[:, 1] + (levels % 3).float().sum(1) + 0.1 * numbers.sum(1)
    return {"numbers": numbers, "levels": levels, "targets": targets}


def _error(model: Any, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch["numbers"], batch["levels"]), batch["targets"])


TABULAR = (Family(name="tabular", build=TabularMlp, draw=rows, loss=_error),)
