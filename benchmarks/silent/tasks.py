"""Batches of tasks that tiny models learn in some dozens of steps; each depends on step, micro step and rank alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional

from benchmarks.silent.loop import rank_of_job
from benchmarks.silent.models import CLASSES, LENGTH, NODES, NUMBERS, SIDE, VOCABULARY

BATCH = 16
_fixed = Generator().manual_seed(0)
_TEMPLATES = torch.randn(CLASSES, 1, SIDE, SIDE, generator=_fixed)
_CENTRES = 1.5 * torch.randn(CLASSES, NUMBERS, generator=_fixed)
_NEXT = torch.randperm(VOCABULARY, generator=_fixed)
_SLOPE = torch.randn(NUMBERS, generator=_fixed) / NUMBERS**0.5


def drawn(step: int, micro: int, rank: int | None = None) -> Generator:
    """Return the random numbers of a micro step of a rank."""
    mine = rank_of_job() if rank is None else rank
    return Generator().manual_seed(10_000 * (mine + 1) + 100 * step + micro)


def images(step: int, micro: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Return noisy templates `[BATCH, 1, SIDE, SIDE]` and their classes."""
    generator = drawn(step, micro, rank)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return _TEMPLATES[labels] + 0.6 * torch.randn(BATCH, 1, SIDE, SIDE, generator=generator), labels


def table(step: int, micro: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Return rows `[BATCH, NUMBERS]` around a centre of each class, and their classes."""
    generator = drawn(step, micro, rank)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return _CENTRES[labels] + torch.randn(BATCH, NUMBERS, generator=generator), labels


def words(step: int, micro: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Return ids `[BATCH, LENGTH]` of which each follows from the one before nine times of ten, and the next ids."""
    generator = drawn(step, micro, rank)
    ids = [torch.randint(VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        stray = torch.randint(VOCABULARY, (BATCH,), generator=generator)
        ids.append(torch.where(torch.rand(BATCH, generator=generator) < 0.9, _NEXT[ids[-1]], stray))
    text = torch.stack(ids, 1)
    return text[:, :-1], text[:, 1:]


def graphs(step: int, micro: int, rank: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return nodes, edges, and as target `[BATCH, 1]` what neighbours say of each other."""
    generator = drawn(step, micro, rank)
    nodes = torch.randn(BATCH, NODES, NUMBERS, generator=generator)
    edges = (torch.rand(BATCH, NODES, NODES, generator=generator) < 0.4).float()
    target = (edges / edges.sum(-1, keepdim=True).clamp(min=1) @ nodes + nodes).mean(1) @ _SLOPE
    return nodes, edges, 3 * target[:, None] + 2


def classified(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a classifier."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def continued(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a language model."""
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def continued_with_experts(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a language model with experts, auxiliary loss included."""
    return continued(model, batch) + 0.02 * model.imbalance


def regressed(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the loss of a graph network."""
    return functional.mse_loss(model(batch[0], batch[1]), batch[2])
