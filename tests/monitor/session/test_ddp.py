"""Unreduced and reduced gradients in DistributedDataParallel, held against a copy of the model outside it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.journal_rows import RankJournal
from tests.monitor.session.ddp_worker import VARIANTS
from tests.ranks import run_ranks
from trainermon.core.values import Kind

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    places: Any = {"TRAINERMON_SPOOL": str(folder / "spool"), "TRAINERMON_OUTPUT": str(folder / "output")}
    run_ranks(Path(__file__).with_name("ddp_worker.py"), str(folder), *VARIANTS, **places)
    return folder


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "no_sync_forgotten"])
def test_gradients_before_and_after_reduction(trained, variant, rank):
    journal = RankJournal(trained / "spool" / variant, rank)
    truth = torch.load(trained / f"{variant}-{rank}.pt", weights_only=True)

    assert len(truth) == 3
    for step, expected in enumerate(truth):
        for kind, gradients in ((Kind.GRAD_UNREDUCED, expected["unreduced"]), (Kind.GRAD_REDUCED, expected["reduced"])):
            found = journal.of(step, kind)
            assert found.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert found[name].norm == pytest.approx(float(gradient.norm()), rel=1e-5)
                assert found[name].sum == pytest.approx(float(gradient.sum()), abs=1e-5 * float(gradient.abs().sum()))


def test_where_every_micro_step_is_reduced_there_is_no_unreduced_gradient(trained):
    journal = RankJournal(trained / "spool" / "no_sync_forgotten", 0)
    truth = torch.load(trained / "no_sync_forgotten-0.pt", weights_only=True)

    for step, expected in enumerate(truth):
        assert journal.of(step, Kind.GRAD_UNREDUCED) == {}
        for name, row in journal.of(step, Kind.GRAD_REDUCED).items():
            assert row.norm == pytest.approx(float(expected["reduced"][name].norm()), rel=1e-5)


def test_the_ranks_agree_on_reduced_gradients_and_differ_on_unreduced_ones(trained):
    journals = [RankJournal(trained / "spool" / "default", rank) for rank in (0, 1)]

    assert journals[0].of(1, Kind.GRAD_REDUCED) == journals[1].of(1, Kind.GRAD_REDUCED)
    assert journals[0].of(1, Kind.GRAD_UNREDUCED) != journals[1].of(1, Kind.GRAD_UNREDUCED)
