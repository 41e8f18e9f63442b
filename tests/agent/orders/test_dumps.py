"""Which dumps there are, and how they are diagnosed."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainermon.agent.orders.dumps import DumpDiagnoser, DumpKey, RunDumps
from trainermon.core.events import ReplayEvent, decode

REPLAY = {"type": "replay", "step": 7, "status": "nonfinite", "reason": "", "seconds": 0.1, "micro_steps": 1}
FOLDER = "dumps/a1/attempt1/step7/rank"


def replayed(plain):
    event = decode(plain)
    assert isinstance(event, ReplayEvent)
    return event


def test_dumps_are_known_by_what_ranks_report():
    dumps = RunDumps()
    dumps.record(replayed({**REPLAY, "dump": f"{FOLDER}0", "status": "clean"}))
    entry = dumps.record(replayed({**REPLAY, "dump": f"{FOLDER}1"}))

    assert entry.key == DumpKey("a1", 1, 7)
    assert entry.as_plain() == {
        "id": "a1",
        "attempt": 1,
        "step": 7,
        "ranks": [0, 1],
        "path": "dumps/a1/attempt1/step7",
        "status": "nonfinite",
        "diagnosis": None,
    }


@pytest.mark.parametrize("path", [None, "", "/etc", "dumps/../x/attempt1/step7/rank0", f"{FOLDER}0/../../..", 3])
def test_a_path_that_is_no_dump_is_left_out(path):
    assert RunDumps().record(replayed({**REPLAY, "dump": path})) is None


def test_dumps_and_reports_are_found_again_on_disk(tmp_path):
    (tmp_path / f"{FOLDER}0").mkdir(parents=True)
    dumps = RunDumps()
    dumps.scan(tmp_path)
    assert not dumps.entries[DumpKey("a1", 1, 7)].diagnosed

    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/a1-attempt1-step7.json").write_text("{}")
    dumps.scan(tmp_path)
    assert dumps.entries[DumpKey("a1", 1, 7)].diagnosed
    assert dumps.record(replayed({**REPLAY, "dump": f"{FOLDER}0"})).diagnosed
    assert not dumps.record(replayed({**REPLAY, "dump": f"{FOLDER}1"})).diagnosed  # another rank may change it


def diagnose(tmp_path, script, *, num=1):
    """Diagnose dumps of steps 0 to num - 1 by a Python script; return the diagnoser and the finished entries."""
    finished = []

    async def committed():
        return True

    async def main():
        dumps = RunDumps()
        with ThreadPoolExecutor(1) as executor:
            diagnoser = DumpDiagnoser(
                tmp_path,
                executor=executor,
                commit=committed,
                finished=finished.append,
                command=(sys.executable, "-c", script),
            )
            for step in range(num):
                entry = dumps.record(replayed({**REPLAY, "dump": f"dumps/a1/attempt1/step{step}/rank0"}))
                diagnoser.schedule(entry, settle_s=0.01)
            while not diagnoser.idle:
                diagnoser.poll()
                await asyncio.sleep(0.01)
        return diagnoser

    return asyncio.run(main()), finished


def test_a_settled_dump_is_diagnosed_at_low_priority(tmp_path):
    script = "import json, os, sys; print(json.dumps({'argv': sys.argv[1:], 'nice': os.nice(0)}))"

    diagnoser, (entry,) = diagnose(tmp_path, script)

    report = json.loads((tmp_path / "reports/a1-attempt1-step0.json").read_text())
    assert report == {"argv": [str(tmp_path), "--step", "0", "--json"], "nice": 10}
    assert entry.as_plain()["diagnosis"] == "/api/diagnosis/a1/1/0"
    assert diagnoser.failures == 0


def test_dumps_are_diagnosed_one_at_a_time(tmp_path):
    (tmp_path / "running").touch()
    script = f"import os; os.rename({str(tmp_path / 'running')!r}, {str(tmp_path / 'mine')!r}); print('{{}}'); " + (
        f"os.rename({str(tmp_path / 'mine')!r}, {str(tmp_path / 'running')!r})"
    )

    diagnoser, finished = diagnose(tmp_path, script, num=3)

    assert diagnoser.failures == 0
    assert len(finished) == 3


@pytest.mark.parametrize("script", ["raise SystemExit('no dump')", "import time; time.sleep(100)"])
def test_a_diagnosis_that_fails_or_takes_too_long_is_counted(tmp_path, script, monkeypatch, caplog):
    monkeypatch.setattr("trainermon.agent.orders.dumps.TIME_LIMIT_S", 0.5)

    diagnoser, finished = diagnose(tmp_path, script)

    assert diagnoser.failures == 1
    assert not finished
    assert "no diagnosis of dumps/a1/attempt1/step0" in caplog.text
    assert not (tmp_path / "reports").exists()
