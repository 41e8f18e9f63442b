"""`trainermon check follow` on the folder of a training: what is judged, deleted, kept, left, and how it goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from tests.analysis.check.test_check import Faulty, Model, plant_nan
from trainermon import PrecisionDebugger
from trainermon.analysis.check.checking import DumpChecker
from trainermon.analysis.check.follow.steps import StepFolder
from trainermon.cli import main

FAULTY = 2
KILLED = """
import os, signal, sys
from trainermon.analysis.check.follow import book, steps
from trainermon.analysis.check import journal
from trainermon.cli import main

owner, name, at = {place}
was, count = getattr(owner, name), [0]

def until(*args, **kwargs):
    count[0] += 1
    if count[0] == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return was(*args, **kwargs)

setattr(owner, name, until)
main(sys.argv[1:])
"""


def train(folder, steps, *, before=lambda _: None, **settings):
    """Train as many steps as that, with a NaN in one, and dump them as the configuration says; first call `before`."""
    config = folder.with_name(f"{folder.name}.json")
    config.write_text(json.dumps({"task": "tensor", "level": "L1", "dump_path": str(folder), **settings}))
    torch.manual_seed(0)
    model, x = Model(), torch.randn(16, 32)
    debugger = PrecisionDebugger(str(config))
    try:
        for number in range(steps):
            before(number)
            debugger.start(model)
            if number == FAULTY:
                with Faulty(plant_nan):
                    model(x)
            else:
                model(x)
            debugger.stop()
            debugger.step()
    finally:
        PrecisionDebugger.close()
    return folder


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    return train(tmp_path_factory.mktemp("training") / "dumps", 3)


@pytest.fixture
def folder(tmp_path, three_steps):
    return shutil.copytree(three_steps, tmp_path / "dumps", copy_function=shutil.copy2)


def below(folder):
    """Return the files below a folder with their contents."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def results(folder):
    lines = (folder / "checked" / "followed_steps.jsonl").read_text().splitlines()
    return [json.loads(line)["result"] for line in lines if "result" in line]


def test_good_steps_are_deleted_and_the_wrong_one_is_kept_as_it_was(folder, three_steps, capsys):
    status = main(["check", "follow", str(folder), "--once", "--exit-code"])

    shown = capsys.readouterr()
    assert status == 3
    assert sorted(os.listdir(folder)) == ["checked", "kept"]
    assert below(folder / "kept" / "step2") == below(three_steps / "step2")
    assert [one["verdict"] for one in results(folder)] == ["pass", "pass", "failed"]
    assert shown.out == "1 of 3 steps are wrong\n"
    assert "step2: 1 calls are wrong, first on rank 0 Functional.linear.0.forward: not finite" in shown.err


def test_its_tables_are_those_of_check_run(folder, tmp_path):
    assert main(["check", "run", str(folder / "step2"), "-o", str(tmp_path / "run")]) == 0
    assert main(["check", "follow", str(folder), "--once", "-o", str(tmp_path / "out")]) == 0

    [expected] = (tmp_path / "run" / "rank0").glob("*details*.csv")
    [found] = (tmp_path / "out" / "step2" / "rank0").glob("*details*.csv")
    assert found.read_text() == expected.read_text()
    assert main(["check", "run", str(folder / "kept" / "step2"), "--exit-code"]) == 3


@pytest.mark.parametrize(
    "place",
    [
        "(journal.CheckJournal, 'add', 8)",  # amid the calls of the second step
        "(book.StepBook, 'add', 3)",  # with the tables of the third written
        "(steps.StepFolder, 'keep', 1)",
        "(steps.shutil, 'rmtree', 2)",
    ],
)
def test_killed_anywhere_and_started_again_it_ends_with_the_same_files(tmp_path, folder, three_steps, place):
    command = ["check", "follow", str(folder), "--once"]
    whole = shutil.copytree(three_steps, tmp_path / "whole" / "dumps", copy_function=shutil.copy2)
    assert main(["check", "follow", str(whole), "--once"]) == 0

    killed = subprocess.run([sys.executable, "-c", KILLED.format(place=place), *command], check=False)
    status = main(command)

    assert (killed.returncode, status) == (-signal.SIGKILL, 0)
    expected = {name: text.replace(bytes(whole), bytes(folder)) for name, text in below(whole).items()}
    assert below(folder) == expected


