"""Of faults of which the cause is known, injected into whole trainings, the diagnosis tells the cause."""

import pytest

from benchmarks.diagnosis.cases import all_cases
from benchmarks.diagnosis.judge import judge
from benchmarks.diagnosis.record import record
from trainermon.dump.files.verdicts import NonfiniteCause, Reproducibility

CAUSES = {
    "float16-overflow": NonfiniteCause.PRECISION,
    "division-by-zero": NonfiniteCause.RANGE,
    "nan": NonfiniteCause.INHERITED,
    "inf": NonfiniteCause.INHERITED,
    "stale-memory": NonfiniteCause.INHERITED,
    "bit-flip": NonfiniteCause.INHERITED,
}
# A loss and an optimizer are no part of a replay; a fault that comes once is in none.
IN_REPLAY = ("weight", "output", "own-operation", "batch", "gradient", "own-gradient", "weight-gradient")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("split", ["plain", "tp2"])
def test_the_cause_is_that_of_the_fault(tmp_path, split):
    cases = [case for case in all_cases([split], [1]) if not case.against and case.site in IN_REPLAY]

    found = {}
    for case in record(cases, tmp_path):
        diagnosis = judge(case, tmp_path).diagnosis
        found[case.run_id] = (diagnosis.classification.cause, diagnosis.reproducibility)

    assert len(found) >= 10
    for case in cases:
        assert found[case.run_id] == (CAUSES[case.effect], Reproducibility.REPRODUCIBLE), case
