"""Faults in pipelines of two stages whose modules have equal names: only the stage that made the bad value is named."""

from pathlib import Path

import pytest

from tests.frameworks.launches import Launches, jobs
from tests.frameworks.pipeline.worker import BAD_STEP, OWN, TORCH
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import FaultPhase, PlaceLevel, RankRole
from trainermon.analysis.diagnosis.origin import LOSS

pytestmark = pytest.mark.distributed

WHERE = {
    "backward": (1, "1", FaultPhase.BACKWARD),
    "forward": (0, "1", FaultPhase.FORWARD),
    "target": (1, LOSS, FaultPhase.BACKWARD),
}


@pytest.fixture(scope="module")
def launch(request, tmp_path_factory):
    return Launches(Path(__file__).with_name("worker.py"), request, tmp_path_factory)


@pytest.mark.parametrize(("size", "name"), jobs(TORCH, {2: TORCH}))
def test_a_stage_of_torch_that_was_handed_the_bad_value_is_no_origin(launch, size, name):
    rank, module, phase = WHERE[name.split("-")[1]]

    diagnosis = diagnose(launch(size) / "output" / name)

    assert (diagnosis.step, diagnosis.rank, diagnosis.module, diagnosis.phase) == (BAD_STEP, rank, module, phase)
    assert {one.rank: one.role for one in diagnosis.ranks} == {rank: RankRole.ORIGIN, 1 - rank: RankRole.REACHED}
    assert "by itself, too" not in diagnosis.reason
    assert "the reduction" not in " ".join(diagnosis.consequences)
    assert [level.answer for level in diagnosis.levels if level.level is PlaceLevel.DOMAIN] == [f"pp {rank}"]


@pytest.mark.parametrize(("size", "name"), jobs(OWN, {2: OWN}))
def test_a_stage_that_the_script_handed_the_bad_value_is_no_origin(launch, size, name):
    rank, module, phase = WHERE[name.split("-")[1]]

    diagnosis = diagnose(launch(size) / "output" / name)

    assert (diagnosis.step, diagnosis.rank, diagnosis.module, diagnosis.phase) == (BAD_STEP, rank, module, phase)
    assert {one.rank: one.role for one in diagnosis.ranks} == {rank: RankRole.ORIGIN, 1 - rank: RankRole.REACHED}
    assert "by itself, too" not in diagnosis.reason
