"""What is said of backwards whose forward was computed a second time (activation checkpointing).

A dump has the first forward alone. What differs in the second shows in the backward, where it would be held against a
gradient that is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.items import MODULE
from trainermon.analysis.compare.verdicts import CallResult
from trainermon.dump.files.records import FORWARD


class BlamedPlace(NamedTuple):
    """Where a difference began.

    Attributes:
        call: The call that is to blame.
        place: The parameter or input of it that was different before it ran; "": what it made.
        words: A few words on it.
    """

    call: CallResult
    place: str
    words: str


def doubted(comparison: Comparison, causes: Sequence[BlamedPlace]) -> list[BlamedPlace]:
    """Return where differences began, those in backwards of one recomputed part as one, at the outermost such module.

    Costs a look at the recomputed backwards for each cause.
    """
    found: list[BlamedPlace] = []
    seen: set[str] = set()
    for cause in causes:
        part = _recomputed_part(comparison, cause.call)
        if part is None:
            found.append(cause)
        elif part.key not in seen:
            seen.add(part.key)
            shown = "" if part is cause.call else f"{cause.call.key}: "
            found.append(BlamedPlace(part, "", f"{shown}{cause.words}; {_DOUBT}"))
    return found


_DOUBT = (
    "for this backward the forward ran a second time (activation checkpointing), which the dump does not have: it "
    "arose there, or in the backward"
)


def _recomputed_part(comparison: Comparison, result: CallResult) -> CallResult | None:
    """Return the backward of the outermost recomputed module around a backward, or its own; None if it has none."""
    call = result.target
    if call is None or call.direction == FORWARD or not comparison.recomputed:
        return None
    path = call.path if call.family == MODULE else call.scope
    backwards = [one for one in comparison.calls if one.target is not None and one.key in comparison.recomputed]
    around = [
        one
        for one in backwards
        if one.target and one.target.family == MODULE and f"{path}.".startswith(f"{one.target.path}.")
    ]
    same = [one for one in around if one.target and one.target.number == call.number] if call.family == MODULE else []
    modules = same or around
    if modules:
        return min(modules, key=lambda one: len(one.target.path) if one.target else 0)
    return result if result.key in comparison.recomputed else None
