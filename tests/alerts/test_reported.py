"""What the agent itself says becomes an alert by a rule, and holds back what follows from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.alerts.series import block, feed, rules
from trainermon.alerts.conditions.criteria import Reported
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.reported import AgentStatement
from trainermon.alerts.rules import load_rules, with_reported
from trainermon.core.errors import RuleError
from trainermon.core.values import AlertState, Kind, SeriesKey, Severity

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED
HANG = AgentStatement(
    rule="hang", holds=True, rank=3, attempt=1, step=40, time_s=5.0, detail="all_reduce of dp", value=61.0, usual=30.0
)
OVER = dataclasses.replace(HANG, holds=False, detail="it moves again", step=41)
TIME = SeriesKey(Kind.STEP, "duration_seconds")
MINE = """
rules:
  - {name: slow, severity: info, on: {kind: step, statistic: rms}, when: {threshold: {above: 1}}, summary: "{value}"}
"""


def test_statement_becomes_an_alert_with_the_words_of_its_rule() -> None:
    (alert,) = RuleEngine(load_rules()).report(HANG)

    assert (alert.rule, alert.severity, alert.state) == ("hang", Severity.CRITICAL, FIRING)
    assert (alert.rank, alert.attempt, alert.step, alert.first_step) == (3, 1, 40, 40)
    assert (alert.value, alert.baseline, alert.num_series) == (61.0, 30.0, 0)
    assert alert.message == "hang: rank 3 hangs on step 40, for 61 s by now, 30 s were allowed: all_reduce of dp"


def test_what_is_known_is_said_once_and_ends_once() -> None:
    engine = RuleEngine(load_rules())

    found = [engine.report(each) for each in (OVER, HANG, HANG, OVER, OVER)]

    assert [[alert.state for alert in alerts] for alerts in found] == [[], [FIRING], [], [RESOLVED], []]
    assert found[1][0].id == found[3][0].id
    assert found[3][0].message == "hang: over at step 41 on rank 3, began at step 40; it moves again"


def test_firing_lists_it_and_a_rule_that_is_not_there_says_nothing() -> None:
    engine = RuleEngine(load_rules())
    engine.report(HANG)

    assert [alert.rule for alert in engine.firing()] == ["hang"]
    assert engine.report(dataclasses.replace(HANG, rule="loss-spike")) == []
    assert engine.report(dataclasses.replace(HANG, rule="no-such-rule")) == []


def test_new_attempt_of_the_rank_ends_it_and_one_of_another_rank_does_not() -> None:
    engine = RuleEngine(load_rules())
    engine.report(HANG)

    assert feed(engine, [TIME], [block(0, {0: 1.0})], rank=0, attempt=2) == []
    (ended,) = feed(engine, [TIME], [block(0, {0: 1.0})], rank=3, attempt=2)

    assert (ended.rule, ended.state, ended.rank) == ("hang", RESOLVED, 3)


def test_alert_that_was_on_before_a_restart_ends_by_the_next_statement() -> None:
    (alert,) = RuleEngine(load_rules()).report(HANG)
    restarted = RuleEngine(load_rules())
    restarted.resume([alert])

    assert restarted.report(HANG) == []
    (ended,) = restarted.report(OVER)
    assert (ended.id, ended.state) == (alert.id, RESOLVED)


def test_steps_that_are_slow_everywhere_are_no_news_while_a_rank_hangs() -> None:
    engine = RuleEngine(load_rules())
    feed(engine, [TIME], [block(n, {0: 1.0 + 0.01 * (n % 3)}) for n in range(150)], rank=0, attempt=1)
    engine.report(HANG)

    during = feed(engine, [TIME], [block(n, {0: 50.0}) for n in range(150, 180)], rank=0, attempt=1)
    engine.report(OVER)
    after = feed(engine, [TIME], [block(n, {0: 50.0}) for n in range(180, 182)], rank=0, attempt=1)

    assert during == []
    assert [(alert.rule, alert.first_step) for alert in after] == [("step-time-slow", 150)]


def test_alert_that_another_part_made_counts_as_well() -> None:
    engine = RuleEngine(load_rules())
    (alert,) = RuleEngine(load_rules()).report(HANG)

    engine.adopt(alert)

    assert engine.firing() == [alert]
    assert engine.report(HANG) == []
    engine.adopt(dataclasses.replace(alert, state=RESOLVED))
    assert engine.firing() == []


def test_rules_about_ranks_and_monitor_stand_beside_a_file_of_other_rules(tmp_path: Path) -> None:
    mine = rules(tmp_path, MINE)
    built_in = {rule.name for rule in load_rules() if isinstance(rule.when, Reported)}

    assert {rule.name for rule in with_reported(mine)} == {"slow"} | built_in
    assert RuleEngine(with_reported(mine)).report(HANG)
    assert with_reported(load_rules()) == load_rules()


def test_file_may_change_how_urgent_they_are(tmp_path: Path) -> None:
    text = MINE + '  - {name: hang, severity: info, when: {reported: true}, inhibits: [slow], summary: "{detail}"}\n'

    (alert,) = RuleEngine(with_reported(rules(tmp_path, text))).report(HANG)

    assert (alert.severity, alert.message) == (Severity.INFO, "hang: all_reduce of dp")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("on: {kind: step}, ", r"on: stands beside when\.reported, which looks at no series"),
        ("for: 3, ", r"for, keep, cooldown: stand beside when\.reported"),
        ("inhibits: [monitor-lagging], ", r"inhibits: found 'monitor-lagging', which is no other rule's name"),
    ],
)
def test_what_a_reported_rule_cannot_say_is_refused(tmp_path: Path, change: str, said: str) -> None:
    text = f"rules:\n  - {{name: hang, severity: info, {change}when: {{reported: true}}, summary: x}}\n"
    text += "  - {name: monitor-lagging, severity: info, when: {reported: true}, summary: x}\n"

    with pytest.raises(RuleError, match=said):
        rules(tmp_path, text)


def test_summary_may_only_name_what_a_statement_has(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"summary: found \{worst\}. Known: rank, step, value, usual, detail"):
        rules(tmp_path, 'rules:\n  - {name: hang, severity: info, when: {reported: true}, summary: "{worst}"}\n')
