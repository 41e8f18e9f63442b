"""Batches of a text that every Python has, and of a task of translation made from it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Generator, Tensor

from benchmarks.families.family import Batch

BATCH, LENGTH, VOCABULARY = 16, 16, 128
PAD = 0
_TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=VOCABULARY - 1)


def continued(generator: Generator) -> Batch:
    """Return `ids` and the `targets` that follow them, each `[BATCH, LENGTH]` int64."""
    rows = _rows(generator, LENGTH + 1)
    return {"ids": rows[:, :-1], "targets": rows[:, 1:]}


def masked(generator: Generator) -> Batch:
    """Return `ids` of which some are replaced by PAD, and `targets`, -100 where nothing was replaced."""
    rows = _rows(generator, LENGTH)
    hidden = torch.rand(rows.shape, generator=generator) < 0.2
    hidden[:, 0] = True  # a row without a target would have no loss
    return {"ids": rows.masked_fill(hidden, PAD), "targets": rows.masked_fill(~hidden, -100)}


def reversed_pairs(generator: Generator) -> Batch:
    """Return `ids` padded to several lengths, their `mask`, and as `targets` the same text backwards."""
    rows = _rows(generator, LENGTH)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    ids = rows.masked_fill(~mask, PAD)
    return {"ids": ids, "mask": mask.long(), "targets": rows.flip(1).masked_fill(~mask.flip(1), -100)}


def _rows(generator: Generator, length: int) -> Tensor:
    starts = torch.randint(len(_TEXT) - length, (BATCH,), generator=generator)
    return _TEXT[starts[:, None] + torch.arange(length)]
