"""What scripts do with a watched model beside training it: nothing of it may break, change, or end the monitor."""

import contextlib
import logging

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.values import Kind

QUIET = {"agent": {"start": False}}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class Scaled(torch.optim.SGD):
    """As some libraries have it: the step takes something beside, or instead of, a closure."""

    def step(self, closure=None, scale=1.0):
        if not callable(closure) and closure is not None:
            closure, scale = None, closure
        loss = None if closure is None else closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad, alpha=-0.1 * scale)
        return loss


def trained(arguments, *, watch):
    model = net()
    optimizer = Scaled(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    with TrainerMon(QUIET) if watch else contextlib.nullcontext() as monitor:
        if watch:
            monitor.set_monitor(model, optimizer)
        for _ in range(3):
            closure()
            optimizer.step(*[closure if argument == "closure" else argument for argument in arguments])
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("arguments", [(), (0.5,), (None, 0.5), ("closure",), ("closure", 0.5)])
def test_a_step_gets_the_arguments_that_the_script_gave_it(places, arguments):
    assert trained(arguments, watch=True) == trained(arguments, watch=False)
    assert len(RankJournal(only_spool(places[0])).rows) == 3


def looks(model):
    x = torch.ones(2, 3)
    parameters = dict(model.named_parameters())

    def loss(values):
        return torch.func.functional_call(model, values, (x,)).square().mean()

    torch.jit.trace(model, x)
    torch.func.grad(loss)(parameters)
    torch.func.jvp(lambda given: model(given), (x,), (x,))
    torch.export.export(model, (x,))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(x))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_looking_at_a_watched_model_between_steps_changes_neither(places, caplog):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(QUIET | {"xy_distribution": True}) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(4):
            looks(model)
            model(torch.ones(2, 3)).square().mean().backward()
            looks(model)
            optimizer.step()
            looks(model)
            optimizer.zero_grad()

    journal = RankJournal(only_spool(places[0]))
    assert len(journal.rows) == 4
    assert [len(journal.of(step, Kind.ACTV)) for step in journal.rows] == [6] * 4
    assert "detached" not in caplog.text


class Drawing(nn.Module):
    """A parametrization that is not the same twice."""

    def forward(self, weight):
        return weight * torch.rand(())


def test_a_weight_that_is_computed_anew_each_time_is_not_asked_for(places):
    def run(config):
        model = net()
        parametrize.register_parametrization(model[0], "weight", Drawing())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with TrainerMon(QUIET | config) as monitor:
            monitor.set_monitor(model, optimizer)
            for _ in range(3):
                model(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
        return [parameter.tolist() for parameter in model.parameters()], torch.get_rng_state().tolist()

    assert run({"recording_l2_features": True, "l2_targets": {"linear_hook": []}}) == run({})


@pytest.mark.parametrize(
    ("value", "reads"),
    [("3.5", 3.5), (b"2", 2.0), (torch.ones(2, 2), 4.0)],
)
def test_what_is_a_number_is_recorded(places, value, reads):
    journal = recorded(places, value)

    assert journal.of(0, Kind.LOSS)["loss"].sum == reads


@pytest.mark.parametrize(
    "value",
    ["three", [1], torch.empty(2, device="meta"), torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)],
    ids=["word", "list", "meta", "nested"],
)
def test_what_is_no_number_is_left_out_and_nothing_else(places, caplog, value):
    journal = recorded(places, value, also=7.0)

    assert "loss" not in journal.of(0, Kind.LOSS)
    assert len(journal.of(1, Kind.GRAD_REDUCED)) == 4
    assert "record(loss=…) is left out" in caplog.text


def recorded(places, value, **more):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            monitor.record(loss=value, **more)
            optimizer.step()
    return RankJournal(only_spool(places[0]))


def test_a_parameter_that_is_replaced_is_told(places, caplog):
    caplog.set_level(logging.WARNING, "trainermon")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainerMon(QUIET) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(4):
            if step == 2:
                model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    assert caplog.text.count("the model holds another parameter in the place of 0.weight") == 1


def other_optimizer(model):
    return torch.optim.SGD(net().parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "config", "message"),
    [
        (lambda m, o: (m, other_optimizer(m)), {}, "optimizer: SGD steps none of the model's 4 parameters"),
        (lambda m, o: ([m, m], o), {}, "found the same module twice"),
        (lambda m, o: (m, o, 1, "tp"), {}, "tp_group: found 'tp', expected a process group"),
        (lambda m, o: (m, o, 1, None, 3), {}, "dp_group: found 3, expected a process group"),
        (lambda m, o: (m, o, 1, None, None, 1.5), {}, "start_iteration: found 1.5, expected a whole number"),
        (lambda m, o: (m, o, 1, None, None, 2**63), {}, "start_iteration: found 9223372036854775808"),
        (lambda m, o: (m, o), {"framework": "nope"}, "framework: found 'nope', expected one of .*plain"),
    ],
)
def test_a_wrong_use_is_refused_and_leaves_nothing_behind(places, arguments, config, message):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(AttachError, match=message):
        TrainerMon(QUIET | config).set_monitor(*arguments(model, optimizer))

    assert not optimizer._optimizer_step_pre_hooks
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("source", "message"),
    [([1], "configuration: found list"), ({"spool_mb": float("inf")}, "spool_mb: found inf, expected a finite number")],
)
def test_a_wrong_configuration_is_refused(source, message):
    with pytest.raises(ConfigError, match=message):
        TrainerMon(source)


class TakesNoHooks(nn.Linear):
    def register_forward_pre_hook(self, *_args, **_options):
        raise RuntimeError("no hooks")


def test_a_set_monitor_that_fails_late_leaves_nothing_behind(places):
    model = nn.Sequential(nn.Linear(3, 3), TakesNoHooks(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(RuntimeError):
        TrainerMon(QUIET | {"xy_distribution": True}).set_monitor(model, optimizer)

    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not model._forward_hooks
    assert not model[0]._forward_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
