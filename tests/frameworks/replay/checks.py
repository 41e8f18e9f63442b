"""What a test looks at after `job.main`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.frameworks.replay.job import FAULT_STEP, Case
from tests.ranks import run_ranks
from trainermon.analysis.diagnose import diagnose
from trainermon.analysis.findings import Diagnosis, Role


@dataclasses.dataclass(frozen=True)
class Results:
    """The folder that the ranks wrote to, and what each found, case by case."""

    folder: Path
    of_rank: list[dict[str, Any]]

    @classmethod
    def of(cls, worker: ModuleType, folder: Path, *, world_size: int = 2) -> Results:
        """Run all cases of `worker`; a hang ends after two minutes."""
        run_ranks(Path(worker.__file__), str(folder), world_size=world_size, timeout_s=120)
        return cls(folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)])

    def diagnosis(self, case: Case) -> Diagnosis:
        """Return what the files of a case tell."""
        return diagnose(self.folder / "output" / case.name / case.name)


def assert_located(results: Results, case: Case) -> None:
    """Check that nothing differed, that every rank replayed the step once, and that the diagnosis is right."""
    found = [of_rank[case.name] for of_rank in results.of_rank]
    assert all(rank["same"] for rank in found)
    for rank in found:
        (event,) = rank["replays"]
        assert (event["step"], event["reason"]) == (FAULT_STEP, ""), event
        assert event["status"] in case.expects
        assert rank["others"] == []
    diagnosis = results.diagnosis(case)
    fault = case.fault
    assert (diagnosis.step, diagnosis.rank, diagnosis.module, diagnosis.phase.value) == (
        FAULT_STEP,
        fault.rank,
        fault.module,
        fault.phase,
    ), diagnosis.headline
    roles = {finding.rank: finding.role for finding in diagnosis.ranks}
    assert [rank for rank, role in roles.items() if role == Role.ORIGIN] == [fault.rank]
