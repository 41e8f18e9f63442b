"""Which settings of a call differ: arguments that a script wrote, and attributes of the framework's own modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trainermon.analysis.compare.answer.arguments import given_literal
from trainermon.analysis.compare.answer.whereabouts import lines_of
from trainermon.analysis.compare.causes.literals import is_written
from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.flow import are_plain
from trainermon.analysis.compare.items import INPUT, OUTPUT
from trainermon.analysis.compare.verdicts import PASS, CallResult, ResultRow
from trainermon.dump.files.records import FORWARD


class DifferentSetting(NamedTuple):
    """A setting of a call that is another on the other side.

    Attributes:
        place: The argument; "": it is an attribute of the module.
        words: Both values, as they follow on the name of the call.
    """

    place: str
    words: str


def setting_of(comparison: Comparison, call: CallResult, *, may_be_made: bool = False) -> DifferentSetting | None:
    """Return the first setting of a forward that differs, where its results do; None: none does.

    With `may_be_made` also numbers that tensors may have made: where none of these differ.
    """
    if not _is_forward_that_differs(call):
        return None
    row = argument_of_script(call, may_be_made=may_be_made)
    if row is not None:
        place = row.target.place if row.target is not None else ""
        return DifferentSetting(place, given_literal(comparison, call, row))
    for name, ours, theirs in _attributes(call):
        where = lines_of(comparison.stacks, call.key)
        line = f", called in {where}" if where else ""
        return DifferentSetting("", f"has {name} {ours}, where the golden dump has {theirs}{line}")
    return None


def argument_of_script(call: CallResult, *, may_be_made: bool = False) -> ResultRow | None:
    """Return the first plain argument that differs, or is on one side alone, and that no tensor made; None: none."""
    for row in call.rows:
        sides = [side for side in row[:2] if side is not None]
        if row.result == PASS or any(side.state != INPUT or side.is_tensor for side in sides):
            continue
        is_lone = len(sides) == 1
        if are_plain(sides[0], sides[-1]) and (is_lone or may_be_made or is_written(*(side.max for side in sides))):
            return row
    return None


def _is_forward_that_differs(call: CallResult) -> bool:
    if call.target is None or call.golden is None or call.target.direction != FORWARD:
        return False
    return any(row.result != PASS and row.target is not None and row.target.state == OUTPUT for row in call.rows)


def _attributes(call: CallResult) -> Iterator[tuple[str, object, object]]:
    """Yield the attributes that differ: name, and both values; only those that both sides have."""
    assert call.target is not None
    assert call.golden is not None
    theirs = call.golden.attributes
    for name, value in call.target.attributes.items():
        if name in theirs and repr(value) != repr(theirs[name]):
            yield name, value, theirs[name]
