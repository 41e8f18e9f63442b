"""A plain argument that differs, in words: the value on either side, the place, and the line of the call."""

from __future__ import annotations

from trainermon.analysis.compare.answer.whereabouts import lines_of
from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.verdicts import CallResult, ResultRow


def given_literal(comparison: Comparison, call: CallResult, row: ResultRow) -> str:
    """Return what `call` was given by the script on either side, at which place and in which line."""
    where = lines_of(comparison.stacks, call.key)
    line = f", called in {where}" if where else ""
    hidden = ", which statistics of its results do not show" if call.blamed and not call.output_error else ""
    return f"was given {both_values(row)}{line}{hidden}"


def both_values(row: ResultRow) -> str:
    """Return the argument on either side and its place: `0, where the golden dump has 2 (input.dim)`."""
    ours, theirs = row.target, row.golden
    assert ours is not None
    assert theirs is not None
    return f"{ours.max}, where the golden dump has {theirs.max} ({ours.place})"
