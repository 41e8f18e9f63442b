"""Gradients that a script writes to between the backward and the optimizer's step: how they were when it stepped."""

import math

import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.catalogue import GRADIENT_AT_STEP
from trainermon.core.values import Kind

STEPS, BAD = 4, 2


def write_in_place(model):
    model[2].weight.grad[0, 0] = math.nan


def put_another_one(model):
    model[2].weight.grad = torch.full_like(model[2].weight, math.nan)


def leave(_model):
    pass


def written(spool, spoil, *, clips):
    """Return by step which gradients were taken at the step, and whether they were finite."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with TrainerMon({"agent": {"start": False}}) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(STEPS):
            model(torch.randn(3, 4)).square().sum().backward()
            if step == BAD:
                spoil(model)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    rows = RankJournal(only_spool(spool)).rows
    kept = {step: [(key, row) for key, row in of.items() if key.slot == GRADIENT_AT_STEP] for step, of in rows.items()}
    assert all(key.kind is Kind.STATE for found in kept.values() for key, _ in found)
    return {step: {key.name: row.nans for key, row in found} for step, found in kept.items() if found}


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("spoil", "expected"), [(write_in_place, {"2.weight"}), (put_another_one, {"2.weight"}), (leave, set())]
)
def test_what_was_written_to_is_taken_again_and_nothing_else(places, spoil, expected, clips):
    found = written(places[0], spoil, clips=clips)

    assert {step: set(names) for step, names in found.items()} == ({BAD: expected} if expected else {})
    assert all(nans > 0 for names in found.values() for nans in names.values())
