"""The way down to the first non-finite value, level by level, and what to collect where it ends early."""

from __future__ import annotations

import dataclasses

from trainermon.analysis.diagnosis.domains import describe_domain
from trainermon.analysis.diagnosis.evidence import StepEvidence
from trainermon.analysis.diagnosis.findings import (
    Diagnosis,
    DiagnosisVerdict,
    FaultPhase,
    LevelFinding,
    NextCollection,
    PlaceLevel,
    RankRole,
)
from trainermon.analysis.diagnosis.next_collection import dump_of_step, more_statistics, together
from trainermon.analysis.diagnosis.wording import phase_name
from trainermon.dump.files.verdicts import NonfiniteCause

_REPLAY = NextCollection(
    reason="no replay of the step: let the ranks replay the step that fails",
    monitor={"replay": {"enabled": True}},
)


def with_levels(diagnosis: Diagnosis, evidence: StepEvidence) -> Diagnosis:
    """Return the diagnosis of a NaN or Inf with the answer at each level, from step to function, added.

    What to collect next is added too.
    """
    if diagnosis.verdict not in (DiagnosisVerdict.LOCATED, DiagnosisVerdict.NOT_REPRODUCED):
        return diagnosis
    return dataclasses.replace(diagnosis, levels=_levels(diagnosis, evidence), collect=_collect(diagnosis, evidence))


def _levels(diagnosis: Diagnosis, evidence: StepEvidence) -> tuple[LevelFinding, ...]:
    source = "dumps" if diagnosis.dump is not None else "stored rows"
    origins = [finding.rank for finding in diagnosis.ranks if finding.role is RankRole.ORIGIN]
    domain, why = describe_domain(origins, evidence.places)
    known = "stored rows, dumps" if evidence.kinds and evidence.dumps else "dumps" if evidence.dumps else "stored rows"
    micro_step = "" if diagnosis.micro_step is None else str(diagnosis.micro_step)
    rank = "" if diagnosis.rank is None else str(diagnosis.rank)
    of_rank = f"it arose on {len(origins)} of {len(diagnosis.ranks)} ranks" if origins else "no rank is known"
    of_rank = "the only one" if len(diagnosis.ranks) == 1 else of_rank
    has_functions = any(entry.dump.level in ("L1", "mix") for entry in evidence.dumps)
    functions = "the first call whose inputs are finite" if diagnosis.api else "no function call shows it"
    answers = (
        (
            PlaceLevel.STEP,
            str(diagnosis.step),
            "the first one that was not finite, or the one that was asked for",
            known,
        ),
        (PlaceLevel.MICRO_STEP, micro_step, "that of the first bad call" if micro_step else "not told apart", source),
        (PlaceLevel.DOMAIN, domain, why or "the run has one rank, or does not tell its groups", "ranks"),
        (PlaceLevel.RANK, rank, of_rank, source),
        (PlaceLevel.MODULE, diagnosis.module, f"phase: {phase_name(diagnosis.phase)}", source),
        (PlaceLevel.API, diagnosis.api, functions if has_functions else "no dump has functions", source),
    )
    return tuple(
        LevelFinding(level=level, answer=answer, reason=why, source=files) for level, answer, why, files in answers
    )


def _collect(diagnosis: Diagnosis, evidence: StepEvidence) -> NextCollection | None:
    """Return what would tell more, if the step is run again from a checkpoint before it."""
    step = diagnosis.step
    inherited = diagnosis.phase in (FaultPhase.PARAMETER, FaultPhase.OPTIMIZER)
    if step is None or (inherited and diagnosis.module):
        return None
    if not evidence.dumps:
        return together(
            _REPLAY if not evidence.unreplayed and (diagnosis.rank is None or not diagnosis.module) else None,
            dump_of_step(step, _ranks(diagnosis), "no dump tells the operation; resume before it"),
            None if diagnosis.module else more_statistics(evidence.kinds, "no stored rows tell the module"),
        )
    verdict = diagnosis.classification
    if verdict is None or verdict.cause is not NonfiniteCause.UNKNOWN or not verdict.collect:
        return None
    calls = [verdict.call] if verdict.call.startswith("Module.") else []
    reason = "to know the cause, resume before it with tensors"
    return dump_of_step(step, _ranks(diagnosis), reason, calls=calls, task="tensor")


def _ranks(diagnosis: Diagnosis) -> list[int]:
    return [] if diagnosis.rank is None else [diagnosis.rank]
