"""A check that was interrupted goes on, and ends with the files of one that was not."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.analysis.check.test_check import dumped, plant_nan
from trainermon.accuracy.judge import Judgement, Status
from trainermon.accuracy.places import Place
from trainermon.analysis.check import dumps
from trainermon.analysis.check.checking import CheckedCall, DumpChecker
from trainermon.analysis.check.journal import CheckJournal
from trainermon.cli import main

KILLED = """
import os, signal, sys
from trainermon.analysis.check import journal
from trainermon.cli import main

add = journal.CheckJournal.add

def until_the_third(self, source, number, call):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, source, number, call)

journal.CheckJournal.add = until_the_third
main(sys.argv[1:])
"""


def contents(folder):
    return {path.name[:27]: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def dump(tmp_path):
    return dumped(tmp_path / "dump", alter=plant_nan)


@pytest.fixture
def whole(tmp_path, dump):
    assert main(["check", "run", str(dump), "-o", str(tmp_path / "whole")]) == 0
    return contents(tmp_path / "whole")


def interrupt(monkeypatch, *, at):
    """Have Ctrl-C pressed while the call with this number is judged."""
    check = DumpChecker.check

    def until(self, number):
        if number == at:
            raise KeyboardInterrupt
        return check(self, number)

    monkeypatch.setattr(DumpChecker, "check", until)


@pytest.mark.parametrize("jobs", [[], ["--jobs", "2"]])
def test_a_killed_check_goes_on_and_ends_as_if_nothing_had_been(tmp_path, dump, whole, jobs):
    command = ["check", "run", str(dump), "-o", str(tmp_path / "out")]

    killed = subprocess.run([sys.executable, "-c", KILLED, *command], check=False)
    [journal] = (tmp_path / "out").iterdir()
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines, lines[-1][:40]]))  # as if it had been killed while it wrote
    status = main([*command, "--resume", *jobs])

    assert (killed.returncode, len(lines), status) == (-signal.SIGKILL, 3, 0)
    assert contents(tmp_path / "out") == whole


def test_ctrl_c_ends_it_with_status_130_and_it_can_go_on(tmp_path, dump, whole, monkeypatch, capsys):
    command = ["check", "run", str(dump), "-o", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        interrupt(patched, at=3)
        assert main(command) == 130
    assert capsys.readouterr().err == "trainermon check: interrupted; --resume goes on\n"
    [journal] = (tmp_path / "out").iterdir()
    stamp = journal.stem.removeprefix("accuracy_checking_unfinished_")

    table = tmp_path / "out" / f"accuracy_checking_result_{stamp}.csv"

    assert main(["check", "run", str(dump), "-csv_path", str(table)]) == 0
    assert contents(tmp_path / "out") == whole
    assert {path.stem.rpartition("_")[2] for path in (tmp_path / "out").iterdir()} == {stamp}


def test_what_is_judged_is_not_judged_again(tmp_path, dump, monkeypatch):
    command = ["check", "run", str(dump), "-o", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        interrupt(patched, at=3)
        main(command)
    judged = []
    check = DumpChecker.check
    monkeypatch.setattr(DumpChecker, "check", lambda self, number: (judged.append(number), check(self, number))[1])

    main([*command, "--resume"])

    assert judged == [3, 4]


@pytest.mark.parametrize(
    ("more", "name"), [(["--only", "*gelu*"], "choice of calls"), (["--rules", "msprobe"], "rules")]
)
def test_a_check_of_something_else_is_not_resumed(dump, monkeypatch, capsys, more, name):
    command = ["check", "run", str(dump), "-o", str(dump.parent / "out")]
    interrupt(monkeypatch, at=1)
    main(command)

    assert main([*command, "--resume", *more]) == 1
    assert f"cannot be resumed: it was begun with another {name}" in capsys.readouterr().err


def test_another_dump_is_not_resumed(tmp_path, dump, monkeypatch, capsys):
    command = ["check", "run", str(dump), "-o", str(tmp_path / "out")]
    interrupt(monkeypatch, at=1)
    main(command)
    path = dump / "dump.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"more": 1}))

    assert main([*command, "--resume"]) == 1
    assert "it was begun with another content of the dump" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "--resume: expected -o DIR"),
        (["--resume", "-o", "{}"], "holds no unfinished check to resume"),
        (["-csv_path", "result.csv"], "-csv_path: found result.csv, expected accuracy_checking_result_<time>.csv"),
        (["--jobs", "0"], "--jobs: found 0, expected 1 or more"),
        (["--timeout", "0"], "--timeout: found 0, expected seconds, more than 0"),
        (["--max-elements", "0"], "--max-elements: found 0, expected 1 or more"),
    ],
)
def test_options_that_cannot_be_met_are_refused(tmp_path, dump, capsys, words, message):
    assert main(["check", "run", str(dump), *[word.format(tmp_path) for word in words]]) == 1
    assert message in capsys.readouterr().err


def test_a_full_disk_leaves_what_is_judged(tmp_path, dump, monkeypatch, capsys):
    add = CheckJournal.add

    def until_full(self, source, number, call):
        if number == 2:
            self._file.close()
            self._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115  # the journal closes it
        add(self, source, number, call)

    command = ["check", "run", str(dump), "-o", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr(CheckJournal, "add", until_full)
        assert main(command) == 1
    assert "No space left on device; --resume goes on behind what is in it" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0


def test_large_calls_are_passed_over(dump):
    options = dumps.CheckOptions(max_elements=16 * 64 + 2 * 64 + 16 * 64)

    [check] = dumps.check_dumps([dump], options, complain=print)

    skipped = {call.key: call.reason for call in check.of(Status.SKIP)}
    assert skipped == dict.fromkeys(
        ["Functional.linear.0.forward", "Functional.linear.1.forward"], "more than 2,176 elements"
    )


def test_a_verdict_comes_back_from_the_journal_as_it_was(tmp_path):
    judgement = Judgement(
        status=Status.ERROR,
        reason="not finite",
        shape=(2, 3),
        worst=math.inf,
        index=(0, 1),
        device_value=complex(1.5, -math.inf),
        golden_value=0.1,
        place=Place(kind="element", begin=(0, 1), end=(1, 2), number=1),
    )
    call = CheckedCall(key="Torch.add.0.forward", judgements=(judgement,), line="train.py:88")
    journal = CheckJournal.begin(tmp_path, "20300101000000", {"dump": "a"})
    journal.add("a", 7, call)
    journal.close()

    again = CheckJournal.resume(tmp_path, {"dump": "a"})
    again.close()

    assert repr(again.known) == repr({("a", 7): call})  # a NaN equals nothing


def test_a_tensor_that_was_written_anew_is_not_resumed(tmp_path, dump, monkeypatch, capsys):
    command = ["check", "run", str(dump), "-o", str(tmp_path / "out")]
    interrupt(monkeypatch, at=1)
    main(command)
    path = next((dump / "dump_tensor_data").iterdir())
    path.write_bytes(path.read_bytes())

    assert main([*command, "--resume"]) == 1
    assert "it was begun with another content of the dump" in capsys.readouterr().err
