"""From a loss that is NaN to the line: the page's commands are run as they stand there, the slow test in a shell."""

import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, check_page, commands_of, run_forked

PAGE = "nan_to_line.md"


def test_the_commands_lead_to_the_line(tmp_path):
    assert len(commands_of(PAGE)) > 9
    check_page(PAGE, tmp_path, run_forked, LATE_NAN_FIRST="7990")

    named = re.search(r"Line (\d+) must say", (ROOT / "docs" / PAGE).read_text(encoding="utf-8"))
    assert "torch.softmax" in (ROOT / "examples" / "late_nan.py").read_text().splitlines()[int(named[1]) - 1]


def test_the_commands_leave_nothing_that_git_would_add():
    made = re.findall(
        r"(?:>|--html) ([\w.]+)|\"dump_path\": \"(\w+)\"", (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    )
    left = sorted({"checkpoints/step0.pt", *(file or f"{folder}/step8000" for file, folder in made)})
    assert len(left) > 4

    ignored = subprocess.run(["git", "check-ignore", *left], cwd=ROOT, capture_output=True, text=True, check=False)

    assert ignored.stdout.split() == left


def test_the_example_takes_one_thread_whatever_the_environment_says(tmp_path, monkeypatch):
    """Its tensors are so small that several threads are many times slower."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("LATE_NAN_FIRST", "8010")
    monkeypatch.setenv("TRAINERMON_SPOOL", str(tmp_path / "spool"))
    example = ROOT / "examples" / "late_nan.py"
    script = (
        f"import runpy, torch; runpy.run_path({str(example)!r}, run_name='__main__'); print(torch.get_num_threads())"
    )
    (tmp_path / "config.json").write_text('{"agent": {"start": false}}')

    done = subprocess.run(
        [sys.executable, "-c", script, "--config", "config.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split()[-1] == "1"


@pytest.mark.slow
def test_the_same_from_the_first_step_on(tmp_path):
    check_page(PAGE, tmp_path)
