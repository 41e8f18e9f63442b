"""An optimizer that the script replaces in the midst of training is followed, or it is said what is not seen."""

import pytest
import torch
from torch import nn
from torch.optim import optimizer

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.values import Kind
from trainermon.monitor.session.unseen_changes import MISSED_STEPS

CONFIG = {"agent": {"start": False}, "param_distribution": True, "mv_distribution": True}
REPLACED, STEPS = 4, 10


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def parameters_of(model):
    return [p for p in model.parameters() if p.requires_grad]


def train(places, steppers, *, config=CONFIG, model=None, num_steps=STEPS):
    """Train with the optimizers that `steppers(model, step)` returns for each step; return journal, norms by step."""
    model = net() if model is None else model
    norms = []
    with TrainerMon(config) as monitor:
        for step in range(num_steps):
            optimizers = steppers(model, step)
            if step == 0:
                monitor.set_monitor(model, optimizers[0])
            model(torch.full((2, 4), step + 1.0)).square().mean().backward()
            monitor.record(loss=step)
            norms.append({name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None})
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    return RankJournal(only_spool(places[0])), norms


def replacing(make):
    """Return steppers: Adam, and from step REPLACED on what `make(model)` returns."""
    made = {}

    def steppers(model, step):
        phase = step >= REPLACED
        if phase not in made:
            made[phase] = make(model) if phase else torch.optim.Adam(parameters_of(model))
        return [made[phase]]

    return steppers


def gaps(journal):
    return [(event["first"], event.get("last")) for event in journal.events if event["type"] == "gap"]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.Adam(model.parameters()),
        lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        lambda model: torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1),
    ],
    ids=["another", "same class", "fused", "with more"],
)
def test_the_new_optimizer_is_watched_from_its_third_step_on_under_the_scripts_numbers(places, make):
    journal, norms = train(places, replacing(make))

    assert sorted(journal.rows) == [*range(REPLACED), *range(REPLACED + 2, STEPS)]
    for step in journal.rows:
        assert journal.of(step, Kind.LOSS)["loss"].sum == step
        found = {name: row.norm for name, row in journal.of(step, Kind.GRAD_REDUCED).items()}
        assert found == pytest.approx(norms[step], rel=1e-5)
    assert gaps(journal) == [(REPLACED, REPLACED + 1)]


def test_the_state_that_is_shown_is_the_new_optimizers(places):
    journal, _ = train(places, replacing(lambda model: torch.optim.Adam(model.parameters(), betas=(0.0, 0.999))))

    for step in range(REPLACED + 2, STEPS):
        gradients, moments = journal.of(step, Kind.GRAD_REDUCED), journal.of(step, Kind.EXP_AVG)
        assert {name: row.norm for name, row in moments.items()} == pytest.approx(
            {name: row.norm for name, row in gradients.items()}, rel=1e-5
        )


def test_it_is_followed_where_most_steps_are_not_collected(places):
    journal, _ = train(places, replacing(lambda model: torch.optim.SGD(model.parameters(), lr=0.1)), config={
        **CONFIG, "step_interval": 3,
    })  # fmt: skip

    assert [step for step in sorted(journal.rows) if journal.of(step, Kind.GRAD_REDUCED)] == [0, 3, 6, 9]
    assert gaps(journal) == [(REPLACED, REPLACED + 1)]


def test_parameters_that_the_script_froze_need_not_be_held(places):
    def head(model):
        model[0].requires_grad_(requires_grad=False)
        return torch.optim.SGD(model[2].parameters(), lr=0.1)

    journal, _ = train(places, replacing(head))

    assert set(journal.of(STEPS - 1, Kind.GRAD_REDUCED)) == {"2.weight", "2.bias"}


def test_bits_are_those_of_a_training_that_is_not_watched(places):
    def weights(config):
        model = net()
        optimizers = [torch.optim.Adam(model.parameters()), torch.optim.AdamW(model.parameters())]
        if config is None:
            for step in range(STEPS):
                model(torch.full((2, 4), step + 1.0)).square().mean().backward()
                optimizers[step >= REPLACED].step()
                model.zero_grad()
        else:
            train(places, lambda _model, step: [optimizers[step >= REPLACED]], config=config, model=model)
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, weights(CONFIG), weights(None)))
    assert not optimizer._global_optimizer_post_hooks


@pytest.mark.parametrize("both", [True, False], ids=["in each step", "in turn"])
def test_an_optimizer_beside_the_watched_one_is_not_followed(places, both):
    made = []

    def steppers(model, step):
        made[:] = made or [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
        return made if both else [made[step % 2]]

    journal, _ = train(places, steppers)

    assert gaps(journal) == []
    assert sorted(journal.rows) == [*range(STEPS if both else STEPS // 2)]


@pytest.mark.parametrize("num_missed", [3, MISSED_STEPS + 2])
def test_one_that_holds_a_part_only_is_not_followed_and_that_is_said(places, num_missed):
    num_steps = REPLACED + num_missed
    part = replacing(lambda model: torch.optim.SGD(model[2].parameters(), lr=0.001))
    journal, _ = train(places, part, num_steps=num_steps)

    assert gaps(journal) == [(REPLACED, None)]
    assert sorted(journal.rows) == [*range(REPLACED)]
    (event,) = [event for event in journal.events if event["type"] == "gap"]
    assert "SGD" in event["message"]
    assert "set_monitor" in event["message"]


def test_that_the_watched_one_steps_again_ends_the_gap(places):
    made = {}

    def steppers(model, step):
        made.setdefault("all", torch.optim.SGD(model.parameters(), lr=0.001))
        made.setdefault("part", torch.optim.SGD(model[2].parameters(), lr=0.001))
        return [made["part" if REPLACED <= step < REPLACED + MISSED_STEPS else "all"]]

    journal, _ = train(places, steppers, num_steps=REPLACED + MISSED_STEPS + 4)

    assert [last is not None for _, last in gaps(journal)] == [False, True]
