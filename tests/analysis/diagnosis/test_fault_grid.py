"""Faults injected into a training of two ranks, each diagnosed from the dumps of its replay."""

import json
from pathlib import Path

import pytest

from tests.analysis import fault_grid
from tests.analysis.fault_grid import EXTRA, FAULT_STEP, GRID
from tests.ranks import run_ranks
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict, RankRole
from trainermon.analysis.diagnosis.report import render_text

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    run_ranks(Path(fault_grid.__file__), str(folder))
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return folder, results


def right(diagnosis, fault):
    found = (diagnosis.step, diagnosis.rank, diagnosis.module, diagnosis.phase.value)
    return found == (FAULT_STEP, fault.rank, fault.module, fault.phase)


def test_at_least_eleven_of_twelve_are_right(run):
    folder, _ = run
    wrong = [fault.name for fault in GRID if not right(diagnose(folder / fault.name), fault)]

    assert len(GRID) == 12
    assert len(wrong) <= 1, wrong


@pytest.mark.parametrize("fault", [fault for fault in EXTRA if fault.kind != "once"], ids=lambda fault: fault.name)
def test_other_ways_to_fail_are_found_too(run, fault):
    diagnosis = diagnose(run[0] / fault.name)

    assert right(diagnosis, fault), diagnosis.headline


def test_a_fault_that_does_not_come_back_is_named_as_such(run):
    diagnosis = diagnose(run[0] / EXTRA[-1].name)

    assert (diagnosis.verdict, diagnosis.rank, diagnosis.phase) == (DiagnosisVerdict.NOT_REPRODUCED, 1, "forward")
    assert "transient" in diagnosis.headline


@pytest.mark.parametrize("fault", [*GRID, *EXTRA], ids=lambda fault: fault.name)
def test_every_replay_left_the_gradients_alone(run, fault):
    _, results = run
    for result in results:
        assert result[fault.name]["status"] in ("clean", "nonfinite"), result[fault.name]
        assert result[fault.name]["untouched"]


@pytest.mark.parametrize("fault", GRID, ids=lambda fault: fault.name)
def test_report_names_the_innocent_rank_and_the_way_to_the_loss(run, fault):
    diagnosis = diagnose(run[0] / fault.name)

    roles = {finding.rank: finding.role for finding in diagnosis.ranks}
    assert roles == {fault.rank: RankRole.ORIGIN, 1 - fault.rank: RankRole.INNOCENT}
    assert diagnosis.chain[0].module == fault.module
    if fault.phase != "backward":
        assert diagnosis.chain[-1].module == "(model)"
        assert "fault_grid.py" in diagnosis.source
    assert bool(diagnosis.parameters) == (fault.kind == "weight")
    assert diagnosis.dump.endswith(f"rank{fault.rank}")
    text = render_text(diagnosis)
    assert len(text.splitlines()) <= 40
    assert fault.module in text
