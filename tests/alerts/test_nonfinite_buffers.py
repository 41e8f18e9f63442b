"""Buffers into which NaN or Inf comes, in a training of one process, and those that hold them by design."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.alerts.laws.test_trainings import written
from tests.alerts.series import block, feed
from tests.journal_rows import only_spool
from trainermon import TrainerMon
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.values import Alert, AlertState, Kind, SeriesKey

RULE = "buffer-nonfinite"
NAN, INF = float("nan"), float("inf")
VALUES = [1.0, NAN, INF, -INF]


class Model(nn.Module):
    """A norm, and buffers as measures, quantisers and mask makers have them."""

    largest: torch.Tensor
    made_anew: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 1)
        self.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
        self.register_buffer("largest", torch.tensor(-INF))
        self.register_buffer("not_known_yet", torch.full((2,), NAN))
        self.register_buffer("made_anew", torch.zeros(2), persistent=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.made_anew.fill_(NAN)
        self.largest.copy_(torch.maximum(self.largest, given.detach().nan_to_num().max()))
        return self.head(self.norm(given).nan_to_num())


def train(folder: Path, *, bad_step: int | None, num_steps: int = 45) -> list[Alert]:
    """Train with the monitor, a NaN in the batch of `bad_step`, whose update the script leaves out; return alerts."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = TrainerMon({"output_dir": str(folder), "spool_dir": str(folder), "agent": {"start": False}})
    monitor.set_monitor(model, optimizer)
    for step in range(num_steps):
        given = torch.randn(8, 4)
        if step == bad_step:
            given[0, 0] = NAN
        model(given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            model.largest.fill_(-INF)  # a measure that begins anew
    monitor.close()
    engine = RuleEngine(load_rules())
    found = [a for header, one in written(only_spool(folder), 0) for a in engine.evaluate(header, header.series, one)]
    return [alert for alert in found if alert.rule == RULE and alert.state is AlertState.FIRING]


def test_a_running_statistic_that_became_nan_is_told(tmp_path: Path) -> None:
    (alert,) = train(tmp_path, bad_step=21)

    assert (alert.first_step, alert.rank) == (40, 0)
    assert {finding.series.name for finding in alert.findings} == {"norm.running_mean", "norm.running_var"}


def test_buffers_that_hold_nan_or_inf_by_design_are_not(tmp_path: Path) -> None:
    assert train(tmp_path, bad_step=None) == []


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.sampled_from(VALUES), min_size=1, max_size=3), min_size=1, max_size=6))
def test_only_what_the_first_value_did_not_hold_is_told(shown: list[list[float]]) -> None:
    key = SeriesKey(Kind.BUFFER, "norm.running_var")
    found = feed(RuleEngine(load_rules()), [key], (block(step, {0: values}) for step, values in enumerate(shown)))
    held = [{is_so for is_so in (math.isnan, math.isinf) if any(map(is_so, values))} for values in shown]
    expected = [step for step, bad in enumerate(held) if bad - held[0]]

    told = [alert.first_step for alert in found if alert.rule == RULE and alert.state is AlertState.FIRING]
    assert told[:1] == expected[:1]
