"""Where on a step the first of many series went wrong: rank, module, phase."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from trainermon.analysis.diagnosis.findings import FaultPhase
from trainermon.analysis.diagnosis.origin import INPUT, LOSS, MODEL
from trainermon.analysis.diagnosis.rows.order import AFTER_BACKWARD, RowSeries, StepOrder, is_weight, module_of
from trainermon.core.values import Kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowLocation:
    """Where the first bad series (stored statistics of one tensor) of a step belongs.

    Attributes:
        place: Its index in the sequence of bad series that was given.
        phase: The part of the step.
        module: The module.
        ranks: All ranks on which the same series is bad.
        is_given: It is an input which no stored module has made; `module` then is the one in whose forward it was made.
        candidates: Then, modules that cannot be told apart from it.
    """

    place: int
    phase: FaultPhase
    module: str
    ranks: tuple[int, ...]
    is_given: bool = False
    candidates: tuple[str, ...] = ()


def locate(
    bad: Sequence[RowSeries], order: StepOrder, called: Collection[str], sizes: Sequence[float] = ()
) -> RowLocation | None:
    """Return which of the bad series of one step was first, with its phase, module and ranks; None if there are none.

    A module's output is passed over if its input is bad as well, on whichever rank, since ranks that share a call pass
    on what it makes; a gradient that a module gives back if the one it was given is; and a loss if an activation is.
    What the last module is given in the backward is made by the loss.
    Modules need not be called in the order in which they are defined: what a module was given is first only if none
    beside it has made anything bad. Of ranks on which the first series is bad those count on which another of the same
    module is, if they are fewer, and of those the ones that sent it to the others. `called` are the modules of which
    inputs and outputs are stored: others only hold modules. `sizes` tell how bad each is: of what arose after the
    backward all is bad at once, a little, if the gradients were clipped, and what is worst was first.
    """
    if not bad:
        return None
    spoiled = {_call(row) for row in bad if _arrives(row)}
    shares, passed_on = _sharing(bad, order)
    weighty = _with_weights(bad)
    keys = [order.key(row, shares.get(_series(row), ""), is_likely=row.name in weighty) for row in bad]
    first = _first(bad, keys, _made(bad, spoiled, passed_on))
    if order.phase(bad[first]) in AFTER_BACKWARD and sizes:
        first = _worst(first, bad, order, sizes)
    row = bad[first]
    phase = order.phase(row)
    module = LOSS if row.kind == Kind.LOSS else module_of(row) if phase is not FaultPhase.UNKNOWN else ""
    candidates: tuple[str, ...] = ()
    if _arrives(row) and row.kind == Kind.ACTV:
        module, candidates = _maker(row, spoiled, called, is_first=keys[first][4] == 0)
    elif _arrives(row):
        module = _around(row, spoiled, called) or (LOSS if order.is_last(row, called) else module)
    return RowLocation(
        place=first,
        phase=phase,
        module=module,
        ranks=senders(bad, _ranks(row, bad, order)),
        is_given=_arrives(row),
        candidates=candidates,
    )


def _made(
    bad: Sequence[RowSeries], spoiled: Collection[tuple[object, ...]], passed_on: Collection[tuple[object, ...]]
) -> list[int]:
    """Return the places of those that a module has made bad itself; `spoiled` are the calls given something bad."""
    shared = {call[:-1] for call in spoiled}
    is_forward_bad = any(row.kind == Kind.ACTV for row in bad)
    return [
        place
        for place, row in enumerate(bad)
        if not _arrives(row)
        and _call(row)[:-1] not in shared
        and _series(row) not in passed_on
        and not (row.kind == Kind.LOSS and is_forward_bad)
    ]


def _first(bad: Sequence[RowSeries], keys: Sequence[tuple[float, ...]], made: Sequence[int]) -> int:
    """Return the first of those that were `made`, or what was given earlier if none beside it was made."""
    first = min(made or range(len(bad)), key=keys.__getitem__)
    given = min(range(len(bad)), key=keys.__getitem__)
    is_earlier = _arrives(bad[given]) and keys[given][:5] < keys[first][:5]
    if is_earlier and not any(_is_beside(bad[place], bad[given]) for place in made):
        return given
    return first


def _worst(first: int, bad: Sequence[RowSeries], order: StepOrder, sizes: Sequence[float]) -> int:
    """Return the first of those of the phase of `first` that are bad by half as much as the worst one."""
    phase = order.phase(bad[first])
    places = [place for place, row in enumerate(bad) if order.phase(row) is phase and row.kind == bad[first].kind]
    largest = max(sizes[place] for place in places)
    return min((place for place in places if sizes[place] >= largest / 2), key=lambda place: order.key(bad[place]))


def _sharing(
    bad: Sequence[RowSeries], order: StepOrder
) -> tuple[dict[tuple[object, ...], str], set[tuple[object, ...]]]:
    """Return, by series of gradients of tensors that several modules were given, the module that is called first.

    And which of these series are bad only because one of the modules was given a bad gradient, and passed it on: the
    gradient is the sum of what they all gave back. What an identity was given is that sum itself, and tells nothing.
    """
    given = defaultdict(set)
    for row in bad:
        if _arrives(row):
            given[_call(row)].add(row.fingerprint)
    groups: dict[tuple[object, ...], list[RowSeries]] = defaultdict(list)
    for row in bad:
        if row.kind == Kind.ACTV_GRAD and not _arrives(row) and row.fingerprint is not None:
            groups[row.micro_step, row.stage, row.rank, row.fingerprint].append(row)
    several = [rows for rows in groups.values() if len(rows) > 1]
    first = {_series(row): order.earliest({other.name for other in rows}) for rows in several for row in rows}
    passed_on = [rows for rows in several if any(given[_call(row)] - {row.fingerprint} for row in rows)]
    return first, {_series(row) for rows in passed_on for row in rows}


def _with_weights(bad: Iterable[RowSeries]) -> set[str]:
    """Return the modules of which a weight's gradient is bad: their own backward is, if they were given a sound one."""
    return {module_of(row) for row in bad if row.kind in (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED)}


