"""The agent's view of its own parts: an alert while something is wrong, none before and after."""

from __future__ import annotations

import dataclasses

import pytest

from trainermon.agent.health import LOOK_S, RECENT_S, STORE_LIMIT_S, HealthReadings, MonitorHealth
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules

WELL = HealthReadings(rank=2, attempt=1, step=40)


class Agent:
    """A monitor whose readings a test sets, under its own clock."""

    def __init__(self):
        self.now_s = 1000.0
        self.readings = WELL
        self.alerts = []
        self._engine = RuleEngine(load_rules())
        self.health = MonitorHealth(lambda: self.readings, self._report)

    def _report(self, statement):
        self.alerts += self._engine.report(statement)

    def pass_time(self, seconds, **readings):
        """Let time pass in looks, and return the alerts of it, as rule and state."""
        self.readings = dataclasses.replace(self.readings, **readings)
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += LOOK_S
            self.health.poll(self.now_s)
        found, self.alerts = self.alerts, []
        return [(alert.rule, str(alert.state)) for alert in found]

    def firing(self):
        return self._engine.firing()


@pytest.fixture
def agent():
    return Agent()


def test_monitor_that_works_is_no_alert(agent):
    assert agent.pass_time(3600) == []


@pytest.mark.parametrize(
    ("readings", "rule"),
    [
        ({"lost_records": {2: 0, 3: 7}}, "monitor-records-lost"),
        ({"lost_files": 1}, "monitor-records-lost"),
        ({"num_export_failures": 4}, "monitor-export-failing"),
    ],
)
def test_what_was_lost_is_told_until_it_is_long_ago(agent, readings, rule):
    assert agent.pass_time(60, **readings) == [(rule, "firing")]
    assert agent.pass_time(RECENT_S) == [(rule, "resolved")]
    assert agent.pass_time(3600) == []


def test_loss_that_goes_on_is_one_alert(agent):
    found = []
    for number in range(1, 100):
        found += agent.pass_time(60, lost_records={2: number})

    assert found == [("monitor-records-lost", "firing")]


def test_message_names_the_ranks_that_lost_records(agent):
    agent.pass_time(10, lost_records={2: 0, 3: 7, 11: 1})

    (alert,) = agent.firing()
    assert alert.message == (
        "monitor-records-lost: 8 records of this node were not taken by step 40 (left out by rank 3, 11, whose log "
        "says why: a spool that is slow or full): rules and store have gaps"
    )
    assert (alert.rank, alert.attempt, alert.value) == (2, 1, 8.0)


def test_message_counts_the_files_that_were_removed(agent):
    agent.pass_time(10, lost_files=2)

    (alert,) = agent.firing()
    assert "(2 journal files were removed before they were read)" in alert.message


def test_lag_that_lasts_is_told_and_a_short_one_is_not(agent):
    assert agent.pass_time(LOOK_S, lag_s=100.0) == []
    assert agent.pass_time(LOOK_S, lag_s=0.1) == []
    assert agent.pass_time(60, lag_s=100.0) == [("monitor-lagging", "firing")]
    assert agent.pass_time(LOOK_S, lag_s=0.1) == [("monitor-lagging", "resolved")]


def test_store_that_fails_for_a_minute_is_told_with_the_reason(agent):
    assert agent.pass_time(STORE_LIMIT_S - LOOK_S, store_error="no space left") == []
    assert agent.pass_time(4 * LOOK_S) == [("monitor-store-failing", "firing")]
    assert "no space left" in agent.firing()[0].message
    assert agent.pass_time(LOOK_S, store_error="") == [("monitor-store-failing", "resolved")]


def test_time_in_which_the_agent_was_stopped_does_not_count(agent):
    agent.pass_time(STORE_LIMIT_S / 2, store_error="no space left")
    agent.now_s += 10_000
    agent.health.restart_timers()

    assert agent.pass_time(STORE_LIMIT_S / 2) == []


def test_condition_that_failed_is_told_for_good(agent):
    assert agent.pass_time(3600, faults={"mine": "ValueError: odd"}) == [("monitor-condition-failing", "firing")]
    assert "mine: ValueError: odd" in agent.firing()[0].message


def test_nothing_is_said_before_there_is_a_rank(agent):
    agent.readings = None
    agent.now_s += 100
    agent.health.poll(agent.now_s)

    assert agent.alerts == []
