"""Nothing is lost and nothing is stored twice, wherever the agent is killed; and the test would see it if it were."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("kill_points.py")


def run(workdir, *arguments):
    done = subprocess.run(
        [sys.executable, PROGRAM, workdir, *arguments], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("where", ["changes", pytest.param("all", marks=pytest.mark.slow)])
def test_no_kill_loses_a_record_or_stores_it_twice(tmp_path, where):
    report = run(tmp_path, "correct", "15", where)

    assert report["wrong"] == []
    assert set(report["calls"]) >= {"open", "fsync", "rename", "unlink"}
    assert report["calls"].count("rename") >= 4
    changes = [number for number, call in enumerate(report["calls"]) if call in {"rename", "unlink"}]
    assert {2 * number + 1 for number in changes} <= set(report["points"])
    assert report["random"]["kills"] >= 5
    assert (report["random"]["lost"], report["random"]["twice"]) == (0, 0)


@pytest.mark.parametrize(
    ("variant", "finding"),
    [
        ("cursor_after", "twice"),
        ("cursor_before", "lost"),
        ("trim_before_commit", "lost"),
        ("write_in_place", "damaged"),
        ("merge_after_removal", "lost"),
    ],
)
def test_a_broken_writer_is_found_out(tmp_path, variant, finding):
    report = run(tmp_path, variant)

    assert [wrong for wrong in report["wrong"] if wrong.get(finding)]
