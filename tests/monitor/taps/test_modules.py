"""What the hooks on modules make of tensors and gradients that are not the usual ones."""

import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.values import Kind

ACTIVATIONS = {"xy_distribution": True, "agent": {"start": False}}
STEPS = 2


class Splitting(nn.Module):
    """Several outputs of one node of the graph, of which the loop uses the first."""

    def __init__(self, split):
        super().__init__()
        self.linear, self.split = nn.Linear(4, 8), split

    def forward(self, x):
        return self.split(self.linear(x))


def train(model, config=ACTIVATIONS, *, x=None, steps=STEPS):
    """Train with a monitor, or without for `config` None; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainerMon(config) if config is not None else None
    if monitor:
        monitor.set_monitor(model, optimizer)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((3, 4), step + 1.0) if x is None else x)[0].square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if monitor:
        monitor.close()
    return losses


def gradients_of_outputs(places, step):
    rows = RankJournal(only_spool(places[0])).of(step, Kind.ACTV_GRAD)
    return {label: row.sum for label, row in rows.items()}


@pytest.mark.parametrize(
    "split",
    [
        lambda y: torch.var_mean(y, -1),
        lambda y: torch.linalg.svd(y, full_matrices=False),
        lambda y: y.unbind(0),
    ],
    ids=["var_mean", "svd", "unbind"],
)
def test_outputs_of_a_node_that_the_loss_does_not_use_have_no_gradient_and_do_no_harm(places, split):
    torch.manual_seed(0)
    model = nn.Sequential(Splitting(split))  # the root itself is not watched
    expected = nn.Sequential(Splitting(split))
    expected.load_state_dict(model.state_dict())

    assert train(model) == train(expected, None)

    labels = set(gradients_of_outputs(places, STEPS - 1))
    assert {"0.linear.output.0", "0.output.0"} <= labels
    assert "0.output.1" not in labels
    assert not [event for event in RankJournal(only_spool(places[0])).events if event["type"] == "detached"]


class Queries(nn.Module):
    """A parameter that goes into a module as its input, as learnt queries do."""

    def __init__(self):
        super().__init__()
        self.queries, self.linear = nn.Parameter(torch.ones(3, 4)), nn.Linear(4, 4)

    def forward(self, x):
        return [self.linear(self.queries) + x]


def test_hooks_on_leaves_are_gone_after_each_backward_and_see_every_gradient(places):
    model, found = Queries(), []
    model.queries.register_hook(lambda gradient: found.append((len(model.queries._backward_hooks), gradient.sum())))

    train(model, steps=STEPS)

    # Its own and the monitor's for activations; from the second step on also that for gradients that nothing clears.
    assert [count for count, _ in found] == [2] + [3] * (STEPS - 1)
    assert len(model.queries._backward_hooks) == 1
    seen = [gradients_of_outputs(places, step)["linear.input.0"] for step in range(STEPS)]
    assert seen == pytest.approx([total.item() for _, total in found], rel=1e-6)


def test_hooks_on_leaves_go_with_the_monitor(places):
    model = Queries()
    with TrainerMon(ACTIVATIONS) as monitor:
        monitor.set_monitor(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(3, 4))
        assert model.queries._backward_hooks

    assert not model.queries._backward_hooks


class Beside(nn.Module):
    """Takes or returns something unusual beside an ordinary tensor."""

    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x):
        y = self.linear(x)
        return y, self.make(y)


class Calling(nn.Module):
    """Calls a module in an unusual way."""

    def __init__(self, call):
        super().__init__()
        self.inner, self.call = nn.Linear(4, 4), call

    def forward(self, x):
        return [self.call(self.inner, x)]


def cyclic(y):
    found = {"y": y}
    found["self"] = found
    return found


def inference(y):
    with torch.inference_mode():
        return torch.ones(3)


ODD_VALUES = {
    "cyclic": cyclic,
    "nested": lambda y: torch.nested.as_nested_tensor([y, y[:1]], layout=torch.jagged),
    "csr": lambda y: torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), check_invariants=True),
    "mkldnn": lambda y: y.detach().to_mkldnn(),
    "meta": lambda y: torch.empty(3, device="meta"),
    "inference": inference,
}
ODD_CALLS = {
    "vmap": lambda inner, x: torch.vmap(inner)(x),
    "jvp": lambda inner, x: torch.func.jvp(inner, (x,), (x,))[1],
    "grad": lambda inner, x: torch.func.grad(lambda z: inner(z).sum())(x) + inner(x),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    "make",
    [lambda make=make: nn.Sequential(Beside(make)) for make in ODD_VALUES.values()]
    + [lambda call=call: nn.Sequential(Calling(call)) for call in ODD_CALLS.values()],
    ids=[*ODD_VALUES, *ODD_CALLS],
)
def test_a_tensor_that_cannot_be_read_costs_its_row_and_one_warning(places, caplog, make):
    torch.manual_seed(0)
    model, expected = make(), make()
    expected.load_state_dict(model.state_dict())

    with caplog.at_level(logging.WARNING, logger="trainermon"):
        found = train(model)

    assert found == train(expected, None)
    journal = RankJournal(only_spool(places[0]))
    assert not [event for event in journal.events if event["type"] == "detached"]
    assert sorted(journal.rows) == list(range(STEPS))
    warned = [record.args[0] for record in caplog.records if "has no statistics" in record.msg]
    assert len(set(warned)) == len(warned)
    rows = {key.label for row in journal.rows.values() for key in row if key.kind == Kind.ACTV}
    assert not rows & set(warned)


def test_an_inference_tensor_that_was_written_to_is_read_again(places):
    def twice(inner, x):
        with torch.inference_mode():
            constant = torch.ones(3, 4)
            inner(constant)
            constant += 1
            inner(constant)
        return inner(x)

    train(nn.Sequential(Calling(twice)), steps=1)

    rows = RankJournal(only_spool(places[0])).of(0, Kind.ACTV)
    assert rows["0.inner.input.0"].sum == 12
    assert rows["0.inner.input.0#1"].sum == 24


def test_a_tensor_that_was_given_other_data_is_read_again(places):
    def halved(inner, x):
        hidden = inner(x)
        hidden.data = hidden.data / 2
        return inner(hidden)

    torch.manual_seed(0)
    model: Any = nn.Sequential(Calling(halved))
    with torch.no_grad():
        expected = (model[0].inner(torch.ones(3, 4)) / 2).double().sum()

    train(model, steps=1)

    rows = RankJournal(only_spool(places[0])).of(0, Kind.ACTV)
    assert rows["0.inner.output.0"].sum == pytest.approx(2 * expected.item(), rel=1e-5)
    assert rows["0.inner.input.0#1"].sum == pytest.approx(expected.item(), rel=1e-5)


class Doubling(nn.Module):
    """Keeps nothing for its backward; notes which outputs and gradients of it are still alive."""

    def __init__(self, alive, gradients_alive):
        super().__init__()
        self.alive, self.gradients_alive = alive, gradients_alive

    def forward(self, x):
        y = x * 2.0
        self.alive.append(weakref.ref(y))
        y.register_hook(lambda gradient: self.gradients_alive.append(weakref.ref(gradient)))
        return y


def test_activations_and_their_gradients_live_no_longer_than_without_a_monitor(places):
    def most_alive(config):
        most = []

        def count(alive):
            most.append(sum(reference() is not None for reference in alive))

        alive, gradients_alive = [], []
        layers = [Doubling(alive, gradients_alive) for _ in range(8)]
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: count(alive))
            layer.register_forward_hook(
                lambda _module, _args, y: y.register_hook(lambda _: count(gradients_alive)) and None
            )
        train(nn.Sequential(nn.Linear(4, 4), *layers), config)
        return most

    assert most_alive(ACTIVATIONS | {"all_xy": True}) == most_alive(None)


class Stale(nn.Module):
    """Passes a view on whose history torch does not tell, as what it is a view of was written to since."""

    def __init__(self):
        super().__init__()
        self.linear, self.same = nn.Linear(4, 4), nn.Identity()

    def forward(self, x):
        y = self.linear(x)
        first, *_ = y.unbind(0)
        y.mul_(2.0)
        self.same(first)
        return y


def test_a_view_whose_history_is_lost_has_no_gradient_and_ends_nothing(places):
    torch.manual_seed(0)
    model, expected = nn.Sequential(Stale()), nn.Sequential(Stale())
    expected.load_state_dict(model.state_dict())

    assert train(model) == train(expected, None)

    journal = RankJournal(only_spool(places[0]))
    assert not [event for event in journal.events if event["type"] == "detached"]
    assert "0.same.output.0" in journal.of(STEPS - 1, Kind.ACTV)
    assert "0.same.output.0" not in journal.of(STEPS - 1, Kind.ACTV_GRAD)
