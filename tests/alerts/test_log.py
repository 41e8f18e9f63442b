from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.alerts.alerts_by_hand import alert
from tests.alerts.series import PATIENT
from trainermon.alerts.log import AlertLog, parse_alert
from trainermon.alerts.reading import READERS
from trainermon.core.values import AlertCondition, AlertDirection, AlertState, Finding, Kind, SeriesKey, as_plain

NUMBERS = st.floats(allow_nan=False)  # NaN is not equal to itself; a test of its own
KEYS = st.builds(
    SeriesKey,
    st.sampled_from(Kind),
    st.text(max_size=20),
    st.text(max_size=8),
    st.integers(0, 9),
    st.none() | st.integers(0, 9),
    st.integers(0, 3),
)


@given(
    value=NUMBERS,
    findings=st.lists(st.builds(Finding, series=KEYS, value=NUMBERS, baseline=NUMBERS), max_size=3),
    message=st.text(max_size=40),
    state=st.sampled_from(AlertState),
)
@PATIENT
def test_what_is_written_is_read(
    tmp_path: Path, value: float, findings: list[Finding], message: str, state: AlertState
) -> None:
    path = tmp_path / "alerts.jsonl"
    path.unlink(missing_ok=True)
    written = alert(value=value, findings=tuple(findings), message=message, state=state)

    assert AlertLog(path).append(written)

    assert AlertLog(path).read() == [written]


def test_nan_is_written_as_text(tmp_path: Path) -> None:
    log = AlertLog(tmp_path / "alerts.jsonl")
    log.append(alert(value=float("nan"), baseline=float("-inf")))

    (line,) = (tmp_path / "alerts.jsonl").read_text().splitlines()
    assert (json.loads(line)["value"], json.loads(line)["baseline"]) == ("NaN", "-Infinity")
    (found,) = log.read()
    assert (found.value != found.value, found.baseline) == (True, float("-inf"))


def test_each_state_of_an_alert_is_written_once_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "alerts.jsonl"
    resolved = alert(state=AlertState.RESOLVED, step=120)
    for _ in range(3):
        log = AlertLog(path)
        assert log.append(alert())
        assert log.append(alert(num_series=5))
        assert log.append(resolved)

    assert AlertLog(path).read() == [alert(), resolved]


def test_only_fired_alerts_without_end_are_open(tmp_path: Path) -> None:
    log = AlertLog(tmp_path / "alerts.jsonl")
    for each in (alert("a"), alert("b"), alert("a", state=AlertState.RESOLVED), alert("c")):
        log.append(each)

    assert [each.id for each in log.open_alerts()] == ["b", "c"]


def test_missing_file_is_an_empty_log_and_stays_missing(tmp_path: Path) -> None:
    log = AlertLog(tmp_path / "alerts.jsonl")

    assert (log.read(), log.open_alerts(), log.retry()) == ([], [], True)
    assert not (tmp_path / "alerts.jsonl").exists()


def test_file_is_private(tmp_path: Path) -> None:
    AlertLog(tmp_path / "alerts.jsonl").append(alert())

    assert stat.S_IMODE((tmp_path / "alerts.jsonl").stat().st_mode) == 0o600


def test_torn_last_line_costs_neither_its_successor_nor_itself_the_second_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "alerts.jsonl"
    AlertLog(path).append(alert("a"))
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole.replace(b'"a"', b'"b"')[:cut])
        with caplog.at_level(logging.CRITICAL):
            log = AlertLog(path)
            log.append(alert("c"))
            log.append(alert("b"))

        assert sorted(each.id for each in log.read()) == ["a", "b", "c"]


