"""The list of runs: what it says of sound, broken, growing and strangely named ones."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.dashboards.stored_runs import StoredCurves, add_segment, alert_of, store_run
from trainermon.agent.hang.crash import crash_verdict
from trainermon.agent.hang.evidence import DEAD, ProcessExit, RankEvidence
from trainermon.agent.lifecycle.lock import AgentStatus, write_status
from trainermon.agent.runs import facts, run_list
from trainermon.agent.runs.facts import NewestRows, RunFacts
from trainermon.agent.runs.folder import find_places
from trainermon.agent.runs.run_list import SILENT_S, RunList
from trainermon.agent.web.listener import TARGETS_FILE
from trainermon.cli import main
from trainermon.core.values import AlertState, Severity
from trainermon.exporters.discovery import write_targets


def listed(*opened: Path, now_s: float = 2e9) -> dict[str, RunFacts]:
    runs = RunList(opened, clock=lambda: now_s)
    runs.scan()
    return runs.facts


def test_a_line_says_what_ranks_and_agent_have_written(tmp_path: Path) -> None:
    curves = StoredCurves.made(40, started_s=1.79e9)
    fired = alert_of()
    over = dataclasses.replace(fired, id="other", state=AlertState.RESOLVED, severity=Severity.FATAL)
    elsewhere = dataclasses.replace(fired, id="elsewhere", rank=1)
    store_run(tmp_path / "base", curves, world_size=4, tags=("sweep", "lr-3e-4"), alerts=(fired, over, elsewhere))

    facts = listed(tmp_path)["base"]

    assert (facts.name, facts.state, facts.problem) == ("base", "finished", "")
    assert (facts.step, facts.world_size, facts.attempt, facts.nodes) == (39, 4, 1, ("node-a",))
    assert facts.loss == pytest.approx(curves.loss[39], rel=1e-12)
    assert facts.started_s == 1.79e9
    assert facts.last_time_s == pytest.approx(1.79e9 + 0.4 * 40)
    assert (facts.alerts, facts.alerts_firing, facts.worst) == (2, 1, Severity.CRITICAL)
    assert facts.tags == ("sweep", "lr-3e-4")
    assert facts.framework == "plain"


DEATHS = {
    "failed": [RankEvidence(rank=0, step=3, life=DEAD, error="Traceback\nValueError: bad data")],
    "killed": [RankEvidence(rank=0, step=3, life=DEAD, exit=ProcessExit(signal=signal.SIGKILL))],
    "stopped": [RankEvidence(rank=0, step=3, life=DEAD, exit=ProcessExit(signal=signal.SIGTERM))],
    "interrupted": [RankEvidence(rank=0, step=3, life=DEAD, error="Traceback\nKeyboardInterrupt")],
    "crashed": [RankEvidence(rank=0, step=3, life=DEAD, exit=ProcessExit(signal=signal.SIGSEGV))],
}


@pytest.mark.parametrize(
    ("change", "state"),
    [
        *(({"message": f"rank-dead: {crash_verdict(died, [0]).text}"}, state) for state, died in DEATHS.items()),
        ({"state": AlertState.RESOLVED}, "finished"),
        ({"attempt": 0}, "finished"),
        ({"rule": "hang"}, "finished"),
    ],
)
def test_the_list_says_how_the_newest_attempt_of_a_run_ended(tmp_path, change, state) -> None:
    fired = dataclasses.replace(alert_of(rule="rank-dead", severity=Severity.FATAL), **change)
    store_run(tmp_path / "run", StoredCurves.made(4), alerts=(fired,))

    assert listed(tmp_path)["run"].state == state


def test_runs_are_listed_in_the_terminal_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = StoredCurves.made(6, started_s=1.78e9)
    bad.loss[5] = np.nan
    store_run(tmp_path / "old", bad)
    store_run(tmp_path / "new", StoredCurves.made(3, started_s=1.79e9), alerts=(alert_of(),))

    assert main(["serve", str(tmp_path), "--list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main(["serve", str(tmp_path), "--list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)

    assert [line[-1] for line in lines] == ["run", "new", "old"]
    assert (lines[1][3], lines[1][5], lines[2][3:6]) == ("2", "1", ["5", "not", "finite"])
    assert [(one["name"], one["step"]) for one in told] == [("new", 2), ("old", 5)]


@pytest.mark.parametrize("state", ["finished", *DEATHS])
def test_the_columns_of_the_list_stand_below_their_heads_on_eighty_columns(tmp_path, capsys, state) -> None:
    deaths = crash_verdict(DEATHS[state], [0]).text if state in DEATHS else ""
    fired = dataclasses.replace(alert_of(rule="rank-dead", severity=Severity.FATAL), message=f"rank-dead: {deaths}")
    bad = StoredCurves.made(6)
    bad.loss[5] = np.nan
    store_run(tmp_path / "20261129-081400-3f2a", bad, alerts=(fired,) * bool(deaths))
    store_run(tmp_path / "other", StoredCurves.made(3))

    assert main(["serve", str(tmp_path), "--list"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()

    begins = {word: head.index(word) for word in ("state", "started", "run")}
    ends = [head.index(word) + len(word) for word in ("step", "loss", "alerts")]
    assert {line[begins["state"] :].split()[0] for line in lines} == {state, "finished"}
    assert {line[begins["run"] :] for line in lines} == {"20261129-081400-3f2a", "other"}
    assert all(line[begins["started"] :].startswith("20") and line[begins["started"] - 1] == " " for line in lines)
    assert all(line[end - 1] != " " and line[end] == " " for line in lines for end in ends)
    assert max(map(len, [head, *lines])) <= 80


@pytest.mark.parametrize("has_loss", [False, True])
def test_the_list_says_how_to_record_a_loss_where_there_is_none(tmp_path, capsys, has_loss) -> None:
    store_run(tmp_path / "usual", StoredCurves.made(4))
    store_run(tmp_path / "run", dataclasses.replace(StoredCurves.made(4), has_none=not has_loss))

    assert main(["serve", str(tmp_path), "--list"]) == 0
    assert ("monitor.record(loss=loss)" in capsys.readouterr().out) is not has_loss


def test_a_folder_without_runs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--list"]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}, nor in the folders directly in it\n"


def test_newest_comes_first(tmp_path: Path) -> None:
    for name, started_s in (("old", 1.78e9), ("new", 1.79e9), ("middle", 1.785e9)):
        store_run(tmp_path / name, StoredCurves.made(3, started_s=started_s), segments=1)

    assert list(listed(tmp_path)) == ["new", "middle", "old"]


def test_loss_that_is_not_finite_is_said(tmp_path: Path) -> None:
    curves = StoredCurves.made(6)
    curves.loss[5] = np.nan
    store_run(tmp_path / "bad", curves)

    assert listed(tmp_path)["bad"].loss == math.inf


@pytest.mark.parametrize(("age_s", "state"), [(SILENT_S - 1, "running"), (SILENT_S + 1, "silent")])
def test_agent_that_has_not_ended_is_running_or_silent(tmp_path: Path, age_s: float, state: str) -> None:
    store_run(tmp_path / "up", StoredCurves.made(10), is_up=True)

    assert listed(tmp_path, now_s=1.79e9 + 4.0 + age_s)["up"].state == state


@pytest.mark.parametrize("agent", ["running", "draining", "finished"])
@pytest.mark.parametrize("is_other_up", [False, True])
def test_agent_of_this_machine_says_itself_whether_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str, is_other_up: bool
) -> None:
    run = store_run(tmp_path / "runs" / "run", StoredCurves.made(10), is_up=is_other_up)
    here = run / "nodes" / socket.gethostname() / TARGETS_FILE
    here.parent.mkdir()
    write_targets(here, "here:1", {})
    spool = tmp_path / "spool"
    (spool / "run").mkdir(parents=True)
    write_status(
        spool / "run", AgentStatus(pid=1, run_id="run", state=agent, output=str(run), url="http://127.0.0.1:1/")
    )
    monkeypatch.setenv("TRAINERMON_SPOOL", str(spool))

    facts = listed(tmp_path / "runs", now_s=1.79e9 + 5)["run"]

    assert facts.state == ("finished" if agent == "finished" and not is_other_up else "running")
    assert facts.page == "http://127.0.0.1:1"


def test_broken_runs_stand_beside_sound_ones_with_what_is_wrong(tmp_path: Path) -> None:
    for name in ("sound", "torn", "list", "nothing", "garbage", "truncated"):
        store_run(tmp_path / name, StoredCurves.made(8))
    (tmp_path / "torn/run.json").write_text('{"run_id": "to')
    (tmp_path / "list/run.json").write_text("[1]")
    (tmp_path / "nothing/run.json").unlink()
    segment = "nodes/node-a/segments/0000000002-0000000002.parquet"
    newest = {name: tmp_path / name / segment for name in ("garbage", "truncated")}
    newest["garbage"].write_bytes(b"PAR1" + bytes(100) + b"\x10\x00\x00\x00PAR1")
    newest["truncated"].write_bytes(newest["truncated"].read_bytes()[:-20])
    (tmp_path / "no run").mkdir()

    facts = listed(tmp_path)

    assert {key: entry.step for key, entry in facts.items()} == {
        "sound": 7, "torn": 7, "list": 7, "nothing": 7, "garbage": None, "truncated": 3,
    }  # fmt: skip
    assert facts["sound"].problem == ""
    assert "not JSON" in facts["torn"].problem
    assert "expected an object" in facts["list"].problem
    assert "missing" in facts["nothing"].problem
    assert "0000000002-0000000002.parquet" in facts["garbage"].problem
    assert "damaged" in facts["truncated"].problem


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = StoredCurves.made(20)
    for name in ("still", "growing"):
        store_run(tmp_path / name, dataclasses.replace(curves, loss=curves.loss[:10]), segments=1)
    asked: list[list[str]] = []
    read = facts.read_newest_rows

    def read_and_note(paths: Sequence[Path]) -> dict[Path, NewestRows | str]:
        asked.append([path.parts[-5] for path in paths])
        return read(paths)

    monkeypatch.setattr(run_list, "read_newest_rows", read_and_note)
    runs = RunList([tmp_path])
    runs.scan()

    runs.scan()
    add_segment(tmp_path / "growing", curves, range(10, 20))
    store_run(tmp_path / "new", curves)
    runs.scan()

    assert [sorted(names) for names in asked] == [["growing", "still"], [], ["growing", "new"]]
    assert {key: facts.step for key, facts in runs.facts.items()} == {"still": 9, "growing": 19, "new": 19}


def test_strange_names_have_a_plain_key_and_stay_as_they_are(tmp_path: Path) -> None:
    names = ["<img src=x onerror=alert(1)>", "a?b#c%2F", "..hidden", "ü", os.fsdecode(b"\xff")]
    for name in names:
        store_run(tmp_path / name, StoredCurves.made(2), segments=1)
        (tmp_path / name / "run.json").write_text(json.dumps({"run_id": name}))

    facts = listed(tmp_path)

    assert sorted(entry.name for entry in facts.values()) == sorted(names)
    assert all(key.startswith("run-") and key.isascii() for key in facts)
    assert all(entry.step == 1 for entry in facts.values())


def test_runs_of_one_name_in_two_folders_have_different_keys(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        store_run(tmp_path / folder / "same", StoredCurves.made(2), segments=1)

    places = find_places([tmp_path / "a", tmp_path / "b/same", tmp_path / "a"])

    assert [place.path for place in places] == [tmp_path / "a/same", tmp_path / "b/same"]
    assert len({place.key for place in places}) == 2


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    store_run(tmp_path / "outside", StoredCurves.made(2), segments=1)
    store_run(tmp_path / "opened/own", StoredCurves.made(2), segments=1)
    (tmp_path / "opened/away").symlink_to(tmp_path / "outside")
    (tmp_path / "opened/again").symlink_to(tmp_path / "opened/own")

    assert [place.path.name for place in find_places([tmp_path / "opened"])] == ["again", "own"]


def test_runs_are_found_in_the_folder_that_holds_theirs_and_no_deeper(tmp_path: Path) -> None:
    store_run(tmp_path / "job/trainermon_output/first", StoredCurves.made(2), segments=1)

    assert [place.path.name for place in find_places([tmp_path / "job"])] == ["first"]
    assert find_places([tmp_path]) == []


def test_beside_runs_nothing_is_looked_through(tmp_path: Path) -> None:
    for run in ("first", "data/second"):
        store_run(tmp_path / run, StoredCurves.made(2), segments=1)

    assert [place.path.name for place in find_places([tmp_path])] == ["first"]
