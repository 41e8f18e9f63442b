"""TRL's own GRPOTrainer with the adapter; TRL is in the environment of `make test-trl` only."""

import importlib.util
import json
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is in the environment of `make test-trl`"),
]


def trained(folder, *arguments):
    command = [sys.executable, "-W", "ignore", "-m", "tests.rl.train_with_trl", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_sound_engine_is_consistent_and_training_is_as_without_it(tmp_path):
    watched, bare = trained(tmp_path / "watched", "1.0", "watched"), trained(tmp_path / "bare", "1.0")

    assert len(watched["causes"]) >= 2
    assert [causes for causes in watched["causes"] if causes] == []
    assert watched["weights"] == bare["weights"]
    assert (watched["failures"], watched["detached"], bare["causes"]) == (0, True, [])


def test_a_forgotten_temperature_is_named(tmp_path):
    told = trained(tmp_path, "0.6", "watched")

    assert {causes[0] for causes in told["causes"]} == {"temperature"}
