"""What is said where steps or modules are not seen: what was found, and nothing else."""

import gc

import pytest
import torch
import torch._dynamo
from torch import nn

from trainermon import TrainerMon

STEPS = 3
QUIET = {"agent": {"start": False}}
OTHER, HOOKS, COMPILED = "another optimizer (", "hooks on accumulated gradients", "torch.compile"


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 2)

    def forward(self, x):
        yield self.first(x)

    def by_weights(self, x):
        return x @ self.first.weight.T


def write(model, optimizer):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad)


def step_other(model, optimizer):
    model.__dict__["other"].step()


def nothing(model, optimizer):
    """The hooks of `hooked` have stepped already."""


def hooked(parameter):
    with torch.no_grad():
        parameter.sub_(parameter.grad)


def train(kind, go):
    torch._dynamo.reset()  # of other tests
    gc.collect()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "other":
        model.__dict__["other"] = torch.optim.Adam(model.parameters())
    if kind == "hooks":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hooked)
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(STEPS):
            model(torch.ones(3, 4)).sum().backward()
            go(model, optimizer)
            model.zero_grad()


@pytest.mark.parametrize(
    ("kind", "go", "said"),
    [
        ("other", step_other, {OTHER + "Adam)"}),
        ("hooks", nothing, {HOOKS}),
        ("own", write, {"the script itself writes to them"}),
    ],
)
def test_what_wrote_to_the_parameters_is_said_as_far_as_it_was_found(places, caplog, kind, go, said):
    train(kind, go)

    (told,) = [message for message in caplog.messages if "nothing is collected of that" in message]
    assert {words for words in (*said, OTHER, HOOKS, COMPILED) if words in told} - said <= {OTHER}
    assert all(words in told for words in said)
    assert (OTHER in told) == any(OTHER in words for words in said)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda model, x: next(iter(model(x))), "first was called while no forward of the model ran"),
        (lambda model, x: model.first(x), "first was called while no forward of the model ran"),
        (lambda model, x: model.by_weights(x), "none was called"),
    ],
)
def test_why_no_module_was_seen_is_said_as_far_as_it_was_found(places, caplog, forward, said):
    torch._dynamo.reset()
    model = Generator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(QUIET | {"xy_distribution": True}) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(STEPS):
            forward(model, torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    (told,) = [message for message in caplog.messages if "not one module was seen" in message]
    assert said in told
    assert COMPILED not in told
