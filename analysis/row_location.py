"""Where on a step the first of many series went wrong: rank, module, phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from trainermon.analysis.findings import FaultPhase
from trainermon.analysis.origin import INPUT, LOSS, MODEL
from trainermon.analysis.row_order import Series, StepOrder, module_of
from trainermon.monitor.values import Kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The first bad series of a step.

    `place` is its place among those that were given, `ranks` are all on which the same series is bad. `is_given` tells
    that it is an input which no stored module has made; `module` then is the one in whose forward it was made, and
    `candidates` what cannot be told apart from it.
    """

    place: int
    phase: FaultPhase
    module: str
    ranks: tuple[int, ...]
    is_given: bool = False
    candidates: tuple[str, ...] = ()


def locate(bad: Sequence[Series], order: StepOrder, called: Collection[str]) -> Location | None:
    """Return which of the bad series of one step was first; None without any.

    A module's output is passed over if its input is bad as well, a gradient that a module gives back if the one it was
    given is. `called` are the modules of which inputs and outputs are stored: others only hold modules.
    """
    if not bad:
        return None
    spoiled = {_call(row) for row in bad if _arrives(row)}
    keys = [order.key(row) for row in bad]
    made = [place for place, row in enumerate(bad) if not _arrives(row) and _call(row) not in spoiled]
    first = min(made or range(len(bad)), key=keys.__getitem__)
    given = min(range(len(bad)), key=keys.__getitem__)
    if _arrives(bad[given]) and keys[given][:5] < keys[first][:5]:
        first = given
    row = bad[first]
    phase = order.phase(row.kind)
    module = LOSS if row.kind == Kind.LOSS else module_of(row.kind, row.name) if phase is not FaultPhase.UNKNOWN else ""
    candidates: tuple[str, ...] = ()
    if _arrives(row) and row.kind == Kind.ACTV:
        module, candidates = _maker(row, spoiled, called, is_first=keys[first][4] == 0)
    return Location(
        place=first,
        phase=phase,
        module=module,
        ranks=tuple(sorted({other.rank for other in bad if _without_rank(other) == _without_rank(row)})),
        is_given=_arrives(row),
        candidates=candidates,
    )


def _maker(
    row: Series, spoiled: Collection[tuple[object, ...]], called: Collection[str], *, is_first: bool
) -> tuple[str, tuple[str, ...]]:
    """Return in whose forward a bad input was made: the innermost module around it that was itself given a good one."""
    names = {key[1] for key in spoiled if key[0] == row.kind and key[-1] == row.rank and key[3] == row.micro_step}
    parent = row.name.rpartition(".")[0]
    while parent and (parent in names or parent not in called):
        parent = parent.rpartition(".")[0]
    if parent:
        return parent, ()
    # what a model is given is not stored: an operation before its first module, or the batch
    return (INPUT, ()) if is_first else (MODEL, (INPUT,))


def _without_rank(row: Series) -> tuple[object, ...]:
    return row.kind, row.name, row.slot, row.call, row.micro_step, row.stage


def _call(row: Series) -> tuple[object, ...]:
    return row.kind, row.name, row.call, row.micro_step, row.stage, row.rank


def _arrives(row: Series) -> bool:
    """Return whether the row is what a module was given: its input, or the gradient of its output."""
    if row.kind == Kind.ACTV:
        return row.slot.startswith(("input", "kwargs"))
    return row.kind == Kind.ACTV_GRAD and row.slot.startswith("output")
