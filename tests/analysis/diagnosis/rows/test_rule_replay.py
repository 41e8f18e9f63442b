"""`trainermon rules test`: a stored run through rules, from the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.analysis.stored_run import ALL_NAN, FINITE, grad, store
from trainermon.alerts.rules import load_rules
from trainermon.analysis.diagnosis.rows.rule_replay import rehearse
from trainermon.cli import main
from trainermon.core.errors import StoreError
from trainermon.core.values import Kind, SeriesKey

LOSS = SeriesKey(Kind.LOSS, "loss")
MINE = """
rules:
  - name: loss-high
    severity: warning
    on: {kind: loss, statistic: mean}
    when: {threshold: {above: 5}}
    keep: {steps: 2}
    summary: "the loss is {value} at step {step} on rank {rank}"
  - name: update-spike
    severity: warning
    on: {kind: update, statistic: rms}
    when: {spike: {score: 8}}
    summary: "{worst}"
"""


def loss(value):
    return (1, value, value, value, value**2, 0, 0, 0)


@pytest.fixture
def run_dir(tmp_path):
    """Return a run of two ranks whose loss is high on steps 4 to 6, and whose gradient is lost on step 9 to the end."""
    losses = {step: 9.0 if 4 <= step <= 6 else 1.0 for step in range(12)}
    for steps in (range(5), range(5, 12)):  # two segments, with tables of their own in another order
        rows = {LOSS: loss(1.0), grad("w"): FINITE} if 0 in steps else {grad("w"): FINITE, LOSS: loss(1.0)}
        store(
            tmp_path / "run",
            {
                step: dict.fromkeys(
                    range(2), rows | {LOSS: loss(losses[step])} | ({grad("w"): ALL_NAN} if step >= 9 else {})
                )
                for step in steps
            },
        )
    return tmp_path / "run"


def test_alerts_are_those_that_the_agent_would_have_given(run_dir, tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE)

    found = rehearse(load_rules(tmp_path / "mine.yaml"), run_dir)

    assert [(alert.rule, alert.rank, alert.first_step) for alert in found.alerts] == [
        ("loss-high", 0, 4),
        ("loss-high", 1, 4),
    ]
    assert {found.ends[alert.id] for alert in found.alerts} == {8}
    assert found.num_steps == 24


def test_report_groups_ranks_and_says_what_could_not_be_judged(run_dir, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(MINE)

    status = main(["rules", "test", str(tmp_path / "mine.yaml"), str(run_dir)])

    said = capsys.readouterr().out
    assert status == 3
    assert "loss-high (warning): 1 time\n  from step 4, ranks 0, 1, over at step 8\n    the loss is 9 at step 4" in said
    assert "without any series in this run: update-spike" in said


def test_built_in_rules_see_the_lost_gradient(run_dir, capsys):
    status = main(["rules", "test", "default", str(run_dir)])

    said = capsys.readouterr().out
    assert status == 3
    assert "gradient-nonfinite (fatal): 1 time\n  from step 9, ranks 0, 1, still on at the end" in said
    named = " ".join(said.split()).partition("not to be judged from a store: ")[2].partition(" without any series")[0]
    assert {"near-overflow", "replica-norms-differ", "hang"} <= set(named.split(", "))


def test_json_is_one_alert_per_line(run_dir, capsys):
    main(["rules", "test", "default", str(run_dir), "--json"])

    alerts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(alert["rule"], alert["rank"]) for alert in alerts} == {
        ("gradient-nonfinite", 0),
        ("gradient-nonfinite", 1),
    }


def test_healthy_run_is_status_0(tmp_path, capsys):
    store(tmp_path / "run", {step: {0: {LOSS: loss(1.0 + 1e-3 * np.sin(step))}} for step in range(5)})

    assert main(["rules", "test", "default", str(tmp_path / "run")]) == 0
    assert "no rule would have fired" in capsys.readouterr().out


def test_run_without_steps_is_refused(tmp_path):
    (tmp_path / "nodes").mkdir()

    with pytest.raises(StoreError, match="no step is stored"):
        rehearse(load_rules(), tmp_path)


def test_wrong_rules_are_status_1_with_the_nearest_name(run_dir, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(MINE.replace("severity", "sevrity"))

    assert main(["rules", "test", str(tmp_path / "mine.yaml"), str(run_dir)]) == 1
    assert "sevrity: unknown key; did you mean 'severity'?" in capsys.readouterr().err


def test_check_lists_every_mistake(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(MINE.replace("severity: warning", "severity: loud"))

    assert main(["rules", "check", str(tmp_path / "mine.yaml")]) == 1
    said = capsys.readouterr().out
    assert said.count("severity: found 'loud'. Known: info, warning, critical, fatal") == 2
    assert "2 of 2 rules cannot be used" in said


def test_check_and_list_know_the_built_in_rules(capsys):
    assert main(["rules", "check"]) == 0
    assert main(["rules", "list"]) == 0
    said = capsys.readouterr().out
    for rule in load_rules():
        assert f"\n{rule.name} " in said
