"""Which rank's bad value was the first, where ranks pass values on to one another within a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trainermon.analysis.diagnosis.evidence import RankDump
from trainermon.analysis.diagnosis.findings import FaultPhase
from trainermon.analysis.diagnosis.order import CallEvent, communications, earliest
from trainermon.analysis.diagnosis.origin import INPUT, LOSS, Origin, find_hidden_origin
from trainermon.dump.files.reader import load_raw
from trainermon.dump.files.records import BACKWARD, FORWARD
from trainermon.dump.files.verdicts import NonfiniteCause

Found = tuple[RankDump, Origin]


def first_of(found: Sequence[Found]) -> Found:
    """Return the earliest origin: by micro step, forward before backward, along the pipeline, then within a stage.

    A bad part of a parameter that one rank alone holds was there before any forward, whichever rank met it first.
    Stages of a pipeline follow one another, backwards in the backward; ranks of one stage make the same calls in the
    same order. If it is the output of a module that ranks have made together, a bad weight of one of them comes first.
    """
    first = min(found, key=_place)
    return min(found, key=lambda one: (not _explains(one, first), one is not first, _place(one)))


def _explains(one: Found, first: Found) -> bool:
    (where, origin), (other, effect) = one, first
    is_same = (origin.module, origin.micro_step) == (effect.module, effect.micro_step) and _are_fellows(where, other)
    return is_same and origin.phase is FaultPhase.PARAMETER and effect.phase is FaultPhase.FORWARD


def independent_of(found: Sequence[Found], dumps: Sequence[RankDump]) -> list[Found]:
    """Return those of `found` (a rank's dump and its first bad value) that none of the others can have caused.

    That follows from the communication in the dumps. Only dumps with functions show it; without any, all are returned.
    """
    if len(found) < 2 or all(entry.dump.level == "L0" for entry in dumps):
        return list(found)
    calls = {entry.rank: communications(load_raw(entry.dump.directory), entry.rank) for entry in dumps}
    events = {CallEvent(where.rank, origin.order, origin.key): (where, origin) for where, origin in found}
    return [events[event] for event in earliest(events, calls)]


def without_handed(found: Sequence[Found]) -> list[Found]:
    """Return `found` without the ranks that were only handed the bad value, by one that has other modules.

    So are stages of a pipeline that no framework tells of. Ranks with the same modules and weights compute each from
    its own batch.
    """
    makers = [where for where, origin in found if origin.module not in (INPUT, LOSS)]
    return [
        (where, origin)
        for where, origin in found
        if origin.module not in (INPUT, LOSS) or all(_modules(where) == _modules(maker) for maker in makers)
    ]


def _modules(where: RankDump) -> set[tuple[object, ...]]:
    """Return the modules of a rank by name and weights, which stages with modules of equal names do not share."""
    entries = where.dump.entries
    weights = ((entry.module, record) for entry in entries for record in entry.parameters)
    statistics = ((name, each.slot, each.shape, each.max, each.min, each.norm) for name, each in weights)
    return {*((entry.module,) for entry in entries), *statistics}


def with_hidden(found: Sequence[Found], dumps: Sequence[RankDump]) -> list[Found]:
    """Return `found` and the origins on ranks that stayed sound but sent the bad value to others in the step."""
    where, outer = first_of(found)
    if outer.phase is not FaultPhase.FORWARD:
        return list(found)
    fellows = [entry for entry in dumps if _are_fellows(entry, where)]
    hidden = [(entry, find_hidden_origin(entry.dump, outer, where.dump)) for entry in fellows]
    more = [(entry, origin) for entry, origin in hidden if origin is not None]
    known = {entry.rank for entry, _ in more}
    return [*more, *(pair for pair in found if pair[0].rank not in known)]


def _place(one: Found) -> tuple[bool, int, bool, bool, int, int, int]:
    where, origin = one
    is_backward = origin.phase is FaultPhase.BACKWARD
    stage = pipeline_place(where, origin)
    return (
        not _holds(where, origin),
        origin.micro_step or 0,
        is_backward,
        _was_sent(where, origin),
        -stage if is_backward else stage,
        origin.order,
        where.rank,
    )


def lost_upstream(found: Sequence[Found], dumps: Sequence[RankDump]) -> list[RankDump]:
    """Return dumps of stages before the first fault whose own replay does not reproduce the bad value they passed on.

    A stage replays from what it was handed in the step: it shows a transient fault of another one's forward as lasting.
    Every forward of a micro step comes before its backward.
    """
    where, origin = first_of(found)
    place = where.dump.info.pipeline_stage + origin.stage * where.dump.info.pipeline_size
    fellows = [entry for entry in dumps if _are_fellows(entry, where) and entry.dump.info.lost_nonfinite]
    if origin.phase is FaultPhase.BACKWARD:
        return [entry for entry in fellows if entry.dump.info.pipeline_stage != where.dump.info.pipeline_stage]
    return [entry for entry in fellows if entry.dump.info.pipeline_stage < place]


def pipeline_place(where: RankDump, origin: Origin) -> int:
    """Return the position, from 0, of the origin's stage in the whole pipeline, virtual stages counted."""
    return origin.stage * where.dump.info.pipeline_size + where.dump.info.pipeline_stage


def reached_from(first: Found, found: Sequence[Found]) -> set[int]:
    """Return the ranks of `found` that the bad value of `first` came to before any reduction of gradients.

    They are its fellows in tensor, pipeline, context and expert parallelism, or have gathered its bad parameter.
    """
    origin_rank, origin = first
    reached = set()
    for where, other in found:
        has_gathered = _holds(origin_rank, origin) and other.module == origin.module and not _holds(where, other)
        if _are_fellows(where, origin_rank) or (where is not origin_rank and has_gathered):
            reached.add(where.rank)
    return reached


def in_pipeline(where: RankDump, origin: Origin) -> Origin:
    """Return `origin` with its reason reworded for pipelines: a stage's input and output are not the model's."""
    place, last = pipeline_place(where, origin), where.dump.info.pipeline_size - 1
    if origin.module == INPUT and place > 0:
        reason = "what the pipeline stage before handed over was not finite"
        return dataclasses.replace(origin, reason=reason)
    if origin.module == LOSS and where.dump.info.pipeline_stage < last:
        reason = "the gradient that the next pipeline stage handed back was not finite"
        return dataclasses.replace(origin, reason=reason)
    return origin


def _are_fellows(one: RankDump, other: RankDump) -> bool:
    """Return whether two different ranks pass activations to one another."""
    replica = one.dump.info.replica
    return one is not other and replica is not None and replica == other.dump.info.replica


def _was_sent(where: RankDump, origin: Origin) -> bool:
    """Return whether the replay saw that the first bad value of this rank came to it in a collective."""
    direction = BACKWARD if origin.phase is FaultPhase.BACKWARD else FORWARD
    first = next((found for found in where.dump.info.operations if found.direction == direction), None)
    is_it = first is not None and first.micro_step == origin.micro_step and first.cause is NonfiniteCause.INHERITED
    return is_it and first is not None and first.operation.startswith(("c10d.", "_c10d_functional."))


def _holds(where: RankDump, origin: Origin) -> bool:
    """Return whether the bad parameter is bad in the part that this rank alone holds."""
    if origin.phase is not FaultPhase.PARAMETER:
        return False
    return f"{origin.module}.{origin.tensor.slot.removeprefix('parameters.')}" in where.dump.info.bad_shards
