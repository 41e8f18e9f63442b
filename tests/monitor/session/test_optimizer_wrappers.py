"""An optimizer that holds another one is watched through it, or refused with the line to write."""

import logging
import re

import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.errors import AttachError
from trainermon.core.values import Kind

QUIET = {"agent": {"start": False}}
STEPS = 6


class Lookahead(torch.optim.Optimizer):
    """As many packages have it: `torch.optim.Optimizer.__init__` is not called, so that `step` calls no hooks."""

    def __init__(self, inner):
        self.inner, self.again = inner, inner
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for p in self.held()]
        self.number = 0

    def held(self):
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.inner.step(closure)
        self.number += 1
        if self.number % 3 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, self.held(), strict=True):
                    p.copy_(slow.lerp_(p, 0.5))

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


class WithTables(Lookahead):
    """It makes the tables of hooks, which its `step` does not call."""

    def __init__(self, inner):
        super().__init__(inner)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}


class Noam:
    """A schedule of the script's own around an optimizer."""

    def __init__(self, optimizer):
        self.optimizer, self.rate = optimizer, 0.1

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


class NoAverager:
    step = 0

    def average_parameters(self, params):
        self.step += 1


def averaging(inner):
    from torch.distributed.optim import PostLocalSGDOptimizer

    return PostLocalSGDOptimizer(inner, NoAverager())  # type: ignore[arg-type]


WRAPPERS = [
    Lookahead,
    WithTables,
    Noam,
    lambda inner: Noam(Lookahead(inner)),
    averaging,
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def trained(wrapped, *, watch):
    model = net()
    optimizer = wrapped(torch.optim.Adam(model.parameters(), lr=0.1))
    monitor = TrainerMon(QUIET | {"mv_distribution": True})
    if watch:
        monitor.set_monitor(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.full((2, 3), step + 1.0)).square().mean()
        monitor.record(loss=loss)
        loss.backward()
        optimizer.step()
    monitor.close()
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrapped", WRAPPERS)
def test_a_wrapper_is_watched_through_what_it_holds(places, caplog, wrapped):
    caplog.set_level(logging.INFO, "trainermon")
    assert trained(wrapped, watch=True) == trained(wrapped, watch=False)

    journal = RankJournal(only_spool(places[0]))
    assert len(journal.rows) == STEPS
    for step in journal.rows:
        assert {kind: len(journal.of(step, kind)) for kind in (Kind.GRAD_REDUCED, Kind.EXP_AVG, Kind.LOSS)} == {
            Kind.GRAD_REDUCED: 4,
            Kind.EXP_AVG: 4,
            Kind.LOSS: 1,
        }
    assert journal.events == []
    assert "are those of the Adam in it" in caplog.text


class SAM(torch.optim.Optimizer):
    """As its papers have it: two backwards a step, at the weights and above them, and the inner optimizer's step."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {"rho": 0.05})
        self.base = inner
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def climb(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["before"] = p.clone()
            p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.copy_(self.state[p]["before"])
        self.base.step()

    def step(self, closure=None):
        self.climb()
        with torch.enable_grad():
            closure()
        self.second()


@pytest.mark.parametrize("has_closure", [True, False])
def test_every_step_of_a_sam_is_that_of_the_optimizer_in_it(places, caplog, has_closure):
    caplog.set_level(logging.INFO, "trainermon")
    model = net()
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    monitor = TrainerMon(QUIET)
    monitor.set_monitor(model, optimizer)
    norms = []

    def backward(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for step in range(STEPS):
        x = torch.full((2, 3), step + 1.0)
        monitor.record(loss=backward(x))
        if has_closure:
            optimizer.step(lambda x=x: backward(x))
        else:
            optimizer.climb()
            backward(x)
            optimizer.second()
        norms.append(model[0].weight.grad.norm().item())
        optimizer.zero_grad()
    monitor.close()

    journal = RankJournal(only_spool(places[0]))
    assert len(journal.rows) == STEPS
    found = [journal.of(step, Kind.GRAD_REDUCED)["0.weight"].norm for step in range(STEPS)]
    assert found == pytest.approx(norms, rel=1e-6)
    assert journal.events == []
    assert "parameters were written to" not in caplog.text


class Bare(torch.optim.Optimizer):
    def __init__(self, params):
        self.param_groups = [{"params": [*params], "lr": 0.1}]


class Several(Bare):
    def __init__(self, params):
        super().__init__(params)
        first, *rest = self.param_groups[0]["params"]
        self.first, self.rest = torch.optim.SGD([first]), torch.optim.SGD(rest)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Bare, "Bare: its __init__ does not call that of torch.optim.Optimizer, .*super().__init__(params, defaults)"),
        (Several, "pass not the wrapper, but what it holds as .first and .rest, each with the model that it steps"),
        (lambda params: Noam(torch.optim.SGD(net().parameters())), "Noam: .* but what it holds as .optimizer"),
    ],
)
def test_one_that_cannot_be_watched_is_refused_with_the_line_to_write(places, made, said):
    model = net()
    with pytest.raises(AttachError, match=".*".join(map(re.escape, said.split(".*")))):
        TrainerMon(QUIET).set_monitor(model, made(model.parameters()))
