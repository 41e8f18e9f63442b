"""Statistics handed to the script by the names of msprobe, and the calls that are deprecated there."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.values import Kind, SeriesKey

CONFIG = {
    "agent": {"start": False},
    "format": "api",
    "ops": ["norm", "max"],
    "wg_distribution": True,
    "xy_distribution": True,
}


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer, inputs):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    gradients = {name: p.grad.double().numpy().copy() for name, p in model.named_parameters()}
    optimizer.step()
    return gradients


@pytest.fixture
def watched(places):
    model, optimizer = parts()
    with TrainerMon(CONFIG) as monitor:
        monitor.set_monitor(model, optimizer)
        yield monitor, model, optimizer


def test_gradients_are_those_of_the_step_that_has_just_ended(watched):
    monitor, model, optimizer = watched

    for seed in range(4):
        gradients = step(model, optimizer, torch.full((2, 4), float(seed + 1)))
        reduced, unreduced = monitor.generate_wgrad_metrics()

        assert set(reduced) == {f"0:{name}/rank0/post_grad" for name in gradients}
        assert set(unreduced) == {f"0:{name}/rank0/pre_grad" for name in gradients}
        for name, gradient in gradients.items():
            assert reduced[f"0:{name}/rank0/post_grad"] == {
                "norm": pytest.approx(np.linalg.norm(gradient), rel=1e-9),
                "max": gradient.max(),
                "shape": list(gradient.shape),
                "dtype": "torch.float32",
            }


def test_activations_and_their_gradients_have_their_tags(watched):
    monitor, model, optimizer = watched
    inputs = torch.randn(2, 4)

    step(model, optimizer, inputs)
    actv, actv_grad = monitor.generate_xy_metrics()

    assert set(actv) == {f"0:{module}.{side}:0/rank0/actv" for module in "012" for side in ("input", "output")}
    assert actv["0:0.input:0/rank0/actv"]["norm"] == pytest.approx(float(inputs.double().norm()), rel=1e-9)
    assert "0:2.output:0/rank0/actv_grad" in actv_grad
    assert "0:0.input:0/rank0/actv_grad" not in actv_grad  # the input needs no gradient


def test_before_the_first_step_and_after_the_last_there_is_nothing(places):
    model, optimizer = parts()
    monitor = TrainerMon(CONFIG)
    assert monitor.generate_wgrad_metrics() == ({}, {})

    monitor.set_monitor(model, optimizer)
    assert monitor.generate_xy_metrics() == ({}, {})

    step(model, optimizer, torch.ones(2, 4))
    monitor.close()
    assert monitor.generate_wgrad_metrics() == ({}, {})


def test_tensors_of_the_script_join_under_their_own_keys(watched):
    monitor, _, _ = watched

    reduced, _ = monitor.generate_wgrad_metrics({"mine": torch.tensor([3.0, -4.0, float("nan")])})

    assert reduced["mine"] == {"norm": 5.0, "max": 3.0, "shape": [3], "dtype": "torch.float32"}


def test_other_statistics_can_be_chosen(watched, caplog):
    monitor, model, optimizer = watched
    assert monitor.ops == ["norm", "max", "shape", "dtype"]

    monitor.ops = ["min", "median"]
    step(model, optimizer, torch.ones(2, 4))

    assert list(monitor.generate_wgrad_metrics()[0]["0:0.bias/rank0/post_grad"]) == ["min", "shape", "dtype"]
    assert "ops: 'median' is left out; known are norm" in caplog.text


def test_asking_leaves_the_journal_as_it_is(places):
    model, optimizer = parts()
    with TrainerMon(CONFIG) as monitor:
        monitor.set_monitor(model, optimizer)
        for _ in range(4):
            step(model, optimizer, torch.ones(2, 4))
            monitor.record(loss=1.0)
            monitor.generate_wgrad_metrics()

    rows = RankJournal(only_spool(places[0])).rows
    assert [SeriesKey(Kind.LOSS, "loss") in rows[number] for number in range(4)] == [True] * 4


def test_any_tensor_can_be_filed(places):
    model, optimizer = parts()
    with TrainerMon(CONFIG) as monitor:
        monitor.set_monitor(model, optimizer)
        model(torch.ones(2, 4)).sum().backward()
        monitor.adhoc_check(torch.tensor([1.0, 5.0]), "router", "logits", [], ["max"])
        monitor.adhoc_check(torch.tensor([1.0]), "router", "hidden", [3], ["max"])
        optimizer.step()

    row = RankJournal(only_spool(places[0])).rows[0]
    assert row[SeriesKey(Kind.STEP, "router.logits")].max == 5.0
    assert not any(key.name == "router.hidden" for key in row)


def test_old_calls_say_what_replaces_them(places, caplog):
    model, optimizer = parts()
    with TrainerMon(CONFIG) as monitor, caplog.at_level(logging.WARNING):
        monitor.set_wrapped_optimizer(optimizer)
        monitor.monitor_gnorm_with_ad(model, grad_acc_steps=1)
        step(model, optimizer, torch.ones(2, 4))
        monitor.reload_xy(True)

    assert 0 in RankJournal(only_spool(places[0])).rows
    for text in ("pass the optimizer to set_monitor", "call set_monitor, which", "set dynamic_on in the configuration"):
        assert text in caplog.text