@pytest.mark.parametrize("line", ["{}", "3", "null", '"x"', "[]", '{"id": 1}', "\ufeff{", '{"findings": 3}'])
def test_line_that_is_no_alert_is_left_out_and_told(
    tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "alerts.jsonl"
    path.write_text(line + "\n")

    log = AlertLog(path)
    log.append(alert())

    assert [each.id for each in log.read()] == ["a1"]
    assert "left out" in caplog.text


@pytest.mark.parametrize("field", ["value", "time_s"])
def test_number_as_text_is_no_number(field: str) -> None:
    with pytest.raises(ValueError, match=r"found the text '3\.5', expected a number"):
        parse_alert(as_plain(alert()) | {field: "3.5"})


def as_before(**changes: Any) -> dict[str, Any]:
    """Return an alert as the version before wrote it, without condition and direction."""
    plain: dict[str, Any] = as_plain(alert(**changes))
    return {name: value for name, value in plain.items() if name not in ("condition", "direction")}


@pytest.mark.parametrize(
    ("rule", "value", "expected"),
    [
        ("gradient-dead", 1.0, (AlertCondition.DEAD, AlertDirection.NONE)),
        ("gradient-spike", 9.0, (AlertCondition.SPIKE, AlertDirection.UP)),
        ("gradient-spike", 0.1, (AlertCondition.SPIKE, AlertDirection.DOWN)),
        ("gradient-vanishing", 0.1, (AlertCondition.VANISHING, AlertDirection.DOWN)),
        ("update-ratio-high", 9.0, (AlertCondition.RATIO, AlertDirection.UP)),
        ("hang", 9.0, (AlertCondition.REPORTED, AlertDirection.NONE)),
        ("my-vanishing", 9.0, (None, AlertDirection.UP)),  # nobody knows what that rule was
        ("my-vanishing", float("nan"), (None, AlertDirection.NONE)),
    ],
)
def test_an_alert_of_the_version_before_takes_its_condition_from_the_built_in_rule(
    rule: str, value: float, expected: tuple[AlertCondition | None, AlertDirection]
) -> None:
    found = parse_alert(as_before(rule=rule, value=value, baseline=1.0))

    assert (found.condition, found.direction) == expected


@pytest.mark.parametrize("field", ["condition", "direction"])
def test_a_condition_that_nobody_knows_is_no_alert(field: str) -> None:
    with pytest.raises(ValueError, match="'sideways' is not a valid"):
        parse_alert(as_plain(alert()) | {field: "sideways"})


def test_every_condition_of_a_rule_has_its_name_in_an_alert() -> None:
    assert {*READERS, "custom"} == {str(condition) for condition in AlertCondition}


class FullDisk:
    """Stands for `os.write` on a disk that takes so many more bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.write = os.write

    def __call__(self, descriptor: int, line: bytes) -> int:
        if self.room <= 0:
            raise OSError(28, "No space left on device")
        written = self.write(descriptor, line[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 1, 100])
def test_full_disk_delays_alerts_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    path = tmp_path / "alerts.jsonl"
    log = AlertLog(path)
    disk = FullDisk(room)
    monkeypatch.setattr("trainermon.core.ledger.os.write", disk)
    assert not log.append(alert("a"))
    assert not log.append(alert("b"))
    assert not log.append(alert("b"))
    assert not log.retry()
    assert log.num_waiting == 2
    assert "2 alerts wait" in caplog.text

    disk.room = 1 << 20
    assert log.append(alert("c"))

    assert [each.id for each in log.read()] == ["a", "b", "c"]
    assert [each.id for each in AlertLog(path).read()] == ["a", "b", "c"]


def test_folder_that_is_gone_delays_alerts(tmp_path: Path) -> None:
    path = tmp_path / "nodes" / "alerts.jsonl"
    log = AlertLog(path)
    assert not log.append(alert("a"))

    path.parent.mkdir()

    assert log.retry()
    assert len(log.read()) == 1


def test_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = os.write
    monkeypatch.setattr("trainermon.core.ledger.os.write", lambda fd, line: written.append(line) or write(fd, line))

    AlertLog(tmp_path / "alerts.jsonl").append(alert())

    assert [line.endswith(b"}\n") for line in written] == [True]
