"""The settings that two runs kept are compared first, and what neither kept is no difference."""

import json

import pytest

from trainermon.analysis.diagnosis.against.settings import setting_differences
from trainermon.analysis.diagnosis.findings import Diagnosis, DiagnosisVerdict
from trainermon.analysis.diagnosis.report import render_text

KEPT = {"variables": {"NCCL_ALGO": "Ring", "NCCL_BUFFSIZE": "1"}, "torch": {"version": "2.6"}}
OTHER = {"variables": {"NCCL_ALGO": "Tree", "NCCL_BUFFSIZE": "2"}, "torch": {"version": "2.6"}}


def run_with(folder, settings):
    (folder / "ranks").mkdir(parents=True)
    about = {"rank": 0, "coordinates": {"world_size": 2}, "framework": "ddp", "environment": settings}
    (folder / "ranks/rank00000.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize(
    ("other", "found"),
    [(KEPT, ()), (OTHER, ("variables: NCCL_ALGO is Ring, in the reference Tree",)), (None, ())],
)
def test_settings_that_may_change_numbers_are_told(other, found, tmp_path):
    runs = run_with(tmp_path / "a", KEPT), run_with(tmp_path / "b", other)

    assert setting_differences(*runs) == found


@pytest.mark.parametrize("number", [1, 9])
def test_they_stand_before_anything_else(number):
    diagnosis = Diagnosis(
        verdict=DiagnosisVerdict.EQUAL,
        run_id="x",
        headline="They agree",
        reason="",
        setting_differences=tuple(f"torch: s{n} is 1, in the reference 2" for n in range(number)),
    )

    lines = render_text(diagnosis).splitlines()

    assert lines[0] == f"{number} setting{'s differ' if number > 1 else ' differs'}, look there first:"
    assert lines[1] == "  torch: s0 is 1, in the reference 2"
    assert ("and 4 more: trainermon env compare" in lines) is (number > 5)
    assert "They agree" in lines
