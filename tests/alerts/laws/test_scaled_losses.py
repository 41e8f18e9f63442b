"""A loss scaler that still looks for its scale skips steps by design, wherever the loop clears gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.alerts.laws.test_trainings import written
from tests.journal_rows import only_spool
from trainermon import TrainerMon
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.derived import NANS
from trainermon.core.values import Kind

ATTEMPTS, SCALE = 40, 2.0**40
CONFIG = {"wg_distribution": True, "xy_distribution": True, "param_distribution": True, "agent": {"start": False}}


def train(folder: Path | None, clears: str, accumulated: int, broken_from: int) -> tuple[int, list[object]]:
    """Train, watched if there is a `folder`; return how many attempts became a step, and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    monitor = TrainerMon(CONFIG | {"output_dir": str(folder), "spool_dir": str(folder)})
    if folder is not None:
        monitor.set_monitor(model, optimizer, accumulated)
    num_steps = 0
    for attempt in range(ATTEMPTS):
        for number in range(accumulated):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(torch.randn(16, 8)) - 1).square().mean() / accumulated
            monitor.record(loss=loss)
            if clears == "between" and not number:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        num_steps += scaler.get_scale() >= before
        if attempt == broken_from:
            nn.init.constant_(model.get_parameter("0.bias"), float("nan"))
        if clears != "between":
            optimizer.zero_grad(set_to_none=clears == "behind")
    monitor.close()
    return num_steps, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("clears", ["between", "behind", "in place"])
def test_nothing_is_said_of_attempts_that_the_scaler_skips(tmp_path: Path, clears: str, accumulated: int) -> None:
    num_steps, weights = train(tmp_path, clears, accumulated, ATTEMPTS)

    assert 0 < num_steps < ATTEMPTS - 10
    steps = written(only_spool(tmp_path), 0)
    assert [block.step for _, block in steps] == [*range(num_steps)]
    engine = RuleEngine(load_rules())
    assert [alert for header, block in steps for alert in engine.evaluate(header, header.series, block)] == []
    assert weights == train(None, clears, accumulated, ATTEMPTS)[1]


def test_the_last_attempt_of_a_run_that_never_becomes_finite_again_is_kept(tmp_path: Path) -> None:
    num_steps, _ = train(tmp_path, "between", 1, ATTEMPTS - 3)

    header, last = written(only_spool(tmp_path), 0)[-1]
    kinds = [header.series[number].kind for number in last.series]
    lost = [nans > 0 for nans in last.values[NANS]]
    assert last.step == num_steps
    assert any(is_lost and kind is Kind.GRAD_REDUCED for is_lost, kind in zip(lost, kinds, strict=True))
