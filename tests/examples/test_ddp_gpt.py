"""The first whole path, as a user walks it: torchrun, a fault, an alert, a replay, a diagnosis, and status 0."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
SMALL = ["--steps", "12", "--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--batch", "2"]


@pytest.fixture
def places(tmp_path):
    return {"TRAINERMON_SPOOL": str(tmp_path / "spool"), "TRAINERMON_OUTPUT": str(tmp_path / "output")}


def run(places, *arguments, ranks=2):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    script = [str(ROOT / "examples" / "ddp_gpt.py"), *SMALL, *arguments]
    return subprocess.run(
        [sys.executable, "-m", "trainermon", "run", "--", *torchrun, *script],
        env=os.environ | places | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )


def alerts(places):
    (log,) = Path(places["TRAINERMON_OUTPUT"]).glob("*/nodes/*/alerts.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize(
    ("fault", "rank", "layer", "phase"),
    [
        ("weight", 1, "h.0.attn.k", "parameter"),
        pytest.param("activation", 0, "h.1.mlp.0", "forward", marks=pytest.mark.slow),
        pytest.param("gradient", 1, "h.1.mlp.2", "backward", marks=pytest.mark.slow),
    ],
)
def test_a_fault_is_found_replayed_and_explained(places, fault, rank, layer, phase):
    done = run(places, "--fault", fault, "--fault-step", "8", "--fault-rank", str(rank), "--fault-layer", layer)

    assert done.returncode == 0, done.stdout
    assert f"rank {rank}, step 8: gradients are not finite; replay: nonfinite" in done.stdout
    assert f"rank {1 - rank}, step 8: gradients are not finite; replay: clean" in done.stdout
    (run_directory,) = (path.parent for path in Path(places["TRAINERMON_OUTPUT"]).glob("*/run.json"))
    text = subprocess.run(
        [sys.executable, "-m", "trainermon", "diagnose", str(run_directory), "--json"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = json.loads(text)
    assert (found["step"], found["rank"], found["module"], found["phase"]) == (8, rank, layer, phase)
    assert found["headline"] in done.stdout
    assert not any(Path(places["TRAINERMON_SPOOL"]).iterdir())


def test_a_healthy_run_ends_without_an_alert(places):
    done = run(places)

    assert done.returncode == 0, done.stdout
    assert not list(Path(places["TRAINERMON_OUTPUT"]).glob("*/nodes/*/alerts.jsonl")) or alerts(places) == []
    assert not list(Path(places["TRAINERMON_OUTPUT"]).glob("*/dumps"))


def test_the_example_runs_by_itself_in_one_process(places):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "ddp_gpt.py"), *SMALL, "--log-every", "4"],
        env=os.environ | places,
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )

    assert done.stdout.count("loss") == 3
    # which of the two hangs on how busy the machine is
    assert "page http://127.0.0.1:" in done.stderr or "the agent is not up after" in done.stderr
