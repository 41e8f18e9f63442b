"""What people say about alerts: recorded with who and when, kept over restarts; silences mute what follows."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.agent.nodes import wait_for
from trainermon import cli
from trainermon.alerts.handling import FILE, Acknowledgement, AlertHandling, Silence
from trainermon.core.errors import ConfigError
from trainermon.core.launcher import start_agent
from trainermon.core.values import Alert, AlertState, Finding, Kind, SeriesKey, Severity
from trainermon.exporters.prometheus.alert_series import FIRING, TOTAL, AlertSeries

RULES = """
rules:
  - name: loss-low
    severity: warning
    on: {kind: loss, statistic: mean}
    when: {threshold: {below: 4.0}}
    for: 1
    escalate: {action: dump, task: statistics, steps: 2}
    summary: loss is low
"""


def alert(name="h.3.mlp", *, rule="gradient-spike", identity="a1"):
    finding = Finding(series=SeriesKey(Kind.GRAD_REDUCED, name), value=1.0)
    return Alert(
        id=identity,
        rule=rule,
        severity=Severity.WARNING,
        state=AlertState.FIRING,
        attempt=1,
        rank=0,
        step=5,
        first_step=5,
        time_s=1.0,
        kind=Kind.GRAD_REDUCED,
        value=1.0,
        baseline=0.5,
        num_series=1,
        findings=(finding,),
        message="",
    )


def silence(series="", *, until_s=100.0):
    return Silence(rule="gradient-spike", series=series, until_s=until_s, by="mia", time_s=0.0)


@pytest.mark.parametrize(
    ("series", "name", "is_muted"),
    [("", "h.3.mlp", True), ("h.3.*", "h.3.mlp", True), ("h.3.*", "h.4.mlp", False), ("h.[3", "h.3.mlp", False)],
)
def test_a_silence_mutes_a_rule_or_some_of_its_series(series, name, is_muted):
    assert silence(series).mutes(alert(name), 50.0) == is_muted
    assert not silence(series).mutes(alert(name, rule="other"), 50.0)
    assert not silence(series).mutes(alert(name), 100.0)


def test_what_was_said_is_read_back_and_torn_lines_cost_nothing_else(tmp_path):
    path = tmp_path / FILE
    handling = AlertHandling(path)
    handling.write(Acknowledgement(alert="a1", by="mia", time_s=7.0, note="known"))
    handling.write(silence())
    with path.open("a") as file:
        file.write('{"silenced": {"rule": "x"\n')

    again = AlertHandling(path)

    assert again.acknowledgement("a1") == Acknowledgement(alert="a1", by="mia", time_s=7.0, note="known")
    assert again.muted([alert(), alert("h.1", identity="a2", rule="other")], 50.0) == {"a1"}
    assert again.muted([alert()], 200.0) == frozenset()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("changes", [{"by": " "}, {"until_s": 1e9}, {"note": "x" * 501}])
def test_what_cannot_be_meant_is_refused(changes):
    with pytest.raises(ConfigError):
        Silence(**{"rule": "r", "until_s": 60.0, "by": "mia", "time_s": 0.0, **changes})


def test_a_muted_alert_does_not_fire_for_prometheus_and_is_counted_all_the_same():
    series = AlertSeries("run", {})
    series.set([alert()], now_s=2.0, muted={"a1"})

    values = {name: samples.values for name, samples in series.samples()}

    assert (values[FIRING.name], values[TOTAL.name]) == ((0,), (1,))


def assert_told_as_json(output, capsys):
    assert cli.main(["alerts", str(output), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told
    assert all(one.keys() >= {"id", "rule", "node", "acknowledged", "silenced"} for one in told)
    assert any(one["acknowledged"] for one in told)


def assert_listed(output, capsys):
    capsys.readouterr()
    assert cli.main(["alerts", output]) == 0
    listed = capsys.readouterr().out
    assert "known to mia" in listed
    assert "loss-low: silenced until" in listed
    assert_told_as_json(output, capsys)


def assert_wrong_words_are_refused(run, identity):
    assert run.post("api/acknowledgements", {"alert": ["none"], "by": "mia"})[0] == 409
    assert run.post("api/acknowledgements", {"alert": [identity]})[0] == 400
    assert run.post("api/silences", {"rule": "no-such", "minutes": 1, "by": "mia"})[0] == 409
    assert run.post("api/acknowledgements", {"alert": [identity], "by": "eve"}, token="wrong")[0] == 401


def test_words_survive_a_restart_of_the_agent_and_a_silence_mutes_its_dumps(make_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "rules.yaml").write_text(RULES)
    run = make_run(rules=str(tmp_path / "rules.yaml"))
    monkeypatch.setenv("TRAINERMON_SPOOL", str(run.spool.parent))
    rank = run.rank(start_agent=True)
    run.running()
    output = str(run.output)
    assert cli.main(["alerts", output, "--silence", "loss-low", "--for", "2h", "--by", "mia"]) == 0
    rank.steps(0, 3)
    (found,) = wait_for(lambda: run.get_json("api/alerts"), "an alert")
    assert found["silenced"]["by"] == "mia"
    assert run.post("api/acknowledgements", {"alert": [found["id"]], "by": "mia", "note": "known"})[0] == 202
    pid = run.running()["pid"]
    wait_for(run.alerts, "the alert in the log")
    os.kill(pid, signal.SIGKILL)

    start_agent(run.spool)
    run.running(other_than=pid)
    rank.steps(3, 3)
    wait_for(lambda: run.get_json("api/run")["step"] == 5, "step 5")

    (again,) = run.get_json("api/alerts")
    assert again["acknowledged"].items() >= {"by": "mia", "note": "known", "alert": found["id"]}.items()
    assert abs(again["acknowledged"]["time_s"] - time.time()) < 3600
    assert rank.commands()[0] == 0
    assert b'trainermon_alerts_firing{run="run",rule="loss-low",severity="warning"} 0' in run.get("metrics")
    assert_listed(output, capsys)
    assert cli.main(["alerts", output, "--unsilence", "loss-low"]) == 0
    wait_for(lambda: run.get_json("api/alerts")[0]["silenced"] is None, "the end of the silence")
    assert b'rule="loss-low",severity="warning"} 1' in run.get("metrics")
    words = [next(iter(json.loads(line))) for line in (run.node_dir / FILE).read_text().splitlines()]
    assert words == ["silenced", "acknowledged", "silenced"]
    assert_wrong_words_are_refused(run, found["id"])


def test_without_an_agent_nothing_is_said(tmp_path, capsys):
    (tmp_path / "nodes").mkdir()

    assert cli.main(["alerts", str(tmp_path), "--silence", "loss-low"]) == 1
    assert "no agent of this run is running on this node" in capsys.readouterr().err
    assert cli.main(["alerts", str(tmp_path), "--silence", "loss-low", "--for", "soon"]) == 1
    assert "expected a time such as 30m" in capsys.readouterr().err
    assert cli.main(["alerts", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no alerts\n"
