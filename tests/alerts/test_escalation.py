from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.alerts.alerts_by_hand import alert
from tests.alerts.series import PATIENT
from trainermon.alerts.escalation import Escalator
from trainermon.alerts.rules import AlertRule, RuleEscalation, load_rules
from trainermon.core.config import EscalationConfig
from trainermon.core.values import Action, Alert, AlertState, Command, DumpTask, Kind, Severity

RULES = load_rules()
STEPS = {0: 100, 1: 104, 2: 99, 3: 101}
HOUR = 3600.0


def escalator(*, path: Path | None = None, rules: tuple[AlertRule, ...] = RULES, **changes: Any) -> Escalator:
    if "max_bytes" in changes:
        changes["max_dump_mb"] = changes.pop("max_bytes") / (1 << 20)
    return Escalator(EscalationConfig(**changes), rules, path=path)


def spike(number: int, *, rank: int = 0, **changes: Any) -> Alert:
    return alert(f"spike-{number}-{rank}", rank=rank, first_step=10 * number, **changes)


def replicated(number: int, *, rank: int = 0) -> Alert:
    return spike(number, rank=rank, rule="gradient-spike", kind=Kind.GRAD_REDUCED)


def test_nothing_is_ordered_where_it_is_switched_off() -> None:
    deciding = escalator(enabled=False)

    assert deciding.decide(spike(1), STEPS, 0.0) == {}
    assert [one.reason for one in deciding.suppressed] == ["0 of 0 bytes are left, too few for 1 ranks"]


def test_local_alert_makes_its_own_rank_dump_ahead_of_the_fastest() -> None:
    commands = escalator(margin_steps=5, max_bytes=80 << 20).decide(spike(1, rank=2), STEPS, 0.0)

    assert commands == {
        2: [
            Command(
                id="spike-1-2",
                action=Action.DUMP,
                first_step=109,
                num_steps=1,
                task=DumpTask.STATISTICS,
                max_bytes=20 << 20,
                reason="loss-spike: the loss rose",
            )
        ]
    }


def test_alert_ahead_of_the_known_steps_counts_too() -> None:
    commands = escalator(margin_steps=2).decide(spike(1, step=500), STEPS, 0.0)

    assert commands[0][0].first_step == 502


def test_what_looks_alike_everywhere_makes_every_known_rank_dump_once() -> None:
    deciding = escalator(max_bytes=80 << 20)

    commands = deciding.decide(replicated(1, rank=1), STEPS, 0.0)
    later = deciding.decide(replicated(1, rank=0), STEPS, 1.0)

    assert sorted(commands) == [0, 1, 2, 3]
    assert {command.id for (command,) in commands.values()} == {"spike-1-1"}
    assert {command.first_step for (command,) in commands.values()} == {106}
    assert {command.max_bytes for (command,) in commands.values()} == {5 << 20}
    assert later == {}
    assert deciding.suppressed[0].reason == "an alert of the same incident is followed by a dump"


def test_same_spike_on_several_ranks_is_one_incident_with_one_id_and_one_count() -> None:
    deciding = escalator(max_per_hour=1)

    first = deciding.decide(spike(1, rank=0), STEPS, 0.0)
    second = deciding.decide(spike(1, rank=3), {**STEPS, 0: 90, 1: 90}, 1.0)

    assert (list(first), list(second)) == ([0], [3])
    assert first[0][0].id == second[3][0].id
    assert first[0][0].first_step == second[3][0].first_step


@pytest.mark.parametrize(
    "nothing",
    [
        spike(1, state=AlertState.RESOLVED),
        spike(1, state=AlertState.PENDING),
        spike(1, rule="gradient-nonfinite", severity=Severity.FATAL, kind=Kind.GRAD_REDUCED),
        spike(1, rule="loss-flat"),
        spike(1, rule="unknown"),
    ],
)
def test_other_alerts_have_no_consequence_and_no_record(nothing: Alert) -> None:
    deciding = escalator()

    assert deciding.decide(nothing, STEPS, 0.0) == {}
    assert deciding.decisions == []


def test_alert_that_grows_is_decided_once() -> None:
    deciding = escalator()
    deciding.decide(spike(1), STEPS, 0.0)

    assert deciding.decide(spike(1, num_series=9), STEPS, 1.0) == {}
    assert len(deciding.decisions) == 1


def test_rank_that_is_gone_is_not_asked() -> None:
    deciding = escalator()

    assert deciding.decide(spike(1, rank=7), STEPS, 0.0) == {}
    assert deciding.decide(spike(2, rank=0), {}, 0.0) == {}
    assert [decision.reason for decision in deciding.suppressed] == ["rank 7 is not running", "rank 0 is not running"]


