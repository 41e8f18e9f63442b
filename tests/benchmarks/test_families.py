"""Models on which rules and diagnoses are judged: they learn, and a seed says what they are."""

import pytest
import torch
from torch import nn

from benchmarks.families.catalogue import FAMILIES

STEPS = 40


class Wrapped(nn.Module):
    """What DistributedDataParallel is to a script."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def losses_of(family, seed, steps=STEPS, wrap=lambda model: model):
    torch.manual_seed(seed)
    model = wrap(family.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=family.rate)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        batch = family.draw(generator)
        loss = family.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        family.after_step(model, batch)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_family_learns_the_same_from_the_same_seed_within_a_wrapper_too(family):
    losses = losses_of(family, seed=3)

    assert sum(losses[-10:]) < sum(losses[:10])
    assert losses_of(family, seed=3, steps=10, wrap=Wrapped) == losses[:10]
