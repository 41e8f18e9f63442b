"""Healthy programs whose weights move, or stand still, in other ways than by one optimizer's step."""

from __future__ import annotations

import copy

import torch

from benchmarks.silent.case import silent
from benchmarks.silent.loop import Loop
from benchmarks.silent.models import ConvNet
from benchmarks.silent.plain_optimizer import classifier


@silent(
    "hard",
    "Mean teacher, timm's ModelEma",
    "an average of the weights is kept in a copy, and put in and taken out again for an evaluation every ten steps",
    None,
)
def averaged_copy(*, broken: bool) -> Loop:  # noqa: ARG001
    loop = classifier(model := ConvNet())
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def after(step: int) -> None:
        for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(0.9 * mean + 0.1 * value if mean.is_floating_point() else value)
        if step % 10 == 9:
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(average.state_dict())
            model.eval()
            model(loop.batch(1000, 0)[0])
            model.train()
            model.load_state_dict(own)

    loop.after = after
    return loop
