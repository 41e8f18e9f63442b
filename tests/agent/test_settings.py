"""`agent.json`: what is refused, and by which words."""

from __future__ import annotations

import pytest

from trainermon.agent.settings import load_settings
from trainermon.core.errors import ConfigError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linger": 3}, "linger: unknown key; did you mean 'linger_s'?"),
        ({"port": "80"}, "port: found '80', expected a whole number"),
        ({"port": True}, "port: found True, expected a whole number"),
        ({"port": 70000}, "port: found 70000, expected 0 to 65535"),
        ({"output": "here"}, "output: found 'here', expected an absolute path"),
        ({"retention": {"hours": 3}}, "retention.hours: unknown key"),
        ({"retention": 3}, "retention: found 3, expected a mapping"),
        ({"flush_s": 0}, "flush_s: found 0.0, expected a number of seconds above 0"),
        ({"allowed_hosts": "x"}, "allowed_hosts: found 'x', expected a list"),
        ({"escalation": {"task": "all"}}, "escalation.task: found 'all'"),
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
