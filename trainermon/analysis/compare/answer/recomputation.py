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
from trainermon.dump.files.records import BACKWARD, FORWARD


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


class _PartAgain(NamedTuple):
    """A part of the model whose forward ran a second time for a backward.

    Attributes:
        backward: Of the module that is that part; of several within one that is not, of the outermost around the cause.
        spans: The first and the last of these modules, as it follows on `ran a second time`; "" for one.
        name: What tells it from other parts.
    """

    backward: CallResult
    spans: str
    name: object


def doubted(comparison: Comparison, causes: Sequence[BlamedPlace]) -> list[BlamedPlace]:
    """Return where differences began, those of one recomputed part as one, at the module that is it.

    Costs a look at the recomputed backwards for each cause.
    """
    found: list[BlamedPlace] = []
    seen: set[object] = set()
    for cause in causes:
        part = _recomputed_part(comparison, cause.call)
        if part is None:
            found.append(cause)
        elif part.name not in seen:
            seen.add(part.name)
            shown = "" if part.backward is cause.call else f"{cause.call.key}: "
            found.append(BlamedPlace(part.backward, "", f"{shown}{cause.words}; {_doubt(part.spans)}"))
    return found


def _doubt(spans: str) -> str:
    return (
        f"for this backward the forward ran a second time{spans} (activation checkpointing), which the dump does not "
        "have: it arose there, or in the backward"
    )


def _recomputed_part(comparison: Comparison, result: CallResult) -> _PartAgain | None:
    """Return the recomputed part that a backward is of, or its own; None if it has none."""
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
        return _whole(comparison, min(modules, key=lambda one: len(one.target.path) if one.target else 0), backwards)
    if result.key in comparison.recomputed:
        return _PartAgain(result, "", result.key)
    return _of_parts(comparison, result.key if call.family == MODULE else comparison.parents.get(result.key))


def _whole(comparison: Comparison, top: CallResult, backwards: Sequence[CallResult]) -> _PartAgain:
    """Return all that ran again with `top`, the outermost such module: what is around it, if all of that did."""
    name, around = comparison.recomputed[top.key], comparison.parents.get(top.key)
    same = [one for one in backwards if comparison.recomputed[one.key] == name]
    tops = [one.target.path for one in same if one.target and comparison.parents.get(one.key) == around]
    if name is None or len(tops) < 2:
        return _PartAgain(top, "", name or top.key)
    whole = _of_parts(comparison, around)
    if whole is not None and whole.name == name:
        return whole
    return _PartAgain(top, f" from {tops[-1]} to {tops[0]}", name)


def _of_parts(comparison: Comparison, key: str | None) -> _PartAgain | None:
    """Return the backward `key` of a module, if all modules directly within it ran again; else None."""
    whole = next((one for one in comparison.calls if one.target is not None and one.key == key), None)
    within = (one for one in comparison.calls if comparison.parents.get(one.key) == key)
    modules = [
        one.key for one in within if one.target and one.target.family == MODULE and one.target.direction == BACKWARD
    ]
    if whole is None or not modules or not all(each in comparison.recomputed for each in modules):
        return None
    parts = {comparison.recomputed[each] for each in modules}
    name = next(iter(parts)) if len(parts) == 1 else None
    return _PartAgain(whole, f" in {len(parts)} parts" if len(parts) > 1 else "", name or key)
