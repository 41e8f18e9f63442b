"""Small runs in which something explodes, dies or diverges at a known place, recorded by the monitor itself."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from tests.alerts.alerts_by_hand import alert as alert_by_hand
from tests.analysis.stored_run import ALL_NAN, FINITE, grad, store
from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.alerts.log import AlertLog
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict, FaultPhase, PlaceLevel, Symptom
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.values import Alert, AlertCondition, AlertState, Finding, Kind, SeriesKey, Severity

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

    assert (diagnosis.verdict, diagnosis.symptom) == (DiagnosisVerdict.FINITE, Symptom.NONE), render_text(diagnosis)


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
    assert {level.level: level.answer for level in diagnosis.levels}[PlaceLevel.DOMAIN] == f"dp {bad_rank}"


def test_what_is_usual_is_left_open_where_no_earlier_step_tells(tmp_path):
    key = SeriesKey(Kind.PARAM_UPDATED, "fc.weight")
    store(tmp_path, {0: {rank: {key: (4, 0.0, 1.0, 2.0, 3.0 + rank, 0, 0, 0)} for rank in range(2)}})
    found = (Finding(series=key, value=2.0),)
    place = {"attempt": 1, "rank": 1, "step": 0, "first_step": 0}
    apart = alert_by_hand("a", **place, kind=key.kind, findings=found, condition=AlertCondition.DIFFERS)
    AlertLog(tmp_path / "nodes/node/alerts.jsonl").append(apart)

    assert [dict(one.usual) for one in diagnose(tmp_path).contrasts] == [{"rms": None}]


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


LARGE = (4, -900.0, 900.0, 0.0, 4 * 900.0**2, 0, 0, 0)


def with_bad_step(run_dir, alerts):
    """Store 30 steps of which the twentieth has a gradient that is not finite, and these alerts."""
    keys = [grad("h.0.weight", Kind.GRAD_UNREDUCED), grad("h.1.weight", Kind.GRAD_UNREDUCED)]
    sound, large, bad = ([FINITE, moments] for moments in (FINITE, LARGE, ALL_NAN))
    of_step = {step: bad if step >= 20 else large if step >= 12 else sound for step in range(30)}
    store(run_dir, {step: {0: dict(zip(keys, rows, strict=True))} for step, rows in of_step.items()})
    log = AlertLog(run_dir / "nodes/node/alerts.jsonl")
    for one in alerts:
        log.append(one)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("gradient-dead", Kind.GRAD_REDUCED),
        ("gradient-vanishing", Kind.GRAD_REDUCED),
        ("update-ratio-high", Kind.RATIO),
        ("expert-collapse", Kind.FEATURE),
        ("replica-parameters", Kind.CHECKSUM),
        ("loss-outlier-rank", Kind.LOSS),
    ],
)
def test_what_makes_nothing_non_finite_does_not_hide_a_step_that_is(tmp_path, rule, kind):
    with_bad_step(tmp_path, [dataclasses.replace(alert(rule, 0, step=10), kind=kind)])

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.symptom, diagnosis.step) == (Symptom.NONFINITE, 20), render_text(diagnosis)
    assert any("from step 0 on" in line for line in diagnosis.evidence)


@pytest.mark.parametrize(("seen_step", "symptom"), [(15, Symptom.EXPLODED), (25, Symptom.NONFINITE)])
def test_an_explosion_is_the_cause_only_if_it_was_seen_before_the_bad_step(tmp_path, seen_step, symptom):
    with_bad_step(tmp_path, [alert("gradient-spike", 12, step=seen_step)])

    assert diagnose(tmp_path).symptom is symptom


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([1e-3] * 12 + [0.1] * 18, (12, "(optimizer)")),
        ([0.0, 1e-3] + [2e-3] * 28, (13, "h.1")),  # a warm-up
    ],
)
def test_a_learning_rate_that_jumped_right_before_is_the_cause(tmp_path, rates, expected):
    keys = [grad("h.0.weight", Kind.GRAD_UNREDUCED), grad("h.1.weight", Kind.GRAD_UNREDUCED)]
    rate_of = SeriesKey(Kind.STEP, "learning_rate", "0")
    of_step = {
        step: dict.fromkeys(keys, LARGE if step >= 13 else FINITE) | {rate_of: (1, rate, rate, rate, rate**2, 0, 0, 0)}
        for step, rate in enumerate(rates)
    }
    store(tmp_path, {step: {0: rows} for step, rows in of_step.items()}, modules=["h.0", "h.1"])
    AlertLog(tmp_path / "nodes/node/alerts.jsonl").append(alert("gradient-spike", 13))

    diagnosis = diagnose(tmp_path)

    assert (diagnosis.symptom, diagnosis.step, diagnosis.module) == (Symptom.EXPLODED, *expected)
    assert ("learning rate jumped from 0.001 to 0.1 in step 12" in diagnosis.headline) == (expected[0] == 12)
