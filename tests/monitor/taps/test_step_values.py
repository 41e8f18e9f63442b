"""The numbers of a step, against what the script did to its gradients and what the framework said."""

import math

import pytest
import torch
from torch import nn

from tests.monitor.taps.rows import Rows
from trainermon.core.catalogue import GROUP_SETTINGS
from trainermon.core.values import Coordinates, Kind
from trainermon.monitor.frameworks import plain
from trainermon.monitor.taps.step_values import GroupSettings, StepValues
from trainermon.monitor.taps.training import StepOutcome


class Run:
    """Three steps of a small model whose gradients are clipped to `limit`, and what clipping was told."""

    def __init__(self, limit, *, dtype=torch.float32, is_scaled=False, unused=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        if unused:
            model.register_parameter("unused", nn.Parameter(torch.ones(1)))
        model.to(dtype)
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.02}]
        optimizer = torch.optim.SGD(groups)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        self.rows = Rows()
        training = plain.describe([model], optimizer, Coordinates())
        values = StepValues(training, self.rows.collector)
        self.expected = []
        for step in range(3):
            self.rows.collector.begin(step)
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(x).square().sum().backward()
            values.at_backward_end(training.reduced_gradients())
            norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
            self.expected.append(min(1.0, limit / (norm.item() + 1e-6)))
            values.at_entry(is_scaled=is_scaled)
            optimizer.step()
            values.at_exit(StepOutcome())
            self.rows.collector.seal()
            schedule.step()

    def of(self, step):
        return {label: row.sum for label, row in self.rows.of(step, Kind.STEP).items()}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 8e-3)]
)
@pytest.mark.parametrize("limit", [1.0, 1e9])
def test_a_clip_by_the_script_is_seen_by_the_probe(limit, dtype, tolerance):
    run = Run(limit, dtype=dtype)

    for step, expected in enumerate(run.expected):
        assert (expected < 1.0) == (limit == 1.0)
        assert run.of(step)["clip_ratio"] == pytest.approx(expected, rel=tolerance)


def test_a_parameter_without_a_gradient_is_no_probe():
    run = Run(1.0, unused=True)

    assert run.of(0)["clip_ratio"] == pytest.approx(run.expected[0], rel=1e-6)


def test_with_a_loss_scaler_in_the_script_there_is_no_clip_ratio():
    assert "clip_ratio" not in Run(1.0, is_scaled=True).of(0)


def test_settings_of_groups_have_a_row_on_the_first_step_and_when_they_change():
    run = Run(1e9)
    settings = [{k: v for k, v in run.of(step).items() if k.split(".")[0] in GROUP_SETTINGS} for step in range(3)]

    expected = {"weight_decay": (0.0, 0.0), "momentum": (0.0, 0.0)}
    assert settings[0] == {f"{k}.{group}": v[group] for k, v in expected.items() for group in range(2)}
    assert settings[1:] == [{}, {}]


def test_a_setting_that_is_a_tensor_has_no_row_and_is_not_compared():
    class Unread(torch.Tensor):
        def __eq__(self, other):
            raise AssertionError("a tensor was compared, which waits for its device")

        __hash__ = torch.Tensor.__hash__

    told = GroupSettings()
    groups = [{"betas": (Unread(), 0.99), "eps": 1e-8, "weight_decay": Unread()}]

    assert told.changed(groups) == [("beta2", 0, 0.99), ("epsilon", 0, 1e-8)]
    groups[0] |= {"weight_decay": Unread(), "eps": 1e-6}
    assert told.changed(groups) == [("epsilon", 0, 1e-6)]


def test_learning_rates_are_those_of_each_group_in_each_step():
    run = Run(1.0)

    rates = [[run.of(step)[f"learning_rate.{group}"] for group in range(2)] for step in range(3)]

    assert rates == [[0.1, 0.02], [0.05, 0.01], [0.025, 0.005]]
    assert not {"global_grad_norm", "loss_scale", "skipped"} & set(run.of(0))


def values_of(outcome):
    model = nn.Linear(3, 2)
    rows = Rows()
    training = plain.describe([model], torch.optim.SGD(model.parameters(), lr=0.1), Coordinates())
    StepValues(training, rows.collector).at_exit(outcome)
    rows.collector.seal()
    return rows.of(0, Kind.STEP)


@pytest.mark.parametrize("wrap", [float, torch.tensor])
@pytest.mark.parametrize(("norm", "ratio"), [(4.0, 0.25), (0.5, 1.0), (0.0, 1.0)])
def test_what_the_framework_tells_is_taken_wherever_it_is(wrap, norm, ratio):
    found = values_of(StepOutcome(skipped=False, grad_norm=wrap(norm), max_norm=1.0, loss_scale=wrap(1024.0)))

    assert found["global_grad_norm"].sum == norm
    assert found["clip_ratio"].sum == pytest.approx(ratio, rel=1e-5)
    assert found["loss_scale"].sum == 1024.0
    assert found["skipped"].sum == 0.0


def test_a_skipped_step_says_so_and_a_norm_that_is_not_finite_is_counted():
    found = values_of(StepOutcome(skipped=True, grad_norm=torch.tensor(math.inf), max_norm=1.0))

    assert found["skipped"].sum == 1.0
    assert found["global_grad_norm"].infs == 1
    assert found["clip_ratio"].sum == 0.0


def test_a_model_that_is_trained_in_eval_mode_says_so_and_when_it_is_over():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = Rows()
    values = StepValues(plain.describe([model], optimizer, Coordinates()), rows.collector)
    for step, training in enumerate([True, False, False, True]):
        rows.collector.begin(step)
        model.train(training)
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        values.at_exit(StepOutcome())
        rows.collector.seal()

    shown = [rows.of(step, Kind.STEP) for step in range(4)]
    assert [row["eval_mode"].sum if "eval_mode" in row else None for row in shown] == [None, 1.0, 1.0, 0.0]
