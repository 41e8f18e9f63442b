"""The Megatron example as a user runs it: what is stored of all ranks makes up the norm that Megatron computed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
SMALL = ["--steps", "4", "--layers", "2", "--width", "32", "--context", "16", "--batch", "2"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--distributed-optimizer", "--overlap", "--bf16"], marks=pytest.mark.slow),
        pytest.param(["--tensor-parallel", "2"], marks=pytest.mark.slow),
        ["--pipeline-parallel", "2", "--distributed-optimizer"],
    ],
)
def test_the_stored_norm_is_megatrons(tmp_path, options):
    places = {"TRAINERMON_SPOOL": str(tmp_path / "spool"), "TRAINERMON_OUTPUT": str(tmp_path / "output")}
    environment = os.environ | places | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TRAINERMON_RUN_ID": "run"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "megatron_gpt.py"), *SMALL, *options]

    done = trainermon(environment, "run", "--", *torchrun, *script)
    query = "SELECT step, grad_norm, loss, num_ranks FROM steps ORDER BY step"
    stored = json.loads(trainermon(environment, "query", str(tmp_path / "output" / "run"), query, "--format", "json"))

    printed = re.findall(r"loss +([\d.]+) +norm +([\d.]+)", done)
    assert len(printed) == 4, done
    for row, (loss, norm) in zip(stored, printed, strict=True):
        assert row["num_ranks"] == 2
        assert row["grad_norm"] == pytest.approx(float(norm), abs=1e-6)
        assert row["loss"] == pytest.approx(float(loss), rel=0.05)  # printed is that of one replica


def trainermon(environment, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "trainermon", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
