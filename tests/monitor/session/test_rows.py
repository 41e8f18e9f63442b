"""What is collected from plain PyTorch, held against what the training loop itself saw."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.session.test_containment import EVERYTHING
from tests.reference import assert_equal
from trainermon import TrainerMon
from trainermon.core.values import Kind

STEPS = 3
MICRO_STEPS = 2


class Net(nn.Module):
    """Two linear layers, the first called twice, an embedding that a step may leave without gradient."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.unused = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)
        self.reentrant = reentrant

    def body(self, x):
        return self.out(torch.relu(self.twice(torch.relu(self.twice(x)))))

    def forward(self, tokens, *, use_all=False):
        x = self.embed(tokens)
        x = self.unused(x) if use_all else x
        return self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)


class Seen:
    """Copies of what the loop saw, per step and name."""

    def __init__(self):
        self.tensors = {}

    def keep(self, step, kind, named):
        self.tensors |= {(step, kind, name): tensor.detach().clone() for name, tensor in named.items()}


def adam_update(state, group):
    first = state["exp_avg"].double() / (1 - group["betas"][0] ** state["step"].item())
    second = state["exp_avg_sq"].double() / (1 - group["betas"][1] ** state["step"].item())
    return (first / (second.sqrt() + group["eps"])).float()


def train(model, config, steps=STEPS, each_step=lambda step: None, accumulation=MICRO_STEPS):
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = Seen()
    with TrainerMon(config) as monitor:
        monitor.set_monitor(model, optimizer, accumulation)
        for step in range(steps):
            seen.keep(step, Kind.PARAM_ORIGIN, dict(model.named_parameters()))
            for micro_step in range(accumulation):
                tokens = torch.randint(11, (4, 5))
                before = {
                    n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
                }
                loss = model(tokens, use_all=step == 0).square().mean()
                loss.backward()
                grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
                own = {f"{name}@{micro_step}": grad - before[name] for name, grad in grads.items()}
                seen.keep(step, Kind.GRAD_UNREDUCED, own | grads)
            monitor.record(loss=loss)
            seen.keep(step, Kind.LOSS, {"loss": loss})
            seen.keep(step, Kind.GRAD_REDUCED, grads)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            states = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
            for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ):
                seen.keep(step, kind, {name: state[kind.value] for name, state in states.items()})
            group = optimizer.param_groups[0]
            seen.keep(step, Kind.PARAM_UPDATED, dict(model.named_parameters()))
            stepped = {name: state for name, state in states.items() if name in grads}
            seen.keep(step, Kind.UPDATE, {name: adam_update(state, group) for name, state in stepped.items()})
            optimizer.zero_grad()
            each_step(step)
    return seen


@pytest.fixture(params=[None, False, True], ids=["plain", "checkpoint", "reentrant"])
def model(request):
    torch.manual_seed(0)
    return Net(request.param)


EXACT = [Kind.LOSS, Kind.GRAD_REDUCED, Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED, Kind.EXP_AVG, Kind.EXP_AVG_SQ]


@pytest.mark.parametrize("kind", EXACT, ids=str)
def test_rows_equal_what_the_loop_saw(places, model, kind):
    seen = train(model, EVERYTHING)

    journal = RankJournal(only_spool(places[0]))
    for step in range(STEPS):
        expected = {name: t for (at, of, name), t in seen.tensors.items() if (at, of) == (step, kind)}
        found = journal.of(step, kind)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_equal(found[name], tensor)


def test_gradients_of_each_micro_step_add_up_to_the_unreduced_one(places, model):
    seen = train(model, EVERYTHING)

    journal = RankJournal(only_spool(places[0]))
    for step in range(STEPS):
        found = journal.of(step, Kind.GRAD_UNREDUCED)
        expected = {name: t for (at, of, name), t in seen.tensors.items() if (at, of) == (step, Kind.GRAD_UNREDUCED)}
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].sum == pytest.approx(float(tensor.double().sum()), rel=1e-4, abs=1e-6)


