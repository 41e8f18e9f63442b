"""Further forms of a run, written by a real agent that is killed and started again."""

import csv
import json
import os
import signal
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.agent.nodes import wait_for
from tests.exporters.influx_servers import influxdb
from tests.ports import free_port
from tests.server_programs import find_program

OUTPUTS = {"format": ["csv", "cvs"], "ops": ["norm"], "ndigits": 17, "step_count_per_record": 10}
RULES = {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}


def norms(run):
    """Return (step, norm) of the first gradient in all csv files, in their order."""
    found = []
    for path in sorted(
        run.output.glob("csv/*-rank0-*/grad_reduced_*.csv"), key=lambda path: int(path.stem.split("-")[1])
    ):
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            found += [(int(row["step"]), float(row["norm"])) for row in rows if row["name"] == "h.0.weight"]
    return found


def expected_norms(steps):
    return [(step, (1000.0 * step + 1) ** 0.5) for step in steps]


def test_files_are_complete_when_the_agent_has_gone(make_run):
    run = make_run(outputs=OUTPUTS)
    rank = run.rank(start_agent=True)

    rank.steps(0, 25)
    rank.end()
    run.gone()

    assert norms(run) == expected_norms(range(25))
    assert "format: found 'cvs', expected one of api, csv" in run.log()


def test_a_killed_agent_costs_no_row_and_doubles_none(make_run):
    run = make_run(outputs=OUTPUTS, flush_s=0.5)
    rank = run.rank(start_agent=True)
    rank.steps(0, 15)
    wait_for(lambda: len(norms(run)) == 15, "15 steps in the files")

    os.kill(run.running()["pid"], signal.SIGKILL)
    rank.steps(15, 8)
    run.launch_agent()
    rank.end()
    run.gone()

    assert norms(run) == expected_norms(range(23))


def test_single_anomalies_are_recorded_and_alerts_raised(make_run):
    run = make_run(alert=RULES)
    rank = run.rank(start_agent=True)
    rank.steps(0, 3)
    rank.steps(3, 1, nan=True)
    rank.end()
    run.gone()

    records = json.loads((run.output / "anomaly_detected" / "rank0" / "anomaly.json").read_text())
    assert [(record["tag_name"], record["step"]) for record in records.values()] == [
        ("0:h.2.weight/rank0/post_grad", 3)
    ]
    assert any(alert["rule"] == "anomaly-nan" and alert["first_step"] == 3 for alert in run.alerts())


@pytest.mark.server
def test_points_are_in_influxdb_and_counted_whatever_becomes_of_the_agent(make_run, tmp_path):
    with influxdb(tmp_path / "server") as server:
        run = make_run(outputs={"format": ["influxdb"], "influxdb": {"url": server.url, "api": "v1"}})
        rank = run.rank(start_agent=True)
        rank.steps(0, 10)
        wait_for(lambda: exporter_metrics(run).get("trainermon_exported_points_total"), "points of a living run")

        os.kill(run.running()["pid"], signal.SIGKILL)
        rank.steps(10, 10)
        run.launch_agent()
        rank.end()
        run.gone()

        rows = server.query("SELECT step, rms FROM trainermon_grad_reduced WHERE module = 'h.0.weight'")
    truth = {step: ((1000.0 * step + 1) / 100) ** 0.5 for step in range(20)}
    assert {row["step"]: row["rms"] for row in rows} == truth
    assert len(rows) == 20
    state = json.loads((run.node_dir / "influxdb.state.json").read_text())
    assert state["newest"] == {"0": [1, 19]}


def exporter_metrics(run):
    families = text_string_to_metric_families(run.get("metrics").decode())
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: sample.value for sample in samples if sample.labels.get("exporter") == "influxdb"}


@pytest.mark.server
def test_a_server_that_is_away_keeps_neither_rank_nor_agent(make_run):
    url = f"http://127.0.0.1:{free_port()}"
    run = make_run(outputs={"format": ["influxdb", "null"], "influxdb": {"url": url, "api": "v1"}})
    rank = run.rank(start_agent=True)
    rank.steps(0, 10)
    wait_for(lambda: exporter_metrics(run).get("trainermon_export_waiting_bytes"), "a segment that waits")
    steps = b'trainermon_exported_steps_total{run="run",exporter="null"} 10'
    wait_for(lambda: steps in run.get("metrics"), "the other exporter")  # which is not held up
    exposition = run.get("metrics")
    checked = subprocess.run([find_program("promtool"), "check", "metrics"], input=exposition, capture_output=True)
    position = rank.end()
    wait_for(lambda: run.status().get("flushed", {}).get("0") == position or not run.spool.exists(), "the flush")

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    assert b'trainermon_ranks_in_phase{run="run",phase="step"} 1' in exposition
    assert b'trainermon_last_heartbeat_timestamp_seconds{run="run",rank="0"}' in exposition
    assert b"trainermon_integrity_checks_total" in exposition
    assert "takes no points (failure 1): no answer" in run.log()
