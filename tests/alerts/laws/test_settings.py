"""Laws of settings: all schedulers of torch keep them, and what is written into `param_groups` by mistake does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.alerts.laws.test_trainings import LAWS, written
from tests.journal_rows import only_spool
from trainermon import TrainerMon
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.journal import Header
from trainermon.core.values import Alert, AlertState, Severity, StatBlock

STEPS, WRONG_FROM = 40, 25
Optimizer = torch.optim.Optimizer
Hook = Callable[[Optimizer, int], None]

SCHEDULES: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "constant": lambda o: lr_scheduler.LambdaLR(o, lambda _: 1.0),
    "stages": lambda o: lr_scheduler.MultiStepLR(o, [10, 20], gamma=0.1),
    "warm-up in stages": lambda o: lr_scheduler.LambdaLR(o, lambda n: [1e-3, 0.3, 1.0, 0.1, 0.1][n // 10]),
    "linear warm-up": lambda o: lr_scheduler.LambdaLR(o, lambda n: min(n / 8, 1.0)),
    "cosine to a floor": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=1e-5),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 8, eta_min=1e-6),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [1e-2, 1e-3], total_steps=STEPS + 1),
    "triangles": lambda o: lr_scheduler.CyclicLR(o, [1e-4, 1e-5], [1e-2, 1e-3], 6, cycle_momentum=False),
    "to zero": lambda o: lr_scheduler.PolynomialLR(o, STEPS, power=2.0),
    "first a third": lambda o: lr_scheduler.ConstantLR(o, total_iters=5),
}
SCHEDULES |= {
    "cosine to zero": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "cosine to zero and back": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "warm restarts from zero": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 8),
    "a stage of a thousandth": lambda o: lr_scheduler.MultiStepLR(o, [20], gamma=1e-3),
    "rests": lambda o: lr_scheduler.LambdaLR(o, lambda n: float(n % 10 < 5)),
    "one group ends": lambda o: lr_scheduler.LambdaLR(o, [lambda n: max(0.0, 1 - n / 20), lambda _: 1.0]),
    "one group is unfrozen": lambda o: lr_scheduler.LambdaLR(o, [lambda n: float(n > 20), lambda _: 1.0]),
}
BROKEN: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "collapses": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1.0 if n < WRONG_FROM else 1e-9),
    "collapses in the warm-up": lambda o: lr_scheduler.LambdaLR(o, lambda n: n / 50 if n < WRONG_FROM else 1e-9),
}


def rates_only(group: int, factor: float) -> Hook:
    def change(optimizer: Optimizer, _step: int) -> None:
        optimizer.param_groups[group]["lr"] *= factor

    return change


def set_to(**values: object) -> Hook:
    return lambda optimizer, _step: optimizer.param_groups[0].update(values)


def train(folder: Path, schedule: str, changes: Hook | None = None, *, decay: float = 0.01) -> Path:
    """Train a small model of two groups; `changes` is called in each step from `WRONG_FROM` on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters(), "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups, weight_decay=decay)
    scheduler = (SCHEDULES | BROKEN)[schedule](optimizer)
    monitor = TrainerMon({"output_dir": str(folder), "spool_dir": str(folder), "agent": {"start": False}})
    monitor.set_monitor(model, optimizer)
    draw = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(16, 8, generator=draw)
        loss = model(x).square().mean()
        monitor.record(loss=loss)
        loss.backward()
        if changes is not None and step == WRONG_FROM:
            changes(optimizer, step)
        optimizer.step()
        scheduler.step()
    monitor.close()
    return only_spool(folder)


def alerts_of(steps: Sequence[tuple[Header, StatBlock]]) -> dict[str, Alert]:
    engine = RuleEngine(load_rules())
    found = [alert for header, block in steps for alert in engine.evaluate(header, header.series, block)]
    assert not engine.faults
    return {alert.rule: alert for alert in found if alert.state is AlertState.FIRING and alert.rule in LAWS}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_said_of_any_scheduler_of_torch(tmp_path: Path, schedule: str) -> None:
    assert alerts_of(written(train(tmp_path, schedule), 0)) == {}


