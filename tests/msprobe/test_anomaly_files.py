"""The files of single anomalies: each once over restarts and attempts, and bounded."""

import dataclasses
import json

import pytest

from tests.alerts.series import NAN, block, header
from trainermon.core.config import AnomalyRuleConfig
from trainermon.core.values import Kind, SeriesKey
from trainermon.msprobe import anomaly_files as anomalies
from trainermon.msprobe.anomaly_files import AnomalyFiles

RULES = (AnomalyRuleConfig(rule_name="AnomalyNan"),)
KEYS = tuple(SeriesKey(Kind.GRAD_REDUCED, f"h.{number}") for number in range(4))


@pytest.fixture
def write(tmp_path):
    def write(steps, *, attempt=1):
        files = AnomalyFiles(RULES, ("norm",), tmp_path)
        head = dataclasses.replace(header(attempt=attempt), series=KEYS, placements=(None,) * 4)
        for step in steps:
            files.write(head, block(step, dict.fromkeys(range(4), NAN if step % 2 else 1.0)))
        files.flush()
        records = json.loads((tmp_path / "anomaly_detected" / "rank0" / "anomaly.json").read_text())
        return [(record["step"], record["tag_name"].split("/")[0]) for record in records.values()]

    return write


def test_each_series_of_each_bad_step_is_recorded(write):
    assert write(range(4)) == [(step, f"0:h.{number}") for step in (1, 3) for number in range(4)]


@pytest.mark.parametrize("attempt", [1, 2])
def test_what_comes_again_is_recorded_once(write, attempt):
    write(range(6))

    assert [step for step, name in write([3, 4], attempt=attempt) if name == "0:h.0"] == [1, 3]


def test_a_file_is_bounded(write, monkeypatch, caplog):
    monkeypatch.setattr(anomalies, "MAX_RECORDS", 6)

    assert len(write(range(8))) == 6
    assert "rank 0 has 6 anomalies; further ones are not written" in caplog.text


def test_a_healthy_run_has_an_empty_file(write):
    assert write([0, 2]) == []
