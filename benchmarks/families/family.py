"""What a family of models is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Generator, Tensor, nn

Batch = dict[str, Tensor]


def nothing(model: nn.Module, batch: Batch) -> None:
    """Do nothing after a step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of model with a task that it can learn.

    Attributes:
        name: Its name in tables.
        build: Returns a fresh model, whose weights depend on torch's seed alone.
        draw: Returns a batch that depends on the generator alone.
        loss: Returns the mean loss of a batch: one forward of the model, from its root.
        rate: A learning rate for AdamW with which it learns in some hundred steps.
        after_step: What training does beside the optimizer's step, on the batch of the step.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[Generator], Batch]
    loss: Callable[[Any, Batch], Tensor]
    rate: float = 3e-3
    after_step: Callable[[Any, Batch], None] = nothing
