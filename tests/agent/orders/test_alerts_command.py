"""The list of a run's alerts as a person reads it in a terminal, and as a program does behind a pipe."""

import pytest

from trainermon.agent.orders.alerts_command import listed
from trainermon.alerts.log import AlertLog
from trainermon.core.values import Alert, AlertState, Finding, Kind, SeriesKey, Severity

MESSAGE = "gradient-nonfinite: NaN or Inf in 44 of 44 gradients at step 25 on rank 1, worst position.weight (512 NaN)"


def a_run(folder):
    alert = Alert(
        id="19ddc7fb308ec3b0",
        rule="gradient-nonfinite",
        severity=Severity.CRITICAL,
        state=AlertState.FIRING,
        attempt=1,
        rank=1,
        step=25,
        first_step=25,
        time_s=1.0,
        kind=Kind.GRAD_REDUCED,
        value=1.0,
        baseline=0.5,
        num_series=1,
        findings=(Finding(series=SeriesKey(Kind.GRAD_REDUCED, "position.weight"), value=1.0),),
        message=MESSAGE,
    )
    (folder / "nodes" / "n").mkdir(parents=True)
    assert AlertLog(folder / "nodes" / "n" / "alerts.jsonl").append(alert)
    return folder


@pytest.mark.parametrize(("columns", "indent"), [(80, 4), (120, 38)])
def test_in_a_terminal_the_lines_of_an_alert_stand_below_one_another(columns, indent, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))

    lines = listed(a_run(tmp_path)).splitlines()

    assert len(lines) > 1
    assert max(map(len, lines)) <= columns
    assert all(line.startswith(" " * indent) and line[indent] != " " for line in lines[1:])
    assert " ".join(" ".join(lines).split()).endswith(MESSAGE)


def test_behind_a_pipe_an_alert_is_one_line(tmp_path):
    (line,) = listed(a_run(tmp_path)).splitlines()

    assert line.endswith(MESSAGE)
