"""Megatron-Core, held against a float64 model, Megatron's own account, and runs without the monitor."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim

from tests.fork_server import ROOT, start_script
from tests.ranks import run_ranks
from trainermon.core.values import Coordinates
from trainermon.monitor.frameworks import detect

HERE = Path(__file__).parent
TRUTH, BEHAVIOUR = HERE / "truth_worker.py", HERE / "behaviour_worker.py"
QUIET: Any = {"PYTHONWARNINGS": "ignore"}  # Megatron warns of every package that it could use and does not find
VERSIONS = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1")


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_statistic_is_that_of_the_unsharded_model(world_size):
    texts = run_ranks(TRUTH, world_size=world_size, **QUIET)

    assert "global norm" in texts[0]


@pytest.mark.distributed
def test_training_is_left_as_it_is_and_its_decisions_are_told():
    run_ranks(BEHAVIOUR, world_size=2, **QUIET)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_statistic_in_every_combination_of_options(world_size):
    run_ranks(TRUTH, "wide", world_size=world_size, timeout_s=900, **QUIET)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", VERSIONS)
def test_versions(version, tmp_path):
    if version == importlib.metadata.version("megatron-core"):
        pytest.skip("is the one that all other tests run with")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={tmp_path}"]
    subprocess.run([*install, f"megatron-core=={version}"], check=True)
    path = f"{tmp_path}{os.pathsep}{ROOT}"

    for worker, sizes in ((TRUTH, (2, 4)), (BEHAVIOUR, (2,))):
        for world_size in sizes:
            texts = run_ranks(worker, world_size=world_size, timeout_s=900, PYTHONPATH=path, **QUIET)
            assert f"megatron-core {version}" in texts[0]


def test_plain_training_is_recognised_whether_or_not_megatron_is_imported(tmp_path):
    path, output, found = (tmp_path / name for name in ("script.py", "output.txt", "found.txt"))
    script = (
        "import pathlib, sys, torch;"
        "from trainermon.monitor.frameworks import detect;"
        "from trainermon.core.values import Coordinates;"
        "model = torch.nn.Linear(2, 2);"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1);"
        "first = detect([model], optimizer, Coordinates());"
        "assert not any(name.partition('.')[0] == 'megatron' for name in sys.modules);"
        "import megatron.core;"
        "second = detect([model], optimizer, Coordinates());"
        f"pathlib.Path({str(found)!r}).write_text(f'{{first.framework}} {{second.framework}} {{second.reduces}}')"
    )
    path.write_text(script)

    start_script(path, output=output, environment=os.environ | QUIET | {"PYTHONPATH": str(ROOT)}).wait(900)

    assert found.exists(), output.read_text()  # torch and megatron print what they like
    assert found.read_text().split() == ["plain", "plain", "False"]


def test_a_model_named_like_megatrons_is_not_megatrons():
    class DistributedDataParallel(nn.Linear):
        bucket_groups = ()

    model = DistributedDataParallel(2, 2)

    assert detect([model], optim.SGD(model.parameters(), lr=0.1), Coordinates()).framework == "plain"
