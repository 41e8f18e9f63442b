"""Two ranks of MindSpore that average their gradients on a CPU: rows of both, and a fault traced to one of them."""

import json
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore.communication import GlobalComm

from tests.journal_rows import RankJournal
from tests.monitor.mindspore.training_of_ranks import FAULT, FAULTY, STEPS
from tests.monitor.mindspore.trainings import truth
from tests.ports import free_port
from trainermon.core.values import Kind
from trainermon.monitor.mindspore import place

pytestmark = pytest.mark.mindspore
RANKS = (0, 1)
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Run the job once by MindSpore's own launcher; return its folder."""
    folder = tmp_path_factory.mktemp("job")
    options = [f"--worker_num={len(RANKS)}", f"--local_worker_num={len(RANKS)}", f"--master_port={free_port()}"]
    options += ["--join=True", f"--log_dir={folder}/log"]
    program = [sys.executable, "-m", "mindspore.parallel.cluster.run", *options]
    script = [str(ROOT / "tests/monitor/mindspore/training_of_ranks.py"), str(folder)]
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",  # the launcher calls `python`
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [*program, *script], capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return folder


@pytest.mark.parametrize("mode", ["pynative", "jit_step"])
@pytest.mark.parametrize("rank", RANKS)
def test_the_rows_of_a_rank_are_those_of_its_gradients(job, mode, rank):
    kept = np.load(job / mode / f"rank{rank}.npz")
    journal = RankJournal(job / mode / "spool" / "job", rank)
    sides = {"averaged": Kind.GRAD_REDUCED} | ({"local": Kind.GRAD_UNREDUCED} if mode == "pynative" else {})

    assert kept["is_same"]
    assert sorted(journal.rows) == list(range(STEPS))
    for step in range(STEPS):
        assert (Kind.GRAD_UNREDUCED in {key.kind for key in journal.rows[step]}) == (mode == "pynative")
        for side, kind in sides.items():
            of_kind = journal.of(step, kind)
            prefix = f"{side}/{step}/"
            assert {prefix + name for name in of_kind} == {name for name in kept if name.startswith(prefix)}
            for name, row in of_kind.items():
                got = [row.count, row.min, row.max, row.sum, row.sum_sq, row.zeros, row.nans, row.infs]
                np.testing.assert_allclose(got, truth(ms.Tensor(kept[prefix + name])), rtol=1e-6, atol=1e-6)


def test_what_a_model_averages_by_itself_is_seen_before_and_after(job):
    """The sum of the elements is linear: that of the mean over ranks is the mean of theirs."""
    journals = [RankJournal(job / "model/spool/job", rank) for rank in RANKS]

    assert [sorted(journal.rows) for journal in journals] == [list(range(STEPS))] * len(RANKS)
    for step in range(STEPS):
        reduced, other = (journal.of(step, Kind.GRAD_REDUCED) for journal in journals)
        own = [journal.of(step, Kind.GRAD_UNREDUCED) for journal in journals]
        assert reduced == other
        assert set(reduced) == set(own[0]) == set(own[1])
        for name, row in reduced.items():
            assert own[0][name].sum != own[1][name].sum
            assert row.sum == pytest.approx((own[0][name].sum + own[1][name].sum) / 2, rel=1e-4, abs=1e-5)


def test_the_ranks_know_their_places(job):
    for rank in RANKS:
        about = json.loads((job / f"pynative/job/ranks/rank{rank:05}.json").read_text())["coordinates"]
        sizes = {about[name] for name in ("world_size", "local_world_size", "dp_size")}
        assert sizes == {len(RANKS)}
        assert {about[name] for name in ("rank", "local_rank", "dp")} == {rank}


def test_the_first_rank_of_each_node_is_known(monkeypatch):
    """As on the second of two nodes of two ranks: with stand-ins, as here is one node."""
    monkeypatch.setattr(GlobalComm, "INITED", True)
    for name, number in {"rank": 2, "group_size": 4, "local_rank": 0, "local_rank_size": 2}.items():
        monkeypatch.setattr(place, f"get_{name}", lambda *_, number=number: number)

    found = place.find_coordinates({}, environ={"RANK_ID": "2", "RANK_SIZE": "4"})

    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (2, 4, 0, 2)


def test_the_diagnosis_names_the_rank_of_the_fault(job):
    done = subprocess.run(
        [sys.executable, "-m", "trainermon", "diagnose", str(job / "pynative/job")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert f"step {FAULT}" in done.stdout
    assert f"rank {FAULTY}" in done.stdout