def test_sigterm_ends_it_between_two_calls_and_it_goes_on(folder, monkeypatch, capsys):
    check = DumpChecker.check

    def terminated(self, number):
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return check(self, number)

    with monkeypatch.context() as patched:
        patched.setattr(DumpChecker, "check", terminated)
        status = main(["check", "follow", str(folder)])

    assert status == 0
    assert "stopped; the same command goes on" in capsys.readouterr().err
    assert (folder / "step0").is_dir()
    assert main(["check", "follow", str(folder), "--once"]) == 0
    assert [one["verdict"] for one in results(folder)] == ["pass", "pass", "failed"]


def test_a_step_that_is_not_finished_or_not_whole_stays_where_it_is(folder, capsys):
    (folder / "step0" / "rank0" / "dump.partial.jsonl").write_text("x" * 1_000_000)
    (folder / "step1" / "rank0" / "dump.json").write_text("{")
    before = below(folder / "step0"), below(folder / "step1")

    assert main(["check", "follow", str(folder), "--once"]) == 1

    assert (below(folder / "step0"), below(folder / "step1")) == before
    assert "step1 is left where it is: " in capsys.readouterr().err
    assert [(one["step"], one["verdict"]) for one in results(folder)] == [("step1", "unjudged"), ("step2", "failed")]


def test_a_step_without_tensors_is_not_judged_and_stays(tmp_path, capsys):
    folder = train(tmp_path / "dumps", 1, task="statistics")

    assert main(["check", "follow", str(folder), "--once"]) == 1
    assert "step0 is left where it is: no call could be judged: " in capsys.readouterr().err
    assert (folder / "step0" / "rank0" / "dump.json").is_file()


def test_no_link_is_followed(folder, tmp_path):
    outside = tmp_path / "outside"
    shutil.move(folder / "step0", outside)
    (folder / "step0").symlink_to(outside)
    tensor = next((folder / "step1" / "rank0" / "dump_tensor_data").iterdir())
    shutil.move(tensor, tmp_path / "tensor.pt")
    tensor.symlink_to(tmp_path / "tensor.pt")
    before = below(outside)

    assert main(["check", "follow", str(folder), "--once"]) == 1

    assert below(outside) == before
    assert (tmp_path / "tensor.pt").is_file()
    assert tensor.is_symlink()
    assert [one["reason"].endswith("is not followed") for one in results(folder)] == [True, False]


def test_only_so_many_wrong_steps_are_kept_and_their_tables_all(folder):
    shutil.copytree(folder / "step2", folder / "step3", copy_function=shutil.copy2)

    assert main(["check", "follow", str(folder), "--once", "--keep", "1", "--tables", "failed"]) == 0

    assert os.listdir(folder / "kept") == ["step2"]
    assert sorted(os.listdir(folder / "checked")) == ["followed_steps.jsonl", "step2", "step3"]


def test_two_cannot_follow_one_folder(folder, capsys):
    main(["check", "follow", str(folder), "--once"])
    held = subprocess.Popen(
        ["flock", "--no-fork", str(folder / "checked" / "followed_steps.jsonl"), "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with held:
        held.stdin.write("held\n")
        held.stdin.flush()
        assert held.stdout.readline() == "held\n"
        assert main(["check", "follow", str(folder), "--once"]) == 1
    assert "another process follows this folder" in capsys.readouterr().err


def test_a_step_waits_for_its_other_ranks(folder):
    info = folder / "step0" / "rank0" / "dump_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"layout": {"axes": {"dp": [0, 2]}}}))
    steps = StepFolder(folder, num_ranks=None, settle_s=3600.0, is_final=False)

    assert [step.name for step in steps.ready()] == ["step1", "step2"]
    shutil.copytree(folder / "step0" / "rank0", folder / "step0" / "rank1")
    assert [len(step.ranks) for step in steps.ready()] == [2, 1, 1]


def test_a_training_skips_steps_while_too_many_wait_and_counts_them(tmp_path, caplog):
    def make_room(number):
        if number == 8:
            shutil.rmtree(tmp_path / "dumps" / "step0")

    folder = train(tmp_path / "dumps", 10, step_interval=2, max_pending=2, before=make_room)

    info = json.loads((folder / "step8" / "rank0" / "dump_info.json").read_text())
    assert sorted(os.listdir(folder)) == ["step2", "step8"]
    assert info["skipped_steps"] == 2
    assert caplog.messages[-1] == f"step 4 is not dumped: max_pending, 2 steps, wait in {folder}"
