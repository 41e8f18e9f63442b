"""Whether `trainermon diagnose` says of a recorded run what was done to it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.diagnosis.cases import Case
from benchmarks.diagnosis.record import run_dir_of
from trainermon.analysis.diagnosis.against.against import diagnose_against
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import Diagnosis, DiagnosisVerdict

MAX_CANDIDATES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """A recorded run and what the diagnosis says of it."""

    case: Case
    diagnosis: Diagnosis

    @property
    def is_harmless(self) -> bool:
        """Whether nothing became non-finite of a fault that should make something so."""
        return self.case.harmless and bool(self.case.direction) and not self.case.against

    @property
    def wrong(self) -> tuple[str, ...]:
        """What is wrong, of `verdict`, `step`, `rank`, `module`, `direction`."""
        case, found = self.case, self.diagnosis
        if not case.direction:
            return () if found.verdict in (DiagnosisVerdict.FINITE, DiagnosisVerdict.NO_EVIDENCE) else ("verdict",)
        verdict = DiagnosisVerdict.NOT_REPRODUCED if case.site == "output-once" else DiagnosisVerdict.LOCATED
        named = (found.module, *found.candidates)[:MAX_CANDIDATES]
        checks = {
            "verdict": found.verdict is verdict,
            "step": found.step == case.shown_on,
            "rank": found.rank == case.rank,
            "module": not {case.module, *case.twins}.isdisjoint(named),
            "direction": found.phase.value == case.direction,
        }
        return tuple(name for name, is_right in checks.items() if not is_right)


def judge(case: Case, folder: Path) -> Judged:
    """Return what the diagnosis says of the run of `case` that was recorded in `folder`."""
    run_dir = run_dir_of(case, folder)
    if case.against:
        return Judged(case, diagnose_against(run_dir, run_dir.with_name(case.against)))
    return Judged(case, diagnose(run_dir))
