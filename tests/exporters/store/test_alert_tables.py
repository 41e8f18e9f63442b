"""Alerts, and what was said about them, as tables."""

import json
import math

import pytest

from trainermon.alerts.handling import FILE, Acknowledgement, AlertHandling, Silence
from trainermon.exporters.store.store import open_run


def rows_of(run_dir, sql):
    with open_run(run_dir) as connection:
        return connection.execute(sql).fetchall()


def test_alerts_are_a_table_whatever_is_torn_in_the_log(tmp_path):
    alert = {
        "id": "a1", "rule": "nonfinite", "severity": "fatal", "state": "firing", "attempt": 1, "rank": 0, "step": 5,
        "first_step": 5, "time_s": 1.5, "kind": "grad_reduced", "value": "Infinity", "baseline": "NaN", "num_series": 2,
        "findings": [{"value": 1}], "message": "it's bad",
    }  # fmt: skip
    log = tmp_path / "nodes" / "node" / "alerts.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps(alert) + "\n[]\n\n" + json.dumps(alert)[:40])

    (found,) = rows_of(tmp_path, "SELECT host, rule, step, value, baseline, message, findings FROM alerts")

    assert found[:4] == ("node", "nonfinite", 5, math.inf)
    assert math.isnan(found[4])
    assert found[5:] == ("it's bad", '[{"value": 1}]')


@pytest.mark.parametrize("wrong", [{"a": {"b": [1]}}, {}, [1], [], [{"a": 1}], True, 10**40, "", None])
def test_a_value_of_another_kind_is_null_and_no_other_line_is_lost(tmp_path, wrong):
    path = tmp_path / "nodes" / "node" / "alerts.jsonl"
    path.parent.mkdir(parents=True)
    columns = ("id", "rule", "rank", "step", "time_s", "value", "message")
    path.write_text("\n".join(map(json.dumps, [dict.fromkeys(columns, wrong), {"id": "a2", "step": 7, "value": 0.5}])))
    words = {"acknowledged": dict.fromkeys(("alert", "by", "time_s", "note"), wrong)}
    silence = {"silenced": {"rule": "nonfinite", "by": "ada", "time_s": 2.5, "until_s": 9.0}}
    (path.parent / FILE).write_text("\n".join(map(json.dumps, [words, silence])))

    alerts = rows_of(tmp_path, "SELECT id, step, value FROM alerts")
    said = rows_of(tmp_path, "SELECT who, time_s FROM alerts_handled")

    assert len(alerts) == len(said) == 2
    assert alerts[1] == ("a2", 7, 0.5)
    assert said[1] == ("ada", 2.5)
    if isinstance(wrong, dict | list | None):
        assert alerts[0] == (None, None, None)


def test_what_was_said_about_alerts_is_a_table(tmp_path):
    path = tmp_path / "nodes" / "node" / FILE
    path.parent.mkdir(parents=True)
    handling = AlertHandling(path)
    handling.write(Acknowledgement(alert="a1", by="ada", time_s=1.5, note="node 7"))
    with path.open("a") as file:
        file.write('[]\n{"acknowledged": 3}\n')
    handling.write(Silence(rule="nonfinite", until_s=99.0, by="alan", time_s=2.5, series="h.3.*"))

    said = rows_of(tmp_path, "SELECT * FROM alerts_handled ORDER BY time_s")

    assert said == [
        ("node", "acknowledged", "a1", None, None, "ada", 1.5, None, "node 7"),
        ("node", "silenced", None, "nonfinite", "h.3.*", "alan", 2.5, 99.0, ""),
    ]
