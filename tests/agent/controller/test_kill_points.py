"""No escalation is lost and none comes twice, wherever the controller is killed; the test would see it if one did."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("kill_points.py")
ROOT = PROGRAM.parents[3]


def run(workdir, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, PROGRAM, workdir, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_kill_loses_an_escalation_or_brings_it_twice(tmp_path):
    report = run(tmp_path, "correct", "3")

    assert report["wrong"] == []
    assert report["kills"] == len(report["points"]) >= 26
    assert {"before fsync", "after write", "after answer", "before post", "after post"} <= set(report["points"])


@pytest.mark.parametrize(
    ("variant", "finding"),
    [
        ("answers_before_it_is_on_disk", "lost"),
        ("keeps_its_plan_in_memory", "mixed"),
        ("names_each_plan_anew", "twice"),
        ("forgets_what_it_followed", "twice"),
    ],
)
def test_a_broken_controller_is_found_out(tmp_path, variant, finding):
    report = run(tmp_path, variant)

    assert [wrong for wrong in report["wrong"] if wrong[finding]]
