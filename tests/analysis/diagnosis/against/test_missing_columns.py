"""Rows that another version stored without some of their columns: the others are judged, and what is missing said."""

import pytest

from tests.analysis.stored_run import FINITE, actv, drop_columns, grad, store
from trainermon.analysis.diagnosis.against.against import diagnose_against
from trainermon.analysis.diagnosis.findings import DiagnosisVerdict

OTHER = (4, -1.0, 3.0, 1.5, 11.0, 0, 0, 0)
SERIES = (actv("head", "output.0"), grad("head.weight"), grad("tail.weight"))


@pytest.mark.parametrize("columns", [("sum_sq", "zeros"), ("count", "dtype"), ("min", "max"), ("sum", "nans", "infs")])
def test_a_column_that_one_run_lacks_is_said_and_the_rest_is_judged(columns, tmp_path):
    for name, late in (("run", FINITE), ("same", FINITE), ("other", OTHER)):
        (tmp_path / name).mkdir()
        rows = {step: {0: dict.fromkeys(SERIES, late if step == 2 else FINITE)} for step in (1, 2)}
        store(tmp_path / name, rows, modules=["head", "tail"])
    drop_columns(tmp_path / "run", columns)

    same = diagnose_against(tmp_path / "run", tmp_path / "same")
    other = diagnose_against(tmp_path / "run", tmp_path / "other")

    missing = ", ".join(column for column in columns if column != "dtype")
    assert same.verdict is DiagnosisVerdict.EQUAL
    assert same.headline.endswith("; what one run alone has was not compared")
    assert same.unread == (f"stored rows of this run lack {missing}: not compared",)
    assert (other.verdict, other.step, other.module) == (DiagnosisVerdict.LOCATED, 2, "head")
    assert f"stored rows of this run lack {missing}: not compared" in other.evidence
