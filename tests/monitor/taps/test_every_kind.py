"""Activations of every dtype and layout: a changed tensor has another row, or it is named as one that has none."""

import logging

import pytest
import torch
from torch import nn

from tests.dumped_kinds import Shows
from tests.journal_rows import RankJournal, only_spool
from tests.tensor_kinds import DAMAGES, every_kind, numbers, unchanged_by
from tests.tensor_pairs import is_equal, pairs
from trainermon import TrainerMon
from trainermon.core.values import Kind

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized, sparse and masked tensors may change
SIDES = {"sound": lambda values: values, "again": lambda values: values, **DAMAGES}


class Beside(nn.Module):
    """A layer that trains, beside modules that are given every kind of tensor."""

    def __init__(self, names):
        super().__init__()
        self.layer, self.shows = nn.Linear(4, 2), Shows(names)

    def forward(self, x, tensors):
        self.shows(tensors)
        return self.layer(x)


def named(kinds, values):
    return {f"{name}_": tensor for name, tensor in kinds(values).items()}


def equal_pairs(damage):
    """Return the names of the pairs of dtype and layout whose tensors are equal, damaged or not."""
    sound, damaged = pairs(numbers()), pairs(SIDES[damage](numbers()))
    return {name for name, tensor in sound.items() if is_equal(tensor, damaged[name], name.partition(" ")[2])}


def train(config, kinds):
    torch.manual_seed(0)
    model = Beside(named(kinds, numbers()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainerMon(config) if config is not None else None
    if monitor is not None:
        monitor.set_monitor(model, optimizer)
    losses = []
    for change in SIDES.values():
        loss = model(torch.ones(3, 4), named(kinds, change(numbers()))).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if monitor is not None:
        monitor.close()
    return losses


@pytest.mark.parametrize(("kinds", "unchanged"), [(every_kind, unchanged_by), (pairs, equal_pairs)])
def test_every_change_is_seen_and_no_loss_is_another(kinds, unchanged, places, caplog):
    with caplog.at_level(logging.WARNING, logger="trainermon"):
        losses = train({"xy_distribution": True, "agent": {"start": False}}, kinds)

    assert losses == train(None, kinds)
    journal = RankJournal(only_spool(places[0]))
    rows = [
        {
            label.removeprefix("shows.kinds.").removesuffix("_.output.0"): row
            for label, row in journal.of(step, Kind.ACTV).items()
            if label.endswith("_.output.0")
        }
        for step in range(len(SIDES))
    ]
    warned = " ".join(record.getMessage() for record in caplog.records)
    unread = {name for name in kinds(numbers()) if f"shows.kinds.{name}_." in warned}
    assert set(rows[0]) | unread == set(kinds(numbers()))
    assert not set(rows[0]) & unread
    for damage, found in zip(SIDES, rows, strict=True):
        alike = {name for name, row in found.items() if row == rows[0][name]}
        whole = set(found) if damage in ("sound", "again") else unchanged(damage) & set(found)
        assert alike >= whole, damage
        assert all(name.startswith("bool ") for name in alike - whole), damage  # as many may be true
