"""Further forms of a run, written by a real agent that is killed and started again."""

import csv
import json
import os
import signal

from tests.agent.nodes import wait_for

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


def test_files_are_complete_when_the_rank_hears_that_it_is_stored(make_run):
    run = make_run(outputs=OUTPUTS)
    rank = run.rank(start_agent=True)

    rank.steps(0, 25)
    position = rank.end()
    wait_for(lambda: run.status().get("flushed", {}).get("0") == position or not run.spool.exists(), "the flush")

    assert norms(run) == expected_norms(range(25))
    run.gone()
    assert "format: found 'cvs', expected one of api, csv" in run.log()


def test_a_killed_agent_costs_no_row_and_doubles_none(make_run):
    run = make_run(outputs=OUTPUTS, flush_s=3600.0)  # nothing is committed before the kill
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
    run = make_run(anomalies={**RULES, "ops": ["norm"]})
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