def _series(row: RowSeries) -> tuple[object, ...]:
    return row.kind, row.name, row.slot, row.call, row.micro_step, row.stage, row.rank


def _is_beside(row: RowSeries, given: RowSeries) -> bool:
    """Return whether a series belongs to the same call of the module around the one that was `given` something bad."""
    parent = given.name.rpartition(".")[0]
    same = (row.kind, row.micro_step, row.stage, row.rank) == (given.kind, given.micro_step, given.stage, given.rank)
    return bool(parent) and same and row.name.startswith(f"{parent}.")


def _ranks(row: RowSeries, bad: Sequence[RowSeries], order: StepOrder) -> tuple[int, ...]:
    """Return the ranks on which the series is bad, or the fewest that have another of its module and phase."""
    found: dict[tuple[object, ...], set[int]] = defaultdict(set)
    place = module_of(row), order.phase(row)
    for other in bad:
        if (module_of(other), order.phase(other)) == place:
            found[_without_rank(other)].add(other.rank)
    of_row = found[_without_rank(row)]
    fewest = min((len(ranks), sorted(ranks)) for ranks in found.values() if ranks <= of_row)
    return tuple(fewest[1])


def senders(bad: Iterable[RowSeries], ranks: Collection[int]) -> tuple[int, ...]:
    """Return those of `ranks` that sent a bad value to the others, by the first collective that fewer sent than got.

    All of them if no operands of collectives are stored that tell.
    """
    sent: dict[tuple[int, int, str], set[int]] = defaultdict(set)
    received: dict[tuple[int, int, str], set[int]] = defaultdict(set)
    for row in bad:
        if row.kind == Kind.COMM and row.rank in ranks and row.slot.startswith(("pre.", "post.")):
            known = sent if row.slot.startswith("pre.") else received
            known[row.micro_step or 0, row.call, row.name].add(row.rank)
    fewer = (meeting for meeting in sorted(received) if sent[meeting] and sent[meeting] < received[meeting])
    first = next(fewer, None)
    return tuple(sorted(ranks if first is None else sent[first]))


def _maker(
    row: RowSeries, spoiled: Collection[tuple[object, ...]], called: Collection[str], *, is_first: bool
) -> tuple[str, tuple[str, ...]]:
    """Return in whose forward a bad input was made: the innermost module around it that was itself given a good one."""
    if parent := _around(row, spoiled, called):
        return parent, ()
    # what a model is given is not stored: an operation before its first module, or the batch
    return (INPUT, ()) if is_first else (MODEL, (INPUT,))


def _around(row: RowSeries, spoiled: Collection[tuple[object, ...]], called: Collection[str]) -> str:
    """Return the innermost module around a row's that was itself given something good; "" if there is none."""
    names = {key[1] for key in spoiled if key[0] == row.kind and key[-1] == row.rank and key[3] == row.micro_step}
    parent = row.name.rpartition(".")[0]
    while parent and (parent in names or parent not in called):
        parent = parent.rpartition(".")[0]
    return parent


def _without_rank(row: RowSeries) -> tuple[object, ...]:
    return row.kind, row.name, row.slot, row.call, row.micro_step, row.stage


def _call(row: RowSeries) -> tuple[object, ...]:
    return row.kind, row.name, row.call, row.micro_step, row.stage, row.rank


def _arrives(row: RowSeries) -> bool:
    """Return whether the row is what a module was given: its input, or the gradient of its output."""
    if row.kind == Kind.ACTV:
        return row.slot.startswith(("input", "kwargs")) and not is_weight(row)
    return row.kind == Kind.ACTV_GRAD and row.slot.startswith("output")
