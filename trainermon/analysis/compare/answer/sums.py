"""What is said of backwards that add to one gradient: a dump has the sum, and not what each of them adds."""

from __future__ import annotations

from collections.abc import Sequence

from trainermon.analysis.compare.answer.recomputation import BlamedPlace
from trainermon.analysis.compare.items import OUTPUT, value_of
from trainermon.analysis.compare.verdicts import PASS, CallResult
from trainermon.dump.files.records import BACKWARD

_MAX_NAMED = 3


def one_of_each_sum(causes: Sequence[BlamedPlace]) -> list[BlamedPlace]:
    """Return where differences began, backwards that are to blame for one sum as one: the first, with the others."""
    found: list[BlamedPlace] = []
    sums: list[tuple[set[object], int, list[str]]] = []
    for cause in causes:
        values = _summed(cause)
        same = next((each for each in sums if each[0] & values), None)
        if same is not None:
            same[0].update(values)
            same[2].append(cause.call.key)
            continue
        if values:
            sums.append((values, len(found), []))
        found.append(cause)
    for _, at, others in sums:
        if others:
            found[at] = found[at]._replace(words=f"{found[at].words}; {_or_in(others)}")
    return found


def _summed(cause: BlamedPlace) -> set[object]:
    """Return the gradients that a backward is to blame for, each on both sides; none if it is to blame otherwise."""
    call: CallResult = cause.call
    if cause.place or call.given_to or call.target is None or call.target.direction != BACKWARD:
        return set()
    rows = [row for row in call.rows if row.target and row.golden and row.target.state == OUTPUT and row.result != PASS]
    values = [(value_of(row.target), value_of(row.golden)) for row in rows if row.target and row.golden]
    return {(ours, theirs) for ours, theirs in values if ours and theirs}


def _or_in(others: Sequence[str]) -> str:
    more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
    named = ", or in ".join(others[:_MAX_NAMED])
    return f"or in {named}{more}: what they pass back is one sum, and of what each adds nothing is dumped"
