"""Alerts that the version before has written are still read: those of its log, and what a diagnosis makes of them."""

import json
import shutil
from pathlib import Path

from trainermon.alerts.escalation import Escalator
from trainermon.alerts.log import AlertLog
from trainermon.core.config import EscalationConfig
from trainermon.core.values import AlertCondition, AlertDirection, AlertState

RUN = Path(__file__).parents[1] / "recorded" / "run"
LOG = RUN / "nodes" / "node" / "alerts.jsonl"


def test_every_line_of_the_version_before_is_read() -> None:
    lines = [json.loads(line) for line in LOG.read_text().splitlines()]
    assert not any("condition" in line or "direction" in line for line in lines)

    alerts = AlertLog(LOG).read()

    assert [(one.id, one.rule, one.state.value, one.step) for one in alerts] == [
        (line["id"], line["rule"], line["state"], line["step"]) for line in lines
    ]
    assert {(one.rule, one.condition) for one in alerts} == {
        ("gradient-dead", AlertCondition.DEAD),
        ("gradient-nonfinite", AlertCondition.NONFINITE),
        ("rank-dead", AlertCondition.REPORTED),
        ("relu-off", None),
    }
    assert {one.direction for one in alerts} == {AlertDirection.NONE}


def test_an_agent_that_resumes_writes_no_line_of_the_version_before_again(tmp_path: Path) -> None:
    path = tmp_path / "alerts.jsonl"
    shutil.copy(LOG, path)
    log = AlertLog(path)

    for one in log.read():
        assert log.append(one)

    assert path.read_text() == LOG.read_text()
    assert [one.rule for one in log.open_alerts()] == ["gradient-nonfinite", "rank-dead"]
    assert all(one.state is AlertState.FIRING for one in log.open_alerts())


def test_decisions_of_the_version_before_count_as_made(tmp_path: Path) -> None:
    path = tmp_path / "agent.escalations.jsonl"
    shutil.copy(RUN.parent / "ledgers" / path.name, path)

    escalator = Escalator(EscalationConfig(max_per_hour=1), [], path=path)

    assert [(one.alert, one.command, one.ranks, one.first_step, one.reason) for one in escalator.decisions] == [
        ("one", "one", (0, 1), 23, "Größe 层"),
        ("two", "two", (), -1, "1 dumps in the last hour, at most 1 are allowed"),
        ("p/1/dump", "cmd", (1,), 70, "ordered from outside"),
        ("q/1/dump", "cmd", (), -1, "ordered from outside"),
    ]
    # Of 4 GiB: what rank 0 has written, the share of rank 1, and that of the order from outside.
    assert escalator.bytes_left() == (4 << 30) - 12345 - (1 << 29) - (1 << 30)
