"""Faults in the optimizer's update itself, and in weights between two steps, in trainings of one process."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.analysis.stored_run import store
from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.analysis.diagnosis.against.against import diagnose_against
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict, FaultPhase

STEPS, BAD, MODULE = 5, 3, "2"
CONFIG: dict[str, Any] = {"agent": {"start": False}, "replay": {"enabled": False}, "escalation": {"enabled": False}}
CONFIG |= {"param_distribution": True, "mv_distribution": True, "xy_distribution": True}


def nothing(_):
    pass


class Optimizer(torch.optim.AdamW):
    """Calls `before` and `after` with itself within its step, around the real one."""

    before = after = staticmethod(nothing)

    def step(self, closure=None):
        self.before(self)
        super().step(closure)
        self.after(self)


def weight_of(optimizer):
    return optimizer.param_groups[0]["params"][2]


@torch.no_grad()
def move_twice_as_far(optimizer):
    weight_of(optimizer).mul_(1.001)


@torch.no_grad()
def lose_an_element(optimizer):
    weight_of(optimizer)[0, 0] = math.nan


def scale_the_moment(optimizer):
    optimizer.state[weight_of(optimizer)]["exp_avg"].mul_(3.0)


def spoil_the_moment(optimizer):
    optimizer.state[weight_of(optimizer)]["exp_avg"][0, 0] = math.inf


def use_another_gradient(optimizer):
    """As where the step comes before what it should come after: it is given what no stored gradient is."""
    weight_of(optimizer).grad = weight_of(optimizer).grad * 2.0


def train(folder, *, before=nothing, after=nothing, between=nothing):
    """Train `STEPS` steps into `folder`, which is the run's directory then; what is given happens on step `BAD`."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = Optimizer(model.parameters(), lr=1e-2)
    config = CONFIG | {"run_id": folder.name, "output_dir": str(folder.parent), "spool_dir": str(folder / "spool")}
    with TrainerMon(config) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(STEPS):
            if step == BAD:
                between(weight_of(optimizer))
            optimizer.before, optimizer.after = (before, after) if step == BAD else (nothing, nothing)
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = RankJournal(only_spool(folder / "spool")).rows
    store(folder, {step: {0: {key: dataclasses.astuple(row) for key, row in of.items()}} for step, of in rows.items()})
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return train(tmp_path_factory.mktemp("sound") / "sound")


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [
        ({"after": move_twice_as_far}, "param_updated 2.weight"),
        ({"before": scale_the_moment}, "exp_avg 2.weight"),
        ({"after": scale_the_moment}, "exp_avg 2.weight"),
        ({"before": use_another_gradient}, "exp_avg 2.weight"),
    ],
    ids=["update", "moment-before", "moment-after", "order"],
)
def test_a_fault_within_the_update_that_stays_finite_is_the_optimizers(sound, tmp_path, fault, tensor):
    diagnosis = diagnose_against(train(tmp_path / "run", **fault), sound)

    assert (diagnosis.step, diagnosis.module, diagnosis.phase) == (BAD, MODULE, FaultPhase.OPTIMIZER)
    assert diagnosis.reason.startswith(f"{tensor} is the first series that differs: it arose in the optimizer step")


@pytest.mark.parametrize(
    "fault",
    [{"after": lose_an_element}, {"before": spoil_the_moment}, {"after": spoil_the_moment}],
    ids=["update", "moment-before", "moment-after"],
)
def test_a_fault_within_the_update_that_is_not_finite_is_the_optimizers(tmp_path, fault):
    diagnosis = diagnose(train(tmp_path / "run", **fault), step=BAD)

    found = (diagnosis.verdict, diagnosis.step, diagnosis.module, diagnosis.phase)
    assert found == (DiagnosisVerdict.LOCATED, BAD, MODULE, FaultPhase.OPTIMIZER)
    assert "radients were finite, but" in diagnosis.reason


def write_through_data(weight):
    weight.data[0] *= 3.0


def write_in_place(weight):
    with torch.no_grad():
        weight[0] *= 3.0


@pytest.mark.parametrize("write", [write_through_data, write_in_place])
def test_a_weight_that_is_written_to_between_two_steps_is_told_as_that(sound, tmp_path, write):
    diagnosis = diagnose_against(train(tmp_path / "run", between=write), sound)

    assert (diagnosis.step, diagnosis.module, diagnosis.phase) == (BAD, MODULE, FaultPhase.PARAMETER)
    assert "right after step 2 it agreed: it was written to between the steps" in diagnosis.reason
