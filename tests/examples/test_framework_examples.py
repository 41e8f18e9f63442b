"""Each framework's example runs as its first lines say, and what it leaves behind is what it trained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journal_rows import RankJournal, only_spool
from tests.ranks import run_ranks
from trainermon.core.values import Kind

pytestmark = pytest.mark.distributed

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL_GPT = ["--steps", "3", "--layers", "1", "--width", "32", "--context", "16", "--batch", "2"]


def places_of(folder):
    """Return where an example has its files; by `config.json` it runs without an agent, so that its journals stay."""
    config = json.loads((EXAMPLES / "monitor_config.json").read_text()) | {"run_id": "run", "agent": {"start": False}}
    (folder / "config.json").write_text(json.dumps(config))
    return {"TRAINERMON_SPOOL": str(folder / "spool"), "TRAINERMON_OUTPUT": str(folder / "output")}


def journals_of(folder):
    ranks = len(list(only_spool(folder / "spool").glob("rank*.page")))
    return [RankJournal(only_spool(folder / "spool"), rank) for rank in range(ranks)]


def run_on_ranks(folder, example, *arguments):
    """Run an example on two ranks, with the variables that torchrun sets, and return the journal of each."""
    config = ("--config", str(folder / "config.json"))
    texts = run_ranks(EXAMPLES / example, *arguments, *config, **places_of(folder))
    assert not any("Traceback" in text for text in texts)
    return journals_of(folder)


def run(folder, *arguments):
    """Run an example as it stands, and return the journal of each rank."""
    places = places_of(folder)
    done = subprocess.run(
        [sys.executable, *arguments, "--config", str(folder / "config.json")],
        cwd=EXAMPLES.parent,
        env=os.environ | places | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return journals_of(folder)


def test_fsdp2(tmp_path):
    journals = run_on_ranks(tmp_path, "fsdp2.py", *SMALL_GPT)

    assert [sorted(journal.rows) for journal in journals] == [[0, 1, 2]] * 2
    counts = [journal.of(1, Kind.GRAD_REDUCED)["head.weight"].count for journal in journals]
    assert counts == [256 * 32 / 2] * 2
    assert all(journal.of(1, Kind.GRAD_UNREDUCED)["head.weight"].count == 256 * 32 for journal in journals)
    assert len(journals[0].of(2, Kind.LOSS)) == 2


@pytest.mark.slow
def test_fsdp2_in_one_process(tmp_path):
    (journal,) = run(tmp_path, "examples/fsdp2.py", *SMALL_GPT)

    assert journal.of(2, Kind.EXP_AVG)["head.weight"].count == 256 * 32


def test_transformers_trainer(tmp_path):
    journals = run_on_ranks(tmp_path, "transformers_trainer.py", "--steps", "2")

    reduced, unreduced = (
        [journal.of(1, kind) for journal in journals] for kind in (Kind.GRAD_REDUCED, Kind.GRAD_UNREDUCED)
    )
    assert len(reduced[0]) > 20
    assert reduced[0] == reduced[1]
    assert unreduced[0].keys() == reduced[0].keys()
    assert unreduced[0] != unreduced[1]


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_lightning_module(tmp_path, devices):
    journals = run(tmp_path, "examples/lightning_module.py", "--steps", "2", "--devices", str(devices))

    assert len(journals) == devices
    for journal in journals:
        assert sorted(journal.rows) == [0, 1]
        weights = {f"body.{i}.{name}" for i in (0, 2) for name in ("weight", "bias")}
        assert journal.of(1, Kind.GRAD_REDUCED).keys() == weights
        outputs = [label for label in journal.of(1, Kind.ACTV) if label.startswith("body.2.output")]
        assert outputs == ["body.2.output.0@0", "body.2.output.0@1"]
