"""Weights that Megatron-Core and DeepSpeed split are those of the whole model, bit by bit."""

import sys
from pathlib import Path

import pytest

from tests.analysis.environment import frameworks_job
from tests.ranks import run_ranks
from trainermon import cli
from trainermon.analysis.environment.compare import compare_packs
from trainermon.analysis.environment.differences import DifferenceLevel
from trainermon.analysis.environment.packs import read_pack
from trainermon.analysis.environment.rules import LevelRules

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    run_ranks(Path(frameworks_job.__file__), str(folder))
    return folder


def test_arguments_of_a_trainer_are_hyperparameters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = Path(frameworks_job.__file__).with_name("trainer_job.py")

    assert cli.main(["env", "collect", "-o", "p.zip", "--run", "--", sys.executable, str(script)]) == 0

    found = read_pack(tmp_path / "p.zip").sections["hyperparameters"]
    assert (found["learning_rate"], found["max_steps"], found["model.n_embd"]) == (0.125, 1, 4)


@pytest.mark.parametrize(("whole", "split"), [("tp1", "tp2"), ("whole", "zero3")])
def test_the_parts_add_up_to_the_whole(whole, split, packs):
    comparison = compare_packs(read_pack(packs / f"{whole}.zip"), read_pack(packs / f"{split}.zip"), LevelRules())

    rows = [row for row in comparison.rows if row.section == "weights"]
    assert len(rows) == 4
    assert [(row.name, row.reason) for row in rows if row.level is not DifferenceLevel.SAME] == []
