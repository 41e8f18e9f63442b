"""Gradients that a script writes to between the backward and the optimizer's step: how they were when it stepped."""

import math

import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from trainermon import GradientMonitor, TrainerMon
from trainermon.core.catalogue import GRADIENT_AT_STEP
from trainermon.core.errors import AttachError
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


def multiply_in_place(model, factor):
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def put_others(model, factor):
    for parameter in model.parameters():
        parameter.grad = parameter.grad * factor


def put_others_where_they_were(model, factor):
    for parameter in model.parameters():
        kept = parameter.grad.clone()
        parameter.grad = None  # Python may give the place of the one that is gone to the next
        parameter.grad = kept * factor


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (put_others, 100.0),
        (put_others_where_they_were, 100.0),
        (put_others, 0.5),
        (put_others, math.nan),
        (multiply_in_place, 100.0),
        (multiply_in_place, math.nan),
    ],
)
def test_gradients_that_all_were_changed_are_taken_as_the_optimizer_uses_them(places, caplog, change, factor):
    torch.manual_seed(1)
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(4, 4), nn.Tanh())])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    truths = []
    with TrainerMon({"agent": {"start": False}}) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(2):
            model(torch.randn(3, 4)).square().sum().backward()
            change(model, factor)
            truths.append({name: p.grad.double().square().sum().item() for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    rows = RankJournal(only_spool(places[0])).rows
    for step, truth in enumerate(truths):
        found = {key.name: row for key, row in rows[step].items() if key.slot == GRADIENT_AT_STEP}
        if math.isnan(factor) and step:
            assert not found or change is not multiply_in_place  # they were not finite before
            continue
        assert found.keys() == truth.keys()
        for name, row in found.items():
            assert row.nans > 0 if math.isnan(factor) else row.sum_sq == pytest.approx(truth[name], rel=1e-9)
    assert caplog.text.count("otherwise than by clipping") == 1


def test_clipping_is_no_change_where_most_parameters_have_no_gradient(places):
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with TrainerMon({"agent": {"start": False}}) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(2):
            model[0](torch.randn(3, 4)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    rows = RankJournal(only_spool(places[0])).rows
    assert not [key for of in rows.values() for key in of if key.slot == GRADIENT_AT_STEP]


@pytest.mark.parametrize("container", [list, tuple, lambda found: dict(zip("dg", found, strict=True))])
def test_several_optimizers_are_refused_with_the_line_to_write(places, container):
    model = nn.Linear(2, 1)
    optimizers = container(torch.optim.SGD([p], lr=0.1) for p in model.parameters())
    with pytest.raises(AttachError, match=r"found 2 in a .*TrainerMon.*set_monitor\(generator, its_optimizer\)"):
        TrainerMon({"agent": {"start": False}}).set_monitor(model, optimizers)
    probe = GradientMonitor({"task": "grad_probe", "dump_path": str(places[0])})
    with pytest.raises(AttachError, match=r"found 2 in a .*own: GradientMonitor.*monitor\(generator, its_optimizer\)"):
        probe.monitor(model, optimizers)


class Wrapper:
    def __init__(self, *inner):
        self.rate = 0.1
        for name, optimizer in zip(("first", "second"), inner, strict=False):
            setattr(self, name, optimizer)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, r"ends a training step$"),
        (2, r"\.first and \.second, each"),
    ],
)
def test_a_wrapper_of_the_script_is_refused_with_what_to_pass(places, number, said):
    model = nn.Linear(2, 1)
    wrapper = Wrapper(*(torch.optim.SGD([p], lr=0.1) for p in list(model.parameters())[:number]))
    with pytest.raises(AttachError, match=said):
        TrainerMon({"agent": {"start": False}}).set_monitor(model, wrapper)
