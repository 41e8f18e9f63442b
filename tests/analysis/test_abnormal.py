"""Small runs in which something explodes, dies or diverges at a known place, recorded by the monitor itself."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from tests.analysis.stored_run import FINITE, grad, store
from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.alerts.log import AlertLog
from trainermon.analysis.diagnose import diagnose
from trainermon.analysis.findings import FaultPhase, Level, Symptom, Verdict
from trainermon.analysis.report import render_text
from trainermon.monitor.values import Alert, AlertState, Finding, Kind, SeriesKey, Severity

FIRST_BAD, NUM_STEPS = 110, 140
CONFIG = {"param_distribution": True, "xy_distribution": True, "agent": {"start": False}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def massive(model, _optimizer):
    down = model.blocks[1].down
    down.register_forward_pre_hook(lambda _, args: (args[0] * 300.0,))


def steep(model, _optimizer):
    model.blocks[1].up.weight.register_hook(lambda gradient: gradient * 200.0)


def dead(model, _optimizer):
    model.blocks[2].down.weight.register_hook(lambda gradient: gradient * 0.0)


def far_off(model, _optimizer):
    with torch.no_grad():
        model.blocks[2].up.bias.fill_(-1e4)


def overflowing(model, _optimizer):
    step = [0]

    def grow(_, args):
        step[0] += 1
        return (args[0] * 30.0 ** step[0],)

    model.blocks[1].down.register_forward_pre_hook(grow)


def record(folder, fault):
    """Train in `folder`, with the fault from step `FIRST_BAD` on, and store what the monitor recorded."""
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    config = CONFIG | {"run_id": folder.name, "output_dir": str(folder.parent), "spool_dir": str(folder / "spool")}
    with TrainerMon(config) as monitor:
        monitor.set_monitor(model, optimizer)
        for step in range(NUM_STEPS):
            if step == FIRST_BAD and fault is not None:
                fault(model, optimizer)
            x = torch.randn(32, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = RankJournal(only_spool(folder / "spool")).rows
    store(folder, {step: {0: {key: dataclasses.astuple(row) for key, row in of.items()}} for step, of in rows.items()})
    return folder


@pytest.mark.parametrize(
    ("fault", "symptom", "module", "phase"),
    [
        pytest.param(massive, Symptom.EXPLODED, "blocks.1.down", FaultPhase.FORWARD, marks=pytest.mark.slow),
        (steep, Symptom.EXPLODED, "blocks.1.up", FaultPhase.BACKWARD),
        (dead, Symptom.DIED, "blocks.2.down", FaultPhase.BACKWARD),
        pytest.param(far_off, Symptom.EXPLODED, "blocks.2.up", FaultPhase.PARAMETER, marks=pytest.mark.slow),
        (overflowing, Symptom.EXPLODED, "blocks.1.down", FaultPhase.FORWARD),
    ],
    ids=["massive", "steep", "dead", "far-off", "overflowing"],
)
def test_what_went_wrong_first_is_where_it_was_put(tmp_path, fault, symptom, module, phase):
    diagnosis = diagnose(record(tmp_path / "run", fault))

    found = (diagnosis.symptom, diagnosis.step, diagnosis.rank, diagnosis.module, diagnosis.phase)
    assert found == (symptom, FIRST_BAD, 0, module, phase), render_text(diagnosis)
    assert diagnosis.collect.debugger["step"] == [FIRST_BAD]
    if fault is overflowing:
        assert "was the first that was not finite" in diagnosis.consequences[0]


def test_a_healthy_run_is_fine(tmp_path):
    diagnosis = diagnose(record(tmp_path / "run", None))

    assert (diagnosis.verdict, diagnosis.symptom) == (Verdict.FINITE, Symptom.NONE), render_text(diagnosis)


def copy_of(value):
    return {
        SeriesKey(Kind.CHECKSUM, name): (1, value, value, value, value, 0, 0, 0) for name in ("fc.bias", "fc.weight")
    }


@pytest.mark.parametrize("bad_rank", [0, 3])
def test_the_rank_whose_copy_of_a_weight_differs_is_named(tmp_path, bad_rank):
    sound = {rank: copy_of(7.0) for rank in range(4)}
    odd = SeriesKey(Kind.CHECKSUM, "fc.weight")
    bad = {**sound, bad_rank: {**copy_of(7.0), odd: (1, 8.0, 8.0, 8.0, 8.0, 0, 0, 0)}}
    store(tmp_path, {1: sound, 2: bad, 3: bad})
    for rank in range(4):
        path = tmp_path / f"ranks/rank{rank:05d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'{{"rank": {rank}, "coordinates": {{"rank": {rank}, "dp": {rank}, "dp_size": 4}}}}')

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.symptom, diagnosis.step, diagnosis.rank) == (Symptom.DIVERGED, 2, bad_rank)
    assert (diagnosis.module, diagnosis.phase) == ("fc", FaultPhase.PARAMETER)
    assert {level.level: level.answer for level in diagnosis.levels}[Level.DOMAIN] == f"dp {bad_rank}"


def alert(rule, first_step, *, state=AlertState.FIRING, step=None):
    key = grad("h.1.weight", Kind.GRAD_UNREDUCED)
    return Alert(
        id=f"{rule}-{first_step}",
        rule=rule,
        severity=Severity.WARNING,
        state=state,
        attempt=1,
        rank=0,
        step=step or first_step + 1,
        first_step=first_step,
        time_s=0.0,
        kind=Kind.GRAD_UNREDUCED,
        value=100.0,
        baseline=1.0,
        num_series=1,
        findings=(Finding(series=key, value=100.0, baseline=1.0),),
        message=f"{rule}: it did",
    )


@pytest.mark.parametrize(("end", "expected"), [(None, (5, Symptom.EXPLODED)), (7, (8, Symptom.NONFINITE))])
def test_an_alert_counts_before_a_step_that_was_not_finite_if_it_lasted_until_then(tmp_path, end, expected):
    keys = [grad(f"h.{layer}.weight", Kind.GRAD_UNREDUCED) for layer in range(3)]
    large = (4, -900.0, 900.0, 0.0, 4 * 900.0**2, 0, 0, 0)
    steps = {step: {0: dict.fromkeys(keys, FINITE)} for step in range(9)}
    steps[5] = {0: {keys[0]: large, keys[1]: large, keys[2]: FINITE}}
    steps[8] = {0: {**steps[4][0], keys[2]: (4, math.inf, -math.inf, 0.0, 0.0, 0, 4, 0)}}
    store(tmp_path, steps, modules=["h.0", "h.1", "h.2"])
    alerts = [alert("gradient-spike", 5)]
    alerts += [alert("gradient-spike", 5, state=AlertState.RESOLVED, step=end)] if end else []
    log = AlertLog(tmp_path / "nodes/node/alerts.jsonl")
    for one in alerts:
        log.append(one)

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.step, diagnosis.symptom) == expected
    # of those that grew with it, the last in the model is the first in the backward
    assert diagnosis.module == ("h.1" if diagnosis.symptom is Symptom.EXPLODED else "h.2")
    assert "began" not in diagnosis.headline