def test_rate_limit_holds_for_any_hour() -> None:
    deciding = escalator(max_per_hour=2)
    asked = [0.0, 1000.0, 2000.0, HOUR - 1, HOUR, HOUR + 999, HOUR + 1000]

    followed = [bool(deciding.decide(spike(number), STEPS, time)) for number, time in enumerate(asked)]

    assert followed == [True, True, False, False, True, False, True]
    assert deciding.suppressed[0].reason == "2 dumps in the last hour, at most 2 are allowed"


@PATIENT
@given(st.lists(st.floats(0.0, 4 * HOUR), max_size=30).map(sorted), st.integers(0, 4))
def test_no_hour_ever_sees_more_dumps_than_allowed(times: list[float], limit: int) -> None:
    deciding = escalator(max_per_hour=limit, max_bytes=1 << 50)
    followed = [time for number, time in enumerate(times) if deciding.decide(spike(number), STEPS, time)]

    for begin in followed:
        assert sum(begin <= time < begin + HOUR for time in followed) <= limit


def test_clock_that_is_set_back_does_not_open_the_limit() -> None:
    deciding = escalator(max_per_hour=1)
    deciding.decide(spike(1), STEPS, 10 * HOUR)

    assert deciding.decide(spike(2), STEPS, 9 * HOUR) == {}


@PATIENT
@given(st.lists(st.tuples(st.booleans(), st.none() | st.floats(0.0, 1.0)), max_size=20), st.integers(0, 200 << 20))
def test_quota_is_never_exceeded(alerts: list[tuple[bool, float | None]], quota: int) -> None:
    deciding = escalator(max_bytes=quota, max_per_hour=1000)
    written = 0
    for number, (everywhere, share) in enumerate(alerts):
        asked = replicated(number) if everywhere else spike(number)
        for rank, (command,) in deciding.decide(asked, STEPS, 0.0).items():
            num_bytes = command.max_bytes if share is None else int(share * command.max_bytes)
            written += num_bytes
            if share is not None:
                deciding.settle(command.id, rank, num_bytes)

    assert written <= quota
    assert deciding.bytes_left() == quota - written


def test_quota_that_is_used_up_is_told() -> None:
    deciding = escalator(max_bytes=5 << 20)
    for number in range(4):
        deciding.decide(replicated(number), {0: 1}, 2 * HOUR * number)

    deciding.decide(replicated(9), STEPS, 100 * HOUR)

    assert deciding.suppressed[-1].reason == "0 of 5242880 bytes are left, too few for 4 ranks"


def test_rule_says_what_is_dumped_before_the_settings_do() -> None:
    base = next(rule for rule in RULES if rule.name == "loss-spike")
    own = dataclasses.replace(base, escalate=RuleEscalation(action=Action.DUMP, task=DumpTask.TENSOR, steps=4))
    left = dataclasses.replace(base, escalate=RuleEscalation(action=Action.DUMP))

    (mine,) = escalator(rules=(own,), num_steps=2).decide(spike(1), STEPS, 0.0)[0]
    (default,) = escalator(rules=(left,), num_steps=2, task=DumpTask.TENSOR).decide(spike(1), STEPS, 0.0)[0]

    assert (mine.task, mine.num_steps) == ("tensor", 4)
    assert (default.task, default.num_steps) == ("tensor", 2)


def test_decisions_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "escalations.jsonl"
    before = escalator(path=path, max_per_hour=1)
    (command,) = before.decide(spike(1), STEPS, 0.0)[0]
    before.settle(command.id, 0, 12345)
    before.decide(spike(2), STEPS, 1.0)

    after = escalator(path=path, max_per_hour=1)

    assert after.decisions == before.decisions
    assert after.bytes_left() == before.bytes_left() == (4 << 30) - 12345
    assert after.decide(spike(1), STEPS, 2.0) == {}
    assert after.decide(spike(3), STEPS, 2.0) == {}
    assert after.decide(spike(4), STEPS, HOUR) != {}


@pytest.mark.parametrize("line", ["{", "{}", "[1]", '{"decision": {"alert": "x"}}', '{"decision": 3}', "3", "null"])
def test_record_that_is_torn_is_left_out(tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "escalations.jsonl"
    escalator(path=path).decide(spike(1), STEPS, 0.0)
    with path.open("a") as file:
        file.write(line)

    deciding = escalator(path=path)
    deciding.decide(spike(2), STEPS, 1.0)

    assert len(escalator(path=path).decisions) == 2
    assert "left out" in caplog.text


def test_record_that_cannot_be_written_costs_no_dump(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    deciding = escalator(path=tmp_path / "missing" / "escalations.jsonl", max_per_hour=1)

    with caplog.at_level(logging.WARNING):
        assert deciding.decide(spike(1), STEPS, 0.0)
        assert not deciding.decide(spike(2), STEPS, 1.0)

    assert "cannot be recorded" in caplog.text
