"""A plain argument that differs, in words: the value on either side, the place, and the line of the call."""

from __future__ import annotations

import math

from trainermon.analysis.compare.answer.whereabouts import lines_of
from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.frameworks import dtype_name
from trainermon.analysis.compare.items import INPUT, DumpRow
from trainermon.analysis.compare.noise import roundoff_of
from trainermon.analysis.compare.verdicts import PASS, CallResult, ResultRow


def given_literal(comparison: Comparison, call: CallResult, row: ResultRow) -> str:
    """Return what `call` was given by the script on either side, at which place and in which line."""
    where = lines_of(comparison.stacks, call.key)
    line = f", called in {where}" if where else ""
    hidden = ", which statistics of its results do not show" if call.blamed and not call.output_error else ""
    return f"was given {both_values(row)}{line}{hidden}"


def both_values(row: ResultRow) -> str:
    """Return the argument on either side and its place: `0, where the golden dump has 2 (input.dim)`."""
    item = row.target or row.golden
    assert item is not None
    ours, theirs = (side.max if side is not None else "nothing" for side in row[:2])
    return f"{ours}, where the golden dump has {theirs} ({item.place})"


def unlike_input(call: CallResult | None) -> str:
    """Return the first input of a call that is not the same, and what of it is another, as it follows on a sentence."""
    for row in call.rows if call is not None else ():
        if row.target and row.golden and row.target.state == INPUT and row.result != PASS and not _is_finite(row):
            return f": {row.target.place} {_unlike(row.target, row.golden)}"
    return ""


def _is_finite(row: ResultRow) -> bool:
    return row.difference.relative is not None and math.isfinite(row.difference.relative)


def _unlike(ours: DumpRow, theirs: DumpRow) -> str:
    if ours.is_tensor != theirs.is_tensor or dtype_name(ours.dtype) != dtype_name(theirs.dtype):
        return f"is {_kind(ours)}, where the golden dump has {_kind(theirs)}"
    if ours.shape != theirs.shape:
        return f"has shape {list(ours.shape or ())}, where the golden dump has {list(theirs.shape or ())}"
    if not ours.is_tensor:
        return f"is {ours.max}, where the golden dump has {theirs.max}"
    if dtype_name(ours.dtype) != "bool":
        return "has other numbers" if not roundoff_of(ours.dtype) else "has other bits"
    counts = [side.num_elements - side.more if isinstance(side.more, int) else None for side in (ours, theirs)]
    if None in counts or counts[0] == counts[1]:
        return "is a mask with other values"
    return f"is a mask with {counts[0]:,} of {ours.num_elements:,} true, where the golden dump has {counts[1]:,}"


def _kind(item: DumpRow) -> str:
    return f"a tensor of {dtype_name(item.dtype)}" if item.is_tensor else f"{item.max}"
