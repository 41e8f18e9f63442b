"""`trainermon compare --ray`: the same results from a real Ray cluster as from this machine's processes."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trainermon.cli import main

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def cluster(monkeypatch):
    """Return the address of a cluster that this test has for itself."""
    # not tmp_path: Ray's sockets lie in the folder, and the name of a socket has at most 107 characters
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        head = subprocess.Popen(
            [sys.executable, str(HERE / "ray_head.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | QUIET,
        )
        with head:
            yield head.stdout.readline().strip()
            head.stdin.close()
            assert head.wait(120) == 0


def compare(*words):
    """Run the command, as Ray itself warns of many things."""
    command = [sys.executable, "-m", "trainermon", "compare", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | QUIET, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.server
def test_a_ray_cluster_finds_what_the_local_processes_find(cluster, tmp_path):
    for name in ("faulty", "sound"):
        for rank in range(3):
            shutil.copytree(RECORDED / name / "step0" / "rank0", tmp_path / name / "step0" / f"rank{rank}")
    sides = tmp_path / "faulty", tmp_path / "sound"

    remote = compare(*sides, "-o", tmp_path / "remote", "-f", "json", "-c", "--ray", cluster)
    local = compare(*sides, "-o", tmp_path / "local", "-f", "json", "-c")

    assert remote.splitlines()[:-3] == local.splitlines()[:-3]
    results = [
        [json.loads(path.read_bytes()) for path in sorted((tmp_path / where).iterdir())]
        for where in ("remote", "local")
    ]
    assert len(results[0]) == 3
    assert results[0] == results[1]


def test_where_no_cluster_answers_the_address_is_named(capsys):
    assert main(["compare", str(RECORDED / "faulty"), str(RECORDED / "sound"), "--ray", "127.0.0.1:1"]) == 1

    assert "no Ray cluster answers at 127.0.0.1:1" in capsys.readouterr().err
