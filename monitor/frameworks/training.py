"""What the rest of the monitor needs to know of a training set-up, whatever framework made it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from trainermon.monitor.taps.gradients import Parameter
from trainermon.monitor.taps.modules import Module


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model and its optimizer as a framework holds them.

    Attributes:
        framework: Its name, for people.
        model: The model as the training loop calls it; the first of its stages.
        roots: The modules whose forwards make up the model's, below any wrapper that communicates.
        modules: Every module below the roots, in definition order.
        parameters: Every parameter that requires a gradient.
        optimizer: The optimizer whose step ends a training step.
        reduces_now: Tells, at the end of a backward, whether its gradients were averaged over ranks; None where they
            never are.
    """

    framework: str
    model: nn.Module
    roots: tuple[nn.Module, ...]
    modules: tuple[Module, ...]
    parameters: tuple[Parameter, ...]
    optimizer: torch.optim.Optimizer
    reduces_now: Callable[[], bool] | None
