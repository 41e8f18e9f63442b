"""What a step's first backward finds in a gradient, in loops that clear gradients and in some that do not."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.monitor.taps.rows import Rows
from trainermon import TrainerMon
from trainermon.core.catalogue import GRADIENT_KEPT
from trainermon.core.values import Coordinates, Kind
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.frameworks import plain
from trainermon.monitor.taps.loop.kept_gradients import KeptGradients

STEPS = 6
SMALLEST = "1.bias"


class Still:
    muted, expected = False, 1


def by_data(model, optimizer):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def by_hand(model, optimizer):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


CLEARED = {
    "none": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "by hand": by_hand,
}


def nothing(model, optimizer):
    pass


def rows_of(
    clear, *, backwards=1, clip=False, between=nothing, dtype=torch.float32, foreach=None, steps=STEPS, layers=2
):
    """Return by step what is recorded of a small training that clears gradients by `clear`."""
    torch.manual_seed(0)
    widths = (4, 3, 2) if layers == 2 else (4,) * (layers + 1)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths))).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    rows, training = Rows(), plain.describe([model], optimizer, Coordinates())
    kept = KeptGradients(training, rows.collector, Still())  # type: ignore[arg-type]
    kept.attach(FaultGuard(pytest.fail))
    for step in range(steps):
        rows.collector.begin(step)
        clear(model, optimizer)
        for _ in range(backwards):
            model(torch.randn(5, 4, dtype=dtype)).square().sum().backward()
            between(model, optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        kept.at_entry(step)
        optimizer.step()
        kept.step_ended()
        rows.collector.seal()
    kept.detach()
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    return {step: found for step in range(steps) if (found := rows.of(step, Kind.STATE))}


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("how", CLEARED)
def test_where_gradients_are_cleared_nothing_is_read(how, backwards, clip):
    assert rows_of(CLEARED[how], backwards=backwards, clip=clip) == {}


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_recorded_from_the_second_such_step_on(backwards, clip, dtype):
    found = rows_of(nothing, backwards=backwards, clip=clip, dtype=dtype)

    assert list(found) == list(range(2, STEPS))
    assert {*found[2]} == {f"{SMALLEST}.{GRADIENT_KEPT}"}  # others are looked at from the second step on
    assert all(len(row) == 4 for step, row in found.items() if step > 2)
    assert all(row.zeros == 0 for rows in found.values() for row in rows.values())


def test_what_is_recorded_is_what_the_step_has_left():
    left = []

    def note(model, optimizer):
        left.append(None if model[1].bias.grad is None else model[1].bias.grad.double().sum().item())

    found = rows_of(note)

    assert {step: row[f"{SMALLEST}.{GRADIENT_KEPT}"].sum for step, row in found.items()} == pytest.approx(
        {step: left[step] for step in range(2, STEPS)}
    )


@pytest.mark.parametrize("kept", range(2, 8))
def test_a_part_that_is_not_cleared_is_found_in_its_turn(kept):
    """The two smallest parameters are cleared, and all others but for one."""

    def but_one(model, optimizer):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = parameter.grad if number == kept else None

    found = rows_of(but_one, steps=40, layers=4)

    name = f"{kept // 2}.{'bias' if kept % 2 else 'weight'}.{GRADIENT_KEPT}"
    assert all({*row} == {name} for row in found.values())
    assert [*found][-5:] == [35, 36, 37, 38, 39]
    assert [*found] == list(range(min(found), 40))  # what is found is looked at from then on


def test_a_parameter_that_is_frozen_before_its_turn_is_passed_over():
    def freeze(model, optimizer):
        model[3].weight.requires_grad_(False)
        optimizer.zero_grad()

    assert rows_of(freeze, steps=40, layers=4) == {}


def test_gradients_that_are_cleared_unseen_are_shown_to_be_zero():
    found = rows_of(by_data)

    assert list(found) == list(range(2, STEPS))
    assert all(row.zeros == row.count for rows in found.values() for row in rows.values())


def test_what_another_backward_left_and_the_script_clears_later_is_not_kept():
    """As the discriminator's gradients that the generator's backward makes, before they are cleared."""

    def twice(model, optimizer):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.zero_grad(set_to_none=False)

    assert rows_of(twice) == {}


def test_gradients_that_the_script_lets_decay_are_not_taken_for_kept_ones():
    def decay(model, optimizer):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    assert rows_of(decay) == {}


def test_a_monitored_training_without_zero_grad_is_the_same_to_the_bit(tmp_path):
    def losses(*, watched):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monitor = TrainerMon({"output_dir": str(tmp_path), "agent": {"start": False}}) if watched else None
        if monitor:
            monitor.set_monitor(model, optimizer)
        found = []
        for _ in range(STEPS):
            loss = model(torch.randn(5, 4)).square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        if monitor:
            monitor.close()
        return found

    assert losses(watched=True) == losses(watched=False)