@pytest.mark.parametrize(
    ("rule", "schedule", "changes"),
    [
        ("learning-rates-part", "linear warm-up", rates_only(0, 10.0)),
        ("learning-rates-part", "cosine to a floor", rates_only(1, 0.1)),
        ("setting-jumps", "constant", set_to(weight_decay=1.0)),
        ("setting-switched-off", "constant", set_to(weight_decay=0.0)),
        ("setting-switched-off", "constant", set_to(eps=0.0)),
        ("setting-switched-off", "cosine to zero", set_to(lr=0.0)),
        ("learning-rate-collapsed", "collapses", None),
        ("learning-rate-collapsed", "collapses in the warm-up", None),
        ("setting-jumps", "constant", set_to(betas=(0.0, 0.999))),
        ("setting-jumps", "constant", set_to(eps=1e-4)),
    ],
)
def test_a_setting_that_jumps_is_told_on_the_step_on_which_it_does(
    tmp_path: Path, rule: str, schedule: str, changes: Hook | None
) -> None:
    found = alerts_of(written(train(tmp_path, schedule, changes), 0))

    assert set(found) == {rule}
    assert found[rule].first_step == WRONG_FROM


def test_decay_that_is_set_to_zero_is_a_note_without_a_factor(tmp_path: Path) -> None:
    (alert,) = alerts_of(written(train(tmp_path, "constant", set_to(weight_decay=0.0)), 0)).values()

    assert alert.severity is Severity.INFO
    assert "are set to zero at step 25" in alert.message
    assert "inf" not in alert.message


@pytest.mark.parametrize("decay", [30.0, 0.1])
def test_a_decay_that_takes_the_weights_away_is_told(tmp_path: Path, decay: float) -> None:
    found = alerts_of(written(train(tmp_path, "constant", decay=decay), 0))

    assert set(found) == ({"weight-decay-implausible"} if decay > 1 else set())


def test_what_was_set_before_a_skipped_step_is_known_after_it(tmp_path: Path) -> None:
    steps = written(train(tmp_path, "constant", set_to(weight_decay=1.0)), 0)
    header, first = steps[0]
    keys = header.series
    skipped = next(n for n, key in enumerate(keys) if key.name == "clip_ratio")
    as_skipped = dataclasses.replace(keys[skipped], name="skipped")
    series = (*keys[:skipped], as_skipped, *keys[skipped + 1 :])
    values = first.values.copy()
    values[:, list(first.series).index(skipped)] = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]

    found = alerts_of(
        [(dataclasses.replace(header, series=series), dataclasses.replace(first, values=values)), *steps[1:]]
    )

    assert set(found) == {"setting-jumps"}


def restarted(folder: Path, *, is_resumed: bool) -> Iterator[tuple[Header, StatBlock]]:
    """Yield the steps of a run and of its second start, which makes steps 30 to 40 again."""
    steps = written(train(folder, "cosine to a floor"), 0)
    yield from steps[:38]
    late = steps[30:40] if is_resumed else steps[:10]
    for number, (header, block) in enumerate(late):
        yield dataclasses.replace(header, attempt=header.attempt + 1), dataclasses.replace(block, step=30 + number)


@pytest.mark.parametrize(("ended", "first"), [(10, 10), (15, 0)])
def test_where_the_job_had_ended_a_rate_is_told_that_is_the_first_again(tmp_path: Path, ended: int, first: int) -> None:
    """A rate may fall at the end of an epoch, where there is a checkpoint, too."""
    steps = written(train(tmp_path, "stages"), 0)
    again = [
        (dataclasses.replace(header, attempt=header.attempt + 1), dataclasses.replace(block, step=ended + number))
        for number, (header, block) in enumerate(steps[first : first + 5])
    ]

    found = alerts_of([*steps[:ended], *again])

    assert set(found) == (set() if first else {"learning-rate-not-resumed"})


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_schedule_that_begins_anew_after_a_restart_is_told(tmp_path: Path, is_resumed: bool) -> None:
    found = alerts_of(list(restarted(tmp_path, is_resumed=is_resumed)))

    assert set(found) == (set() if is_resumed else {"learning-rate-not-resumed"})
