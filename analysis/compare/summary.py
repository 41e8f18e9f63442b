"""A comparison on one screen: how many rows differ, where it began, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.items import OUTPUT, PARAMETERS
from trainermon.analysis.compare.verdicts import ERROR, PASS, UNMATCHED, WARNING, CallResult
from trainermon.dump.records import FORWARD

RESULTS = (ERROR, WARNING, PASS, UNMATCHED)
MAX_BLAMED = 8
_MAX_LINES = 40
_MAX_DUMPS = 12


def render_text(comparisons: list[Comparison], *, colour: bool = False) -> str:
    """Return the summary of all comparisons for a terminal, at most 40 lines."""
    lines: list[str] = []
    if len(comparisons) > 1:
        lines += list(_overview(comparisons))
    lines += list(_one(first_different(comparisons), bold=colour))
    return "\n".join(lines[:_MAX_LINES]) + "\n"


def first_different(comparisons: list[Comparison]) -> Comparison:
    """Return the comparison to look at first: the earliest with a blamed call, else with any difference."""
    for comparison in comparisons:
        if comparison.blamed:
            return comparison
    return next((one for one in comparisons if one.row_counts()[ERROR] + one.row_counts()[WARNING]), comparisons[0])


def headline(comparison: Comparison) -> str:
    """Return in one line what is the matter."""
    if comparison.blamed:
        first = comparison.blamed[0]
        return f"The first difference arose in {first.key}: {describe(first)}."
    counts = comparison.row_counts()
    differing = next((call for call in comparison.calls if call.result in (ERROR, WARNING)), None)
    if differing is not None:
        return f"No call is to blame: the dumps differ from {differing.key} on, {_origin(differing)}."
    if not counts[PASS]:
        return "Nothing could be compared: no call of the target is in the golden dump."
    missing = f", but {counts[UNMATCHED]:,} rows are on one side only" if counts[UNMATCHED] else ""
    return f"The dumps agree: {counts[PASS]:,} rows differ by no more than rounding{missing}."


def describe(call: CallResult) -> str:
    """Return what a call made of what it was given, in a few words."""
    if math.isnan(call.output_error):
        return "a value is NaN or Inf on one side only"
    if not math.isfinite(call.output_error):
        return "its results differ in their bits, its inputs do not"
    given = f"its inputs by {call.input_error:.2g}" if call.input_error else "its inputs not at all"
    return f"its results differ by {call.output_error:.2g}, {given}"


def unmatched_sides(comparison: Comparison) -> tuple[int, int]:
    """Return how many calls only the target has, and how many only the golden dump."""
    lonely = [call for call in comparison.calls if call.result == UNMATCHED]
    return sum(call.golden is None for call in lonely), sum(call.target is None for call in lonely)


def _origin(call: CallResult) -> str:
    states = {row.target.state for row in call.rows if row.result != PASS and row.target}
    if PARAMETERS in states:
        return "which had other parameters"
    if call.target and call.target.direction == FORWARD and OUTPUT not in states:
        return "which was given other inputs"
    return "by what it was given"


def _overview(comparisons: list[Comparison]) -> Iterator[str]:
    yield f"{'dump':<18}{'error':>9}{'warning':>9}{'pass':>10}{'unmatched':>11}  first to blame"
    differing = sorted(comparisons, key=lambda one: not one.blamed)
    for one in differing[:_MAX_DUMPS]:
        counts = one.row_counts()
        first = one.blamed[0].key if one.blamed else "–"
        numbers = f"{counts[ERROR]:>9,}{counts[WARNING]:>9,}{counts[PASS]:>10,}{counts[UNMATCHED]:>11,}"
        yield f"{one.label:<18}{numbers}  {first}"
    if len(comparisons) > _MAX_DUMPS:
        yield f"and {len(comparisons) - _MAX_DUMPS} more, in the files"
    yield ""


def _one(comparison: Comparison, *, bold: bool) -> Iterator[str]:
    title = headline(comparison)
    yield f"\033[1m{title}\033[0m" if bold else title
    yield ""
    counts, calls = comparison.row_counts(), comparison.call_counts()
    yield f"target    {comparison.target}"
    yield f"golden    {comparison.golden}"
    yield f"mode      {comparison.mode.value}{f', {comparison.label}' if comparison.label else ''}"
    yield f"rows      {', '.join(f'{counts[result]:,} {result}' for result in RESULTS)}"
    yield f"calls     {', '.join(f'{calls[result]:,} {result}' for result in RESULTS)}"
    target_only, golden_only = unmatched_sides(comparison)
    if target_only or golden_only:
        yield f"          only in the target: {target_only:,}, only in the golden dump: {golden_only:,}"
    blamed = comparison.blamed
    for index, call in enumerate(blamed[:MAX_BLAMED]):
        yield f"{'to blame' if index == 0 else '':<10}{call.key}: {describe(call)}"
    if len(blamed) > MAX_BLAMED:
        yield f"{'':<10}and {len(blamed) - MAX_BLAMED} more"
    stack = comparison.stacks.get(blamed[0].key, ()) if blamed else ()
    own = next((frame for frame in stack if "site-packages" not in frame), "")
    if own:
        yield f"called in {' '.join(own.split())}"
