"""Explains a step on which values exploded, died or diverged from those of other ranks, all of them still finite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from trainermon.analysis.diagnosis.domains import Places, describe_domain, read_places
from trainermon.analysis.diagnosis.evidence import StepEvidence, open_store
from trainermon.analysis.diagnosis.findings import (
    Contrast,
    Diagnosis,
    DiagnosisVerdict,
    FaultPhase,
    LevelFinding,
    PlaceLevel,
    RankFinding,
    RankRole,
    Symptom,
)
from trainermon.analysis.diagnosis.next_collection import dump_of_step
from trainermon.analysis.diagnosis.origin import OPTIMIZER
from trainermon.analysis.diagnosis.rows.copies import CopyDeparture, find_departure, find_parting
from trainermon.analysis.diagnosis.rows.location import RowLocation, locate
from trainermon.analysis.diagnosis.rows.order import StepOrder
from trainermon.analysis.diagnosis.rows.reduced_copies import UnequalGradients, find_unequal_gradients
from trainermon.analysis.diagnosis.rows.symptoms import (
    Episode,
    Moved,
    RateJump,
    find_episodes,
    find_rate_jump,
    first_episode,
    moved_series,
    read_series,
)
from trainermon.analysis.diagnosis.wording import counted, rank_list, series_name
from trainermon.core.values import Kind

MAX_CONTRASTS = 6
MAX_BEFORE = 2
_WHAT: Mapping[Symptom, str] = {
    Symptom.EXPLODED: "Values exploded",
    Symptom.DIED: "Values died",
    Symptom.DIVERGED: "Values diverged from those of the other ranks",
}
_PHRASES: Mapping[FaultPhase, str] = {
    FaultPhase.PARAMETER: "a parameter, before the forward",
    FaultPhase.FORWARD: "in the forward",
    FaultPhase.BACKWARD: "in the backward",
    FaultPhase.REDUCTION: "in the reduction of gradients",
    FaultPhase.BEFORE_STEP: "between backward and optimizer step",
    FaultPhase.OPTIMIZER: "in the optimizer step",
    FaultPhase.UNKNOWN: "after the reduction of gradients, which does not tell where it arose",
}


def explain_abnormal(
    run_dir: Path, evidence: StepEvidence, *, bad_step: int | None, step: int | None
) -> Diagnosis | None:
    """Return the diagnosis of the values that first exploded, died or diverged in a run; None if nothing did.

    `bad_step` is the step with NaN or Inf: before it, only what lasted until then counts. With `step`, only what began
    on it.
    """
    places = read_places(run_dir)
    episode = first_episode(_episodes(run_dir, evidence, step), bad_step)
    if episode is None or evidence.attempt is None:
        return None
    rows, jump, departure, unequal = [], None, None, None
    with open_store(run_dir) as connection:
        if connection is not None:
            rows = list(read_series(connection, evidence.attempt, episode))
            jump = find_rate_jump(connection, evidence.attempt, episode.first_step)
            parting = find_parting(connection, evidence.attempt, episode, places)
            if parting is not None:
                episode = dataclasses.replace(episode, between=(parting.last_equal, parting.found))
                departure = find_departure(connection, evidence.attempt, parting, StepOrder(evidence.modules, places))
            unequal = find_unequal_gradients(connection, evidence.attempt, episode, parting, places)
    if departure is not None:
        return _in_forward(evidence, episode, departure, places)
    if unequal is not None:
        return _in_reduction(evidence, episode, unequal, places)
    moved = moved_series(rows, episode)
    order = StepOrder(
        evidence.modules,
        places,
        is_single=len({row.rank for row in rows}) == 1,
        has_unreduced=Kind.GRAD_UNREDUCED in evidence.kinds,
    )
    location = locate(moved, order, {row.name for row in rows if row.kind == Kind.ACTV})
    found = _explained(evidence, episode, moved, location, places)
    return found if jump is None or episode.symptom is not Symptom.EXPLODED else _after_jump(found, jump)


def _since(episode: Episode) -> str:
    if episode.between is None:
        return f"from step {episode.first_step} on"
    return f"between step {episode.between[0]} (last equal) and step {episode.between[1]}"


def _in_forward(evidence: StepEvidence, episode: Episode, departure: CopyDeparture, places: Places) -> Diagnosis:
    """Return the diagnosis of copies that parted since a module returned different values of the same on its ranks."""
    first, step = departure.rows[0], departure.step
    ranks = tuple(sorted({row.rank for row in departure.rows}))
    location = RowLocation(place=0, phase=FaultPhase.FORWARD, module=first.name, ranks=ranks)
    found = _explained(evidence, dataclasses.replace(episode, first_step=step), list(departure.rows), location, places)
    parameters = "its parameters were equal" if departure.has_parameters else "no parameters of it are known"
    others = (
        "each of them; which is right cannot be told" if departure.is_tied else f"{rank_list(ranks)} than on the others"
    )
    return dataclasses.replace(
        found,
        headline=f"Copies of parameters parted {_since(episode)}: in step {step} the forward of {first.name} differed"
        f" on {rank_list(ranks)}",
        reason=f"In step {step} {first.name} was given the same on {rank_list(departure.ranks)}, and {parameters}, but"
        f" it returned another {first.slot} on {others}. {episode.messages[0]}",
        contrasts=(),  # these would be what the rank itself usually returns
    )


def _in_reduction(evidence: StepEvidence, episode: Episode, unequal: UnequalGradients, places: Places) -> Diagnosis:
    """Return the diagnosis of copies that parted since they got other gradients from the reduction."""
    module = unequal.name.rpartition(".")[0]
    location = RowLocation(place=0, phase=FaultPhase.REDUCTION, module=module, ranks=unequal.ranks)
    rows = [
        Moved(Kind.GRAD_REDUCED, unequal.name, "", 0, None, unequal.stage, rank, norm, norm)
        for rank, norm in unequal.norms.items()
    ]
    found = _explained(evidence, dataclasses.replace(episode, first_step=unequal.step), rows, location, places)
    others = f" and of {counted(unequal.num_others, 'other parameter')}" if unequal.num_others else ""
    norms = ", ".join(f"{norm:.6g} on rank {rank}" for rank, norm in list(unequal.norms.items())[:MAX_CONTRASTS])
    return dataclasses.replace(
        found,
        headline=f"Copies of parameters parted {_since(episode)}: in step {unequal.step} the reduced gradients of"
        f" {unequal.name}{others} differed on {rank_list(unequal.ranks)}",
        reason=f"In step {unequal.step} the copies of {unequal.name} were equal, and their gradients were not, before"
        f" the optimizer stepped: their norms are {norms}. {episode.messages[0]}",
        contrasts=(),  # these would be what the rank itself usually has
    )


def told_before(run_dir: Path, evidence: StepEvidence) -> tuple[str, ...]:
    """Return sentences on values that exploded, died or diverged before the step, perhaps without connection to it."""
    found = [one for one in _episodes(run_dir, evidence, None) if one.first_step < (evidence.step or 0)]
    return tuple(f"{one.source}: from step {one.first_step} on, {one.messages[0]}" for one in found[:MAX_BEFORE])


def _episodes(run_dir: Path, evidence: StepEvidence, step: int | None) -> list[Episode]:
    if evidence.attempt is None or not evidence.kinds:
        return []
    found = find_episodes(run_dir, evidence.attempt, evidence.places)
    return found if step is None else [one for one in found if one.first_step == step]


def _after_jump(found: Diagnosis, jump: RateJump) -> Diagnosis:
    """Return the diagnosis of what a learning rate did that jumped right before it."""
    rate = f"The learning rate jumped from {jump.before:.3g} to {jump.after:.3g} in step {jump.step}"
    return dataclasses.replace(
        found,
        headline=f"{rate}: {found.headline[:1].lower()}{found.headline[1:]}",
        step=jump.step,
        rank=None,
        module=OPTIMIZER,
        phase=FaultPhase.OPTIMIZER,
        candidates=(),
    )


def _explained(
    evidence: StepEvidence, episode: Episode, moved: list[Moved], location: RowLocation | None, places: Places
) -> Diagnosis:
    ranks = location.ranks if location is not None else episode.ranks
    module = location.module if location is not None else ""
    first = moved[location.place] if location is not None else None
    phase = location.phase if location is not None else FaultPhase.UNKNOWN
    where = f" in {module}" if module else ""
    return Diagnosis(
        verdict=DiagnosisVerdict.LOCATED,
        symptom=episode.symptom,
        run_id=evidence.run_id,
        headline=f"{_WHAT[episode.symptom]}{where} on {rank_list(ranks)} {_since(episode)}",
        reason=_reason(episode, first, phase),
        step=episode.first_step,
        attempt=evidence.attempt,
        rank=ranks[0] if len(ranks) == 1 else None,
        module=module,
        micro_step=first.micro_step if first is not None else None,
        phase=phase,
        candidates=(*location.candidates, *_same_tensor(moved, first, module)) if location is not None else (),
        ranks=_ranks(episode, moved, ranks),
        levels=_levels(episode, moved, location, places),
        contrasts=_contrasts(moved, first),
        evidence=tuple(f"{episode.source}: {message}" for message in episode.messages),
        collect=dump_of_step(
            episode.first_step, list(ranks), "to know the operation, resume before it with this configuration"
        ),
    )


def _same_tensor(moved: list[Moved], first: Moved | None, module: str) -> tuple[str, ...]:
    """Return the modules that were given back the very gradient that moved first: it may have been made behind them."""
    if first is None or first.kind != Kind.ACTV_GRAD:
        return ()
    same = [row.name for row in moved if row.kind == first.kind and row.rank == first.rank and row.value == first.value]
    return tuple(dict.fromkeys(name for name in same if name != module))


def _reason(episode: Episode, first: Moved | None, phase: FaultPhase) -> str:
    message = episode.messages[0]
    if first is None:
        return message
    if episode.symptom is Symptom.DIVERGED:
        return f"{message}; {_PHRASES[phase]}"
    size = f"{first.value:.3g}, usually {first.usual:.3g}"
    what = "it" if first.kind == Kind.LOSS else "its root mean square"
    return f"{series_name(first)} was the first, {_PHRASES[phase]}: {what} is {size}. {message}"


def _ranks(episode: Episode, moved: list[Moved], ranks: tuple[int, ...]) -> tuple[RankFinding, ...]:
    concerned = sorted({*episode.ranks, *(row.rank for row in moved)})
    return tuple(
        RankFinding(rank=rank, role=RankRole.ORIGIN if rank in ranks else RankRole.REACHED, replay="none")
        for rank in concerned
    )


def _levels(
    episode: Episode, moved: list[Moved], location: RowLocation | None, places: Places
) -> tuple[LevelFinding, ...]:
    end = "still so at the end" if episode.last_step is None else f"over at step {episode.last_step}"
    ranks = location.ranks if location is not None else episode.ranks
    domain, why = describe_domain(ranks, places)
    first = moved[location.place] if location is not None else None
    micro_step = "" if first is None or first.micro_step is None else str(first.micro_step)
    what = _PHRASES[location.phase] if location is not None else "no stored series moved with it"
    rows = "stored rows"
    return (
        LevelFinding(
            level=PlaceLevel.STEP,
            answer=str(episode.first_step),
            reason=f"{episode.rule}, {_since(episode)}; {end}",
            source=episode.source,
        ),
        LevelFinding(level=PlaceLevel.MICRO_STEP, answer=micro_step, reason="that of the first series", source=rows),
        LevelFinding(
            level=PlaceLevel.DOMAIN, answer=domain, reason=why or "the run tells of no groups", source="ranks"
        ),
        LevelFinding(
            level=PlaceLevel.RANK,
            answer=", ".join(map(str, ranks)),
            reason=f"{len(moved)} series of {counted(len({row.rank for row in moved}), 'rank')} moved with it",
            source=rows,
        ),
        LevelFinding(
            level=PlaceLevel.MODULE, answer=location.module if location is not None else "", reason=what, source=rows
        ),
        LevelFinding(level=PlaceLevel.API, answer="", reason="stored rows know of modules only", source=rows),
    )


def _contrasts(moved: list[Moved], first: Moved | None) -> tuple[Contrast, ...]:
    if first is None or first.kind == Kind.CHECKSUM:  # a checksum is no size
        return ()
    others = [row for row in moved if row is not first and row.rank == first.rank]
    others.sort(key=lambda row: row.value / row.usual if row.usual > 0 else 0.0, reverse=True)
    return tuple(
        Contrast(
            rank=row.rank,
            place=series_name(row),
            value={"rms": row.value},
            usual={"rms": None if math.isnan(row.usual) else row.usual},
        )
        for row in [first, *others][:MAX_CONTRASTS]
    )
