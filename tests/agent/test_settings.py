"""`agent.json`: what is refused, and by which words."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trainermon.agent.settings import load_settings
from trainermon.core.config import (
    AgentConfig,
    AlertConfig,
    AnomalyArguments,
    AnomalyRuleConfig,
    EscalationConfig,
    HangConfig,
    InfluxDBConfig,
    OutputConfig,
)
from trainermon.core.errors import ConfigError
from trainermon.core.values import DumpTask

RECORDED = Path(__file__).parents[1] / "recorded" / "agent.json"


def test_what_the_version_before_was_told_is_understood(tmp_path):
    shutil.copy(RECORDED, tmp_path)

    settings = load_settings(tmp_path)

    assert (settings.run_id, settings.output, settings.rules) == ("run", "/output/run", "/etc/rules.yaml")
    assert (settings.agent, settings.world_size) == (AgentConfig(port=9461, linger_s=5.0), 4)
    assert settings.hang == HangConfig(step_s=30.0)
    assert settings.escalation == EscalationConfig(
        task=DumpTask.TENSOR, max_dump_mb=100.5, max_per_hour=7, num_steps=2, margin_steps=4
    )
    turbulence = AnomalyRuleConfig(rule_name="AnomalyTurbulence", args=AnomalyArguments(threshold=0.5))
    assert settings.alert == AlertConfig(rules=(turbulence, AnomalyRuleConfig(rule_name="AnomalyNan")), dump=True)
    assert settings.outputs == OutputConfig(
        format=("csv", "influxdb"),
        ops=("norm", "mean"),
        ndigits=9,
        step_count_per_record=5,
        append_output=("Dec03_21-34-40", "Dec03_21-34-41"),
        influxdb=InfluxDBConfig(url="http://host:8086", token_file="/etc/token"),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world": 3}, "world: unknown key; did you mean 'world_size'?"),
        ({"port": "80"}, "agent.port: found '80', expected a whole number"),
        ({"port": True}, "agent.port: found True, expected a whole number"),
        ({"port": 70000}, "agent.port: found 70000, expected 0 to 65535"),
        ({"output": "here"}, "output: found 'here', expected an absolute path"),
        ({"retention": {"hours": 3}}, "retention.hours: unknown key"),
        ({"retention": 3}, "retention: found 3, expected a mapping"),
        ({"flush_s": 0}, "agent.flush_s: found 0.0, expected a number of seconds above 0"),
        ({"allowed_hosts": "x"}, "allowed_hosts: found 'x', expected a list"),
        ({"escalation": {"task": "all"}}, "escalation.task: found 'all', expected 'statistics' or 'tensor'"),
    ],
)
def test_settings_are_read_strictly(run, change, message):
    run.write_settings(**change)

    with pytest.raises(ConfigError) as error:
        load_settings(run.spool)

    assert message in str(error.value)
    assert str(run.spool / "agent.json") in str(error.value)


def test_settings_that_are_missing_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"agent\.json cannot be read"):
        load_settings(tmp_path)
    (tmp_path / "agent.json").write_text('{"run_id": "r"}')
    with pytest.raises(ConfigError, match="output: missing; it has no default"):
        load_settings(tmp_path)
