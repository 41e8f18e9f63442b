"""Buffers of copies on two real ranks: those that nothing makes equal are told, those that DDP broadcasts are not."""

from pathlib import Path

import pytest

from tests.alerts.laws.test_trainings import LAWS, written
from tests.journal_rows import only_spool
from tests.ranks import run_ranks
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.values import AlertState, Kind

TOLD = {"buffers-differ", *LAWS}
TRAINING = Path(__file__).with_name("buffers_training.py")


@pytest.mark.parametrize("case", ["broadcast", "local", "frozen"])
def test_buffers_that_nothing_makes_equal_are_told(tmp_path: Path, case: str) -> None:
    run_ranks(TRAINING, case, str(tmp_path))
    steps = [step for rank in range(2) for step in written(only_spool(tmp_path), rank)]
    steps.sort(key=lambda step: (step[1].step, step[0].coordinates.rank))
    engine = RuleEngine(load_rules())
    found = [alert for header, block in steps for alert in engine.evaluate(header, header.series, block)]

    told = {alert.rule: alert for alert in found if alert.state is AlertState.FIRING and alert.rule in TOLD}
    assert set(told) == ({"buffers-differ"} if case == "local" else set())
    for alert in told.values():
        assert {finding.series.name for finding in alert.findings} == {"1.running_mean", "1.running_var"}
        assert alert.first_step == 20


def test_buffers_have_rows_every_twenty_steps(tmp_path: Path) -> None:
    run_ranks(TRAINING, "broadcast", str(tmp_path))
    shown = {
        block.step: sorted(header.series[n].name for n in block.series if header.series[n].kind is Kind.BUFFER)
        for header, block in written(only_spool(tmp_path), 0)
    }

    due = {step: names for step, names in shown.items() if names}
    expected = ["1.running_mean", "1.running_var"]
    assert due == {0: expected, 20: expected}
