"""The numbers of a watch in a run: stored as series, and judged by the rules."""

import json
import subprocess
import sys

import pytest

from trainermon.cli import main
from trainermon.rl.files import read_reports


@pytest.mark.server
def test_the_numbers_of_rollouts_are_stored_and_alerted_on(tmp_path, capsys):
    command = [sys.executable, "-m", "trainermon", "run", "--", sys.executable, "-m", "tests.rl.watched_training"]
    subprocess.run([*command, str(tmp_path)], check=True, capture_output=True, timeout=600)
    run = tmp_path / "output" / "rollouts"

    reports = read_reports(tmp_path / "rl_out")[0]
    sql = "SELECT step, mean FROM stats WHERE name = 'rl_ratio' ORDER BY step"
    assert main(["query", str(run), sql, "--format", "json"]) == 0
    stored = {row["step"]: row["mean"] for row in json.loads(capsys.readouterr().out)}
    assert stored == {report.step: pytest.approx(report.measures.ratio, rel=1e-12) for report in reports}
    assert main(["query", str(run), "SELECT DISTINCT rule FROM alerts", "--format", "json"]) == 0
    assert {row["rule"] for row in json.loads(capsys.readouterr().out)} == {"rollout-bookkeeping"}
