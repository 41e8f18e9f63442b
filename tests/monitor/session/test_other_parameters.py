"""Parameters that are replaced, added, unfrozen, or stepped by another optimizer: what is said, and what is shown."""

import logging

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.values import Kind
from trainermon.monitor.frameworks.held_places import HeldModules

QUIET = {"agent": {"start": False}, "param_distribution": True}
STEPS, CHANGED = 6, 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Sequential(nn.Linear(4, 3), nn.Tanh()), nn.Linear(3, 2))


def replace_module(model, optimizer):
    model[0] = nn.Embedding(9, 4)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def replace_outer(model, optimizer):
    model[1] = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    optimizer.param_groups[0]["params"] = list(model.parameters())


def replace_parameter(model, optimizer):
    model[2].weight = nn.Parameter(torch.ones(2, 3))
    optimizer.param_groups[0]["params"] = list(model.parameters())


def unfreeze(model, optimizer):
    model[2].bias.requires_grad_()
    optimizer.add_param_group({"params": [model[2].bias]})


def add(model, optimizer):
    model[2].register_parameter("scale", nn.Parameter(torch.ones(1)))
    optimizer.add_param_group({"params": [model[2].scale]})


def add_to_optimizer(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def trained(places, change, *, before=lambda model: None):
    model = net()
    before(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(STEPS):
            if step == CHANGED:
                change(model, optimizer)
            model(torch.arange(5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return RankJournal(only_spool(places[0]))


@pytest.mark.parametrize(
    ("change", "before", "said"),
    [
        (replace_module, None, "another parameter in the place of 0.weight than"),
        (replace_outer, None, "another parameter in the place of 1.0.weight, 1.0.bias than"),
        (replace_parameter, None, "another parameter in the place of 2.weight than"),
        (unfreeze, lambda model: model[2].bias.requires_grad_(requires_grad=False), "at set_monitor: 2.bias "),
        (add, None, "at set_monitor: 2.scale "),
        (add_to_optimizer, None, "has been given 1 parameters that the model does not hold"),
    ],
)
def test_parameters_that_are_not_watched_are_named_once(places, caplog, change, before, said):
    caplog.set_level(logging.WARNING, "trainermon")
    trained(places, change, before=before or (lambda model: None))

    lines = [record.getMessage() for record in caplog.records if "call set_monitor again" in record.getMessage()]
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.parametrize(
    ("change", "gone", "late"),
    [
        (replace_module, {"0.weight"}, set()),  # of another shape
        (replace_outer, {"1.0.weight", "1.0.bias"}, {"1.0.weight", "1.0.bias"}),
        (replace_parameter, {"2.weight"}, {"2.weight"}),
        (add, set(), set()),  # nothing uses it
    ],
)
def test_of_what_is_new_the_gradients_are_shown_and_of_what_was_replaced_nothing(places, change, gone, late):
    rows = trained(places, change).rows
    watched = {name for name, _ in net().named_parameters()}

    for kind in (Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED, Kind.GRAD_REDUCED):
        assert {key.name for key in rows[CHANGED - 1] if key.kind is kind} == watched
        for step in range(CHANGED + 1, STEPS):
            shown = late if kind is Kind.GRAD_REDUCED else set()
            assert {key.name for key in rows[step] if key.kind is kind} == (watched - gone) | shown
    assert not any(key.kind is Kind.PARAM_USED for step in rows.values() for key in step)


@pytest.mark.parametrize("interval", [1, 2])
def test_a_parameter_that_is_frozen_detaches_nothing_where_hooks_are_attached_anew(places, interval):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(QUIET | {"step_interval": interval, "monitor_mbs_grad": True}) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(STEPS):
            model[2].requires_grad_(requires_grad=step < CHANGED)
            model(torch.arange(5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    journal = RankJournal(only_spool(places[0]))
    assert sorted(journal.rows) == [*range(0, STEPS, interval)]
    assert not [event for event in journal.events if event["type"] == "detached"]


def test_nothing_is_said_of_what_the_script_moves_or_freezes(places, caplog):
    caplog.set_level(logging.WARNING, "trainermon")

    def change(model, _optimizer):
        model[1] = nn.Sequential(*model[1])  # the same parameters, held by another module
        model[2].bias.requires_grad_(requires_grad=False)

    trained(places, change)

    assert "set_monitor" not in caplog.text


def networks():
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    discriminator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def trained_in_turn(both, *, steps=4):
    """Train a discriminator, then its generator, in each step; return by step what either optimizer was given."""
    optimizers = {name: torch.optim.Adam(module.parameters(), lr=0.01) for name, module in both.items()}
    given = {name: [] for name in both}
    fake, real = torch.randn(5, 2), torch.randn(5, 3)

    def step(name):
        given[name].append({key: p.grad.double().square().sum().item() for key, p in both[name].named_parameters()})
        optimizers[name].step()
        for optimizer in optimizers.values():
            optimizer.zero_grad()

    yield optimizers
    for _ in range(steps):
        generated = both["generator"](fake)
        loss = both["discriminator"](generated.detach()).square().mean() + both["discriminator"](real).exp().mean()
        loss.backward()
        step("discriminator")
        both["discriminator"](both["generator"](fake)).exp().mean().backward()
        step("generator")
    yield given


def gradients(rows, step):
    return {key.name: row.sum_sq for key, row in rows[step].items() if key.kind is Kind.GRAD_REDUCED}


def test_gradients_of_parameters_that_another_optimizer_steps_are_left_out(places):
    both = networks()
    course = trained_in_turn(both)
    optimizers = next(course)
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(both, optimizers["discriminator"])
        given = next(course)["discriminator"]

    rows = RankJournal(only_spool(places[0])).rows
    for step, truth in enumerate(given):
        expected = {f"discriminator.{name}": value for name, value in truth.items()}
        assert gradients(rows, step) == pytest.approx(expected, rel=1e-9)


def test_a_monitor_for_each_of_two_optimizers_shows_each_at_its_own_step(places, caplog):
    both = networks()
    course = trained_in_turn(both)
    optimizers = next(course)
    monitors = {name: TrainerMon(QUIET | {"run_id": name}) for name in both}
    for name, monitor in monitors.items():
        monitor.set_monitor(both[name], optimizers[name])
    given = next(course)
    for monitor in monitors.values():
        monitor.close()

    for name in both:
        rows = RankJournal(places[0] / name).rows
        for step, truth in enumerate(given[name]):
            assert gradients(rows, step) == pytest.approx(truth, rel=1e-9), (name, step)
    assert all("no loss so far" in message for message in caplog.messages)


@pytest.fixture
def alone():
    """A job of one rank, for frameworks that need one."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def shard_again(model, optimizer):
    model[1] = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    optimizer.param_groups[0]["params"] = list(model.parameters())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shard_again, "another module in the place of 1 than at set_monitor"),
        (lambda model, optimizer: model[2].bias.requires_grad_(), "did not at set_monitor: 2.bias;"),
        (lambda model, optimizer: None, ""),
    ],
)
def test_modules_that_are_replaced_and_parameters_that_are_unfrozen_under_fsdp_are_named(
    places, caplog, alone, change, said
):
    model = net()
    model[2].bias.requires_grad_(requires_grad=False)
    for module in (model[1], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(STEPS):
            if step == CHANGED:
                change(model, optimizer)
            model(torch.arange(5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    told = [message for message in caplog.messages if "at set_monitor" in message]
    assert len(told) == bool(said)
    assert all(said in message for message in told)


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_of_what_is_unfrozen_later_it_is_said_that_ddp_does_not_reduce_it(places, caplog, alone, is_wrapped):
    model = net()
    model[2].bias.requires_grad_(requires_grad=False)
    called = DistributedDataParallel(model) if is_wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(called, optimizer)
        for step in range(STEPS):
            model[2].bias.requires_grad_(step >= CHANGED)
            called(torch.arange(5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    (told,) = [message for message in caplog.messages if "at set_monitor: 2.bias" in message]
    assert ("each rank goes on with a gradient of its own" in told) == is_wrapped


@pytest.mark.parametrize("depth", [0, 3, 40])
def test_a_replaced_module_is_found_within_as_many_looks_as_it_takes_to_see_all(depth):
    parts = [nn.Sequential(nn.Linear(1, 1)) for _ in range(50)]
    held = HeldModules([], [nn.Sequential(*parts)])
    parts[depth][0] = nn.Linear(1, 1)

    said = [message for _ in range(10) if (message := held.look())]

    assert len(said) == 1
    assert f"in the place of {depth}.0 than" in said[0]
