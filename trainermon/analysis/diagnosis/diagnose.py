"""Explains the step on which a run went wrong: step, rank, module, phase, and the way from there to the loss.

A rank whose replay is not finite is where the fault arose; one whose replay is clean only received it through the
reduction. Where no replay shows the fault, the stored statistics say as much as they can.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from trainermon.analysis.diagnosis.across import (
    first_of,
    in_pipeline,
    independent_of,
    lost_upstream,
    reached_from,
    with_hidden,
    without_handed,
)
from trainermon.analysis.diagnosis.classify import OUTSIDE_REPLAY, absent_of, classified, suspects_device
from trainermon.analysis.diagnosis.cut_off import followed_to_forward
from trainermon.analysis.diagnosis.evidence import SURE_KINDS, RankDump, StepEvidence, gather
from trainermon.analysis.diagnosis.findings import (
    BadParameter,
    BadTensor,
    Diagnosis,
    DiagnosisVerdict,
    FaultPhase,
    PathLink,
    RankFinding,
    RankRole,
    Symptom,
)
from trainermon.analysis.diagnosis.firing import with_alerts, with_setting
from trainermon.analysis.diagnosis.huge_weight import find_huge_weight
from trainermon.analysis.diagnosis.levels import with_levels
from trainermon.analysis.diagnosis.nothing_found import nothing_found
from trainermon.analysis.diagnosis.origin import INPUT, LOSS, Origin, bad_parameters, bad_tensor, find_origin
from trainermon.analysis.diagnosis.recorded import with_recorded
from trainermon.analysis.diagnosis.rows.abnormal import explain_abnormal, told_before
from trainermon.analysis.diagnosis.rows.stored import StoredPlace, locate_in_rows
from trainermon.analysis.diagnosis.step_before import made_by_update
from trainermon.analysis.diagnosis.wording import counted, rank_list, sentence
from trainermon.core.values import Kind
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import Dump
from trainermon.dump.files.verdicts import NonfiniteCause

MAX_PARAMETERS = 20
# What no replay shows, since it runs forwards and backwards only.
_NOT_IN_MODEL = (FaultPhase.REDUCTION, FaultPhase.BEFORE_STEP)
# If so many modules' parameters are bad, they were spoiled by an optimizer step, not one by one.
WIDESPREAD = 0.5


def diagnose(run_dir: Path, *, step: int | None = None) -> Diagnosis:
    """Return what went wrong on `step`; without a step, what went wrong first in the run.

    What is not finite comes first, unless something exploded before, did so until then, and can have caused it.

    Raises:
        DumpError: there is no such run directory, or nothing is known of `step`.
    """
    evidence = gather(Path(run_dir), step)
    diagnosis = _diagnose_nonfinite(evidence)
    is_bad = diagnosis.symptom is Symptom.NONFINITE
    if is_bad and step is not None:
        return diagnosis
    abnormal = None
    if not is_bad or _may_follow(diagnosis):
        abnormal = explain_abnormal(Path(run_dir), evidence, bad_step=evidence.step if is_bad else None, step=step)
    if abnormal is None:
        before = told_before(Path(run_dir), evidence) if is_bad else ()
        diagnosis = dataclasses.replace(diagnosis, evidence=(*diagnosis.evidence, *before))
        if is_bad and _may_follow(diagnosis):
            return with_setting(Path(run_dir), diagnosis)
        return _otherwise(Path(run_dir), diagnosis, evidence, step)
    later = f"step {evidence.step} was the first that was not finite; see --step {evidence.step}"
    if is_bad:
        return with_setting(Path(run_dir), dataclasses.replace(abnormal, consequences=(later,)))
    return abnormal if step is not None else with_alerts(Path(run_dir), abnormal)


def _otherwise(run_dir: Path, diagnosis: Diagnosis, evidence: StepEvidence, step: int | None) -> Diagnosis:
    """Return what else went wrong where every tensor is finite: a recorded number, else what an alert told."""
    if diagnosis.verdict is not DiagnosisVerdict.FINITE or evidence.attempt is None:
        return diagnosis
    diagnosis = with_recorded(run_dir, diagnosis, evidence, step)
    return diagnosis if step is not None else with_alerts(run_dir, diagnosis)


def _may_follow(diagnosis: Diagnosis) -> bool:
    """Return whether a non-finite value can come of finite ones that grew: not of a batch, a weight or a device."""
    is_given = diagnosis.module == INPUT or diagnosis.phase in (FaultPhase.PARAMETER, *_NOT_IN_MODEL)
    verdict = diagnosis.classification
    return not is_given and not (verdict is not None and verdict.cause is NonfiniteCause.KERNEL)


def _diagnose_nonfinite(evidence: StepEvidence) -> Diagnosis:
    found = [(entry, find_origin(entry.dump)) for entry in evidence.dumps]
    # a fault that did not come back leaves but its gradient in the replay: nothing to locate it by
    origins = [
        (entry, in_pipeline(entry, followed_to_forward(entry.dump, origin)))
        for entry, origin in found
        if origin is not None and not entry.dump.info.lost_nonfinite
    ]
    if _is_consequence(evidence):
        diagnosis = _consequence(evidence)
    elif origins and not lost_upstream(origins, evidence.dumps):
        diagnosis = _located(evidence, origins)
    elif evidence.rows or any(entry.dump.info.replay for entry in evidence.dumps):
        diagnosis = _not_in_replay(evidence)
    else:
        diagnosis = dataclasses.replace(nothing_found(evidence), ranks=_ranks(evidence, set()))
    diagnosis = dataclasses.replace(
        diagnosis, step=evidence.step, attempt=evidence.attempt, evidence=_sources(evidence), version=diagnosis.version
    )
    return with_levels(classified(diagnosis, evidence.dumps), evidence)


def _is_consequence(evidence: StepEvidence) -> bool:
    """Return whether an earlier step spoiled the weights of this one.

    Two bad steps in a row need not be one fault, as when the script skips a bad update: then the weights are finite.
    """
    if evidence.bad_since is None:
        return False
    dumps = [entry.dump for entry in evidence.dumps]
    if any(entry.parameters for dump in dumps for entry in dump.entries):
        return any(bad_parameters(dump) for dump in dumps)
    telling = next((kind for kind in (Kind.PARAM_ORIGIN, Kind.LOSS) if kind in evidence.kinds), None)
    return any(telling in (None, row.kind) and row.kind in SURE_KINDS for row in evidence.rows)


def _consequence(evidence: StepEvidence) -> Diagnosis:
    first = evidence.bad_since
    return Diagnosis(
        verdict=DiagnosisVerdict.CONSEQUENCE,
        symptom=Symptom.NONFINITE,
        run_id=evidence.run_id,
        headline=f"Step {first} was the first that was not finite: this is a consequence; see --step {first}",
        reason=f"The weights that step {evidence.step} began with were spoiled before: it tells nothing of the cause",
        ranks=_ranks(evidence, set()),
        consequences=_consequences(evidence, set()),
    )


def _located(evidence: StepEvidence, origins: Sequence[tuple[RankDump, Origin]]) -> Diagnosis:
    everywhere = {entry.rank for entry, _ in origins}
    origins = with_hidden(independent_of(without_handed(origins), evidence.dumps), evidence.dumps)
    where, origin = first_of(origins)
    reached = reached_from((where, origin), origins) | (everywhere - {entry.rank for entry, _ in origins})
    bad = {entry.rank for entry, _ in origins} - reached
    phase, history = _history(evidence, where, origin)
    module, class_name, api = _module(where.dump, origin)
    what = "The batch was not finite" if module == INPUT else f"{_WHAT[phase]} {module or api}"
    reason = sentence(f"{api or module}: {origin.reason}")
    located = Diagnosis(
        verdict=DiagnosisVerdict.LOCATED,
        symptom=Symptom.NONFINITE,
        run_id=evidence.run_id,
        headline=f"{what} on rank {where.rank} in step {evidence.step}",
        reason=". ".join(filter(None, [reason, history, _others(bad, where), _reached(reached)])),
        rank=where.rank,
        module=module,
        class_name=class_name,
        api=api,
        call=origin.call,
        micro_step=origin.micro_step,
        phase=phase,
        tensor=bad_tensor(origin.tensor),
        source=origin.source,
        candidates=origin.candidates,
        chain=_to_loss(evidence, where.rank, origin),
        ranks=_ranks(evidence, bad, reached),
        parameters=_parameters(where),
        consequences=_consequences(evidence, bad | reached),
        dump=where.path,
    )
    return _of_huge_weight(located, where, evidence)


def _of_huge_weight(located: Diagnosis, where: RankDump, evidence: StepEvidence) -> Diagnosis:
    """Return `located` if no weight is out of all proportion; else the diagnosis that names it."""
    is_computed = located.phase in (FaultPhase.FORWARD, FaultPhase.BACKWARD) and located.module != INPUT
    weight = find_huge_weight(where, evidence) if is_computed else None
    if weight is None:
        return located
    module = weight.name.rpartition(".")[0]
    said = (
        f"The largest element of {weight.name} was {weight.size:.2g} when the forward began, that of others about"
        f" {weight.usual:.2g}: finite, and far too large. What is computed with it overflowed first in {located.module}"
    )
    reached = {finding.rank for finding in located.ranks if finding.role is RankRole.ORIGIN} - {weight.rank}
    return dataclasses.replace(
        located,
        headline=f"A parameter was far too large in {module} on rank {weight.rank} in step {evidence.step}",
        reason=said,
        rank=weight.rank,
        module=module,
        class_name=next((entry.class_name for entry in where.dump.entries if entry.module == module), ""),
        phase=FaultPhase.PARAMETER,
        tensor=bad_tensor(weight.record),
        api="",
        source="",
        candidates=(),
        ranks=_ranks(evidence, {weight.rank}, reached),
    )


def _module(dump: Dump, origin: Origin) -> tuple[str, str, str]:
    """Return the module of an origin, its class, and the key of the function call if it arose in one."""
    if not origin.key or origin.key.startswith("Module.") or origin.module.startswith("("):
        return origin.module, origin.class_name, ""
    parents = {entry.key: entry.parent for entry in dump.entries}
    key = parents.get(origin.key)
    while key is not None and not key.startswith("Module."):
        key = parents.get(key)
    module, class_name, _, _ = split_key(key) if key is not None else ("", "", "", 0)
    return module, class_name, origin.key


_WHAT = {
    FaultPhase.PARAMETER: "A parameter was not finite in",
    FaultPhase.FORWARD: "A non-finite value arose in the forward of",
    FaultPhase.BACKWARD: "A non-finite gradient arose in the backward of",
    FaultPhase.REDUCTION: "The reduction made a non-finite gradient of",
    FaultPhase.BEFORE_STEP: "Between backward and optimizer step something spoilt the gradient of",
    FaultPhase.OPTIMIZER: "The optimizer made a non-finite parameter of",
    FaultPhase.UNKNOWN: "A non-finite value arose in",
}


def _history(evidence: StepEvidence, where: RankDump, origin: Origin) -> tuple[FaultPhase, str]:
    """Return the phase, and what made a parameter bad, as far as the stored step before tells."""
    losses = [row for row in evidence.rows if row.kind == Kind.LOSS and row.rank == where.rank]
    if origin.module == LOSS and losses:
        return FaultPhase.FORWARD, "The loss itself was not finite"
    if origin.phase is not FaultPhase.PARAMETER:
        return origin.phase, ""
    before = evidence.step_before
    rows = [row for row in evidence.rows_before if row.rank == where.rank]
    name = f"{origin.module}.{origin.tensor.slot.removeprefix('parameters.')}"
    if any(row.kind == Kind.PARAM_UPDATED and row.name == name for row in rows):
        return (
            FaultPhase.OPTIMIZER,
            f"The gradients of step {before} were finite, the parameter after its update was not",
        )
    phase, made = made_by_update(evidence, where.rank, name)
    if made:
        return phase, made
    owners = {entry.module for entry in where.dump.entries if entry.parameters}
    bad = {entry.module for entry in where.dump.entries if any(record.nonfinite for record in entry.parameters)}
    if len(owners) > 3 and len(bad) > WIDESPREAD * len(owners):
        return origin.phase, "Most parameters were bad already, so the fault lies in an earlier step"
    return origin.phase, ""


def _others(bad: set[int], where: RankDump) -> str:
    others = sorted(bad - {where.rank})
    return f"The same step was not finite on {rank_list(others)} by itself, too" if others else ""


def _reached(ranks: set[int]) -> str:
    return f"Within the step it came to {rank_list(sorted(ranks))}" if ranks else ""


def _to_loss(evidence: StepEvidence, rank: int, origin: Origin) -> tuple[PathLink, ...]:
    loss = next((row for row in evidence.rows if row.kind == Kind.LOSS and row.rank == rank), None)
    if loss is None or origin.phase is FaultPhase.BACKWARD:
        return origin.chain
    tensor = BadTensor(slot=loss.name, count=loss.count, nans=loss.nans, infs=loss.infs)
    return (*origin.chain, PathLink(module=LOSS, class_name="", direction="forward", call=0, tensor=tensor))


def _ranks(evidence: StepEvidence, bad: set[int], reached: Collection[int] = ()) -> tuple[RankFinding, ...]:
    replays = {entry.rank: entry.dump for entry in evidence.dumps if entry.dump.info.replay}
    unreduced = _count_bad(evidence, Kind.GRAD_UNREDUCED)
    reduced = _count_bad(evidence, Kind.GRAD_REDUCED)
    findings = []
    for rank in sorted({*replays, *evidence.ranks, *bad}):
        dump = replays.get(rank)
        replay = _replay_of(dump)
        role = RankRole.INNOCENT if replay == "clean" and bad else RankRole.UNKNOWN
        if rank in bad or rank in reached:
            role = RankRole.ORIGIN if rank in bad else RankRole.REACHED
        findings.append(
            RankFinding(
                rank=rank,
                role=role,
                replay=replay,
                replay_reason=dump.info.uncovered if dump is not None and dump.info.aborted else "",
                unreduced=unreduced[rank] if Kind.GRAD_UNREDUCED in evidence.kinds else None,
                reduced=reduced[rank] if Kind.GRAD_REDUCED in evidence.kinds else None,
            )
        )
    return tuple(findings)


def _replay_of(dump: Dump | None) -> str:
    if dump is None:
        return "none"
    if dump.info.aborted:
        return dump.info.aborted
    if dump.nonfinite and not dump.info.lost_nonfinite:
        return "nonfinite"
    return "unfinished" if dump.info.cut_off else "clean"


def _count_bad(evidence: StepEvidence, kind: Kind) -> Counter[int]:
    """Return by rank how many parameters have a non-finite gradient."""
    pairs = {(row.rank, row.name) for row in evidence.rows if row.kind == kind}
    return Counter(rank for rank, _ in pairs)


def _parameters(where: RankDump) -> tuple[BadParameter, ...]:
    return tuple(
        BadParameter(name=name, count=record.count, nans=record.nans or 0, infs=record.infs or 0)
        for name, record in bad_parameters(where.dump)[:MAX_PARAMETERS]
    )


def _consequences(evidence: StepEvidence, bad: set[int], phase: FaultPhase = FaultPhase.UNKNOWN) -> tuple[str, ...]:
    found = []
    reduced = _count_bad(evidence, Kind.GRAD_REDUCED)
    if len(reduced) > len(bad) and phase is not FaultPhase.REDUCTION:
        number = counted(max(reduced.values()), "gradient")
        found.append(f"the reduction carried it to {rank_list(sorted(reduced))}: {number} each")
    elif reduced:
        most = max(reduced.values())
        found.append(f"{counted(most, 'gradient')} {'was' if most == 1 else 'were'} not finite")
    losses = sorted({row.rank for row in evidence.rows if row.kind == Kind.LOSS})
    if losses:
        found.append(f"the loss was not finite on {rank_list(losses)}")
    updated = {row.name for row in evidence.rows if row.kind == Kind.PARAM_UPDATED}
    if updated:
        found.append(f"the optimizer step wrote it into {counted(len(updated), 'parameter')}")
    return tuple(found)


def _not_in_replay(evidence: StepEvidence) -> Diagnosis:
    """Return a diagnosis from stored statistics: no replay was made, or none shows the fault."""
    started = [entry for entry in evidence.dumps if entry.dump.info.replay]
    replayed = [entry for entry in started if not (entry.dump.info.cut_off or entry.dump.info.aborted)]
    cut = sorted({entry.rank for entry in started} - {entry.rank for entry in replayed})
    replayed = [entry for entry in replayed if not entry.dump.nonfinite or entry.dump.info.lost_nonfinite]
    handed_on = {entry.rank for entry in started} - {entry.rank for entry in replayed} - {*cut}
    lost = [entry.rank for entry in replayed if entry.dump.info.lost_nonfinite]
    place = locate_in_rows(evidence, lost[0] if lost else None)
    if place.phase in _NOT_IN_MODEL and not lost:
        return _not_in_model(evidence, place, replayed, started)
    # a fault may hide where the replay did not get to
    is_clean = bool(lost) or (bool(replayed) and place.rank not in cut and (not cut or place.rank is not None))
    of_rank = [entry for entry in replayed if place.rank in (None, entry.rank)]
    is_transient = is_clean and any(suspects_device(entry.dump) for entry in of_rank)
    found = []
    if lost:
        found.append(f"The model's output was not finite on {rank_list(lost)}, but was in the replay of the same step")
    elif replayed:
        clean = rank_list([entry.rank for entry in replayed])
        found.append(f"The replay of {clean} is clean although the step was not")
    if is_transient:
        found[0] += ": not reproduced, so transient, likely the hardware or a race"
    elif is_clean:
        known = dict.fromkeys(entry.dump.info.uncovered for entry in of_rank if entry.dump.info.uncovered)
        found.append(sentence("; ".join(known) or OUTSIDE_REPLAY))
    if cut:
        found.append(f"The replay of {rank_list(cut)} did not come to its end")
    absent = absent_of(of_rank) if is_clean and not is_transient else ""
    if absent:  # in which order gradients were bad there, nobody knows
        place = place._replace(module="")
    return Diagnosis(
        verdict=DiagnosisVerdict.NOT_REPRODUCED if is_clean else DiagnosisVerdict.LOCATED,
        symptom=Symptom.NONFINITE,
        run_id=evidence.run_id,
        headline=f"{_what_of(place, absent, is_transient=is_transient)} in step {evidence.step}",
        reason=". ".join([". ".join(found) or _no_replay(evidence), sentence(place.reason)]),
        rank=place.rank,
        module=place.module,
        phase=place.phase,
        tensor=place.tensor,
        ranks=_ranks(evidence, set() if place.rank is None else {place.rank, *lost}, handed_on),
        consequences=_consequences(evidence, set() if place.rank is None else {place.rank}, place.phase),
        dump=next((entry.path for entry in started if entry.rank == place.rank), None),
    )


def _no_replay(evidence: StepEvidence) -> str:
    """Return why there is no replay of the step, by the first rank that tells."""
    told = [evidence.unreplayed[rank] for rank in sorted(evidence.unreplayed)]
    if not told:
        return "No replay of the step was found"
    done = "was refused" if told[0].status == "refused" else told[0].status
    same = [one.rank for one in told if one[2:] == told[0][2:]]
    return f"The replay of {rank_list(same)} {done}: {told[0].reason}"


def _what_of(place: StoredPlace, absent: str, *, is_transient: bool) -> str:
    """Return the headline of what is in no replay, up to the step; `absent` is what no replay contains."""
    what = f"{_WHAT[place.phase] if place.module else 'A non-finite value appeared'} {place.module}".rstrip()
    if place.row is not None and place.row.kind == Kind.BUFFER:
        what = f"A buffer was not finite in {place.module}"
    if is_transient:
        what = f"A transient non-finite value appeared{f' in {place.module}' if place.module else ''}"
    elif absent:
        what = f"A non-finite gradient likely came of {absent}"
    return what if place.rank is None else f"{what} on rank {place.rank}"


def _not_in_model(
    evidence: StepEvidence, place: StoredPlace, replayed: Sequence[RankDump], started: Sequence[RankDump]
) -> Diagnosis:
    """Return a diagnosis of what arose after the backward: a clean replay is what is to be expected."""
    bad = set() if place.rank is None else {place.rank}
    what = f"{_WHAT[place.phase]} {place.module}" if place.module else _AFTER_BACKWARD[place.phase]
    where = f" on rank {place.rank}" if place.rank is not None else ""
    clean = f"The replay of {rank_list([entry.rank for entry in replayed])} is clean" if replayed else ""
    if absent := absent_of(replayed):
        clean += f"; the step had {absent}, which no replay contains"
    return Diagnosis(
        verdict=DiagnosisVerdict.LOCATED,
        symptom=Symptom.NONFINITE,
        run_id=evidence.run_id,
        headline=f"{what}{where} in step {evidence.step}",
        reason=". ".join(filter(None, [sentence(place.reason), clean])),
        rank=place.rank,
        module=place.module,
        phase=place.phase,
        tensor=place.tensor,
        ranks=_ranks(evidence, bad),
        consequences=_consequences(evidence, bad, place.phase),
        dump=next((entry.path for entry in started if entry.rank == place.rank), None),
    )


_AFTER_BACKWARD = {
    FaultPhase.REDUCTION: "The reduction made a non-finite gradient",
    FaultPhase.BEFORE_STEP: "Between backward and optimizer step something spoilt a gradient",
}


def _sources(evidence: StepEvidence) -> tuple[str, ...]:
    found = [_dump_source(entry) for entry in evidence.dumps]
    if evidence.kinds:
        found.append(
            f"stored statistics of {counted(len(evidence.ranks), 'rank')}: {', '.join(sorted(evidence.kinds))}"
        )
    return (*found, *(f"alert: {message}" for message in evidence.alerts), *evidence.notes)


def _dump_source(entry: RankDump) -> str:
    info = entry.dump.info
    words = [f"{'replay' if info.replay else 'dump'} of rank {entry.rank}: {entry.path}"]
    if info.replay:
        words.append(counted(info.micro_steps, "micro step"))
    if info.cut_off:
        words.append("cut off")
    if info.errors:
        words.append(f"{info.errors} entries lost ({info.first_error})")
    if info.aborted:  # the reason stands beside the rank
        words.append(info.aborted)
    return "; ".join([*words, *filter(None, ["" if info.aborted else info.uncovered]), *info.notes])