def test_update_follows_the_formula(places, model):
    seen = train(model, EVERYTHING)

    journal = RankJournal(only_spool(places[0]))
    assert "unused.weight" not in journal.of(1, Kind.UPDATE)
    for (step, kind, name), tensor in seen.tensors.items():
        if kind is Kind.UPDATE:
            assert journal.of(step, kind)[name].norm == pytest.approx(float(tensor.double().norm()), rel=1e-5)


def test_a_parameter_without_gradient_has_no_row(places, model):
    train(model, EVERYTHING)

    journal = RankJournal(only_spool(places[0]))
    assert "unused.weight" in journal.of(0, Kind.GRAD_REDUCED)
    assert "unused.weight" not in journal.of(1, Kind.GRAD_REDUCED)


def test_calls_and_micro_steps_are_kept_apart_and_recomputation_is_not_counted(places, model):
    train(model, EVERYTHING)

    found = RankJournal(only_spool(places[0])).of(1, Kind.ACTV)
    twice = sorted(name for name in found if name.startswith("twice.output"))
    assert twice == ["twice.output.0#1@0", "twice.output.0#1@1", "twice.output.0@0", "twice.output.0@1"]


def test_activations_and_their_gradients_equal_those_of_a_hand_made_step(places):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 4)
    hidden = torch.tanh(model[0](x)).detach().requires_grad_()
    output = model[2](hidden)
    output.square().sum().backward()
    expected = {"2.input.0": hidden.grad, "1.output.0": hidden.grad, "2.output.0": 2 * output.detach()}
    model.zero_grad()

    with TrainerMon({"xy_distribution": True, "agent": {"start": False}}) as monitor:
        monitor.set_monitor(model, optimizer)
        model(x).square().sum().backward()
        optimizer.step()

    journal = RankJournal(only_spool(places[0]))
    gradients = journal.of(0, Kind.ACTV_GRAD)
    for name, tensor in expected.items():
        assert_equal(gradients[name], tensor)
    assert_equal(journal.of(0, Kind.ACTV)["1.output.0"], hidden)
    assert_equal(journal.of(0, Kind.ACTV)["0.input.0"], x)
    assert "0.input.0" not in gradients


def test_evaluation_is_not_counted(places):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon({"xy_distribution": True, "agent": {"start": False}}) as monitor:
        monitor.set_monitor(model, optimizer)
        model.eval()
        model(torch.randn(2, 4))
        model.train()
        with torch.no_grad():
            model(torch.randn(3, 4))
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()

    found = RankJournal(only_spool(places[0])).of(0, Kind.ACTV)
    assert set(found) == {"0.input.0", "0.output.0", "1.input.0", "1.output.0"}
    assert found["0.input.0"].count == 20


def test_schedule_chooses_steps_and_nothing_is_attached_between_them(places):
    model = nn.Linear(4, 1)
    hooks = []

    def look(step):
        hooks.append((len(model._forward_pre_hooks), len(model._forward_hooks)))

    train_on = {"start_step": 1, "step_interval": 3, "collect_times": 2, "agent": {"start": False}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(train_on) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(9):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            look(step)

    assert sorted(RankJournal(only_spool(places[0])).rows) == [1, 4]
    assert hooks == [(2, 2), (0, 0), (0, 0), (2, 2), *[(0, 0)] * 5]


@pytest.mark.parametrize("place", ["before", "after"])
def test_loss_is_filed_under_its_step_wherever_it_is_recorded(places, place):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon({"agent": {"start": False}}) as monitor:
        monitor.set_monitor(model, optimizer, start_iteration=100)
        for step in range(100, 104):
            model(torch.randn(2, 4)).sum().backward()
            if place == "before":
                monitor.record(loss=float(step), lr=0.5)
            optimizer.step()
            if place == "after":
                monitor.record(loss=torch.tensor(float(step)), lr=0.5)

    journal = RankJournal(only_spool(places[0]))
    losses = {step: row.sum for step in journal.rows for row in journal.of(step, Kind.LOSS).values()}
    assert losses == {step: float(step) for step in range(100, 104)}
    assert all(journal.of(step, Kind.STEP)["lr"].mean == 0.5 for step in range(100, 104))
