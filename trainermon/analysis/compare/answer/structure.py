"""What one side alone does just before the two differ: another function or class in one place, a layer more or less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from trainermon.analysis.compare.answer.frozen import frozen_parameters
from trainermon.analysis.compare.answer.remarks import both_keys, first_differing
from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.items import INPUT, MODULE, OUTPUT, DumpCall, DumpRow, Value, value_of
from trainermon.analysis.compare.verdicts import PASS, CallResult, ResultRow
from trainermon.dump.files.records import FORWARD


class LoneCalls(NamedTuple):
    """Calls that one side alone made, just before the first call that differs.

    Attributes:
        call: The first of them that no other of them is around: the target's, if it has any.
        words: What that is to the other side.
        onwards: From which call on the two differ, as it follows on `words`; "" where one stands for the other.
        behind: Key of the last forward of both sides before them, where that was asked for; "": they are the first.
    """

    call: CallResult
    words: str
    onwards: str = ""
    behind: str = ""


def is_replaced(comparison: Comparison, result: CallResult) -> bool:
    """Return whether a call is that of a module which has another class in the golden dump."""
    call = result.target
    return call is not None and call.family == MODULE and call.path in comparison.replaced


def lone_before(comparison: Comparison) -> LoneCalls | None:
    """Return what one side alone did in the forward just before the first difference; None if it did nothing.

    None, too, if a call is to blame for what it made of inputs that agree. Costs a look at every call.
    """
    first = next(iter(comparison.blamed), None)
    differing = first_differing(comparison) if first is None else _shows_first(comparison, first)
    if differing is None or differing.target is None or differing.golden is None:
        return None
    if differing.target.direction != FORWARD or frozen_parameters(comparison.calls):
        return None
    ours = {one.target.key: one for one in comparison.calls if one.target is not None}
    theirs = {one.golden.key: one for one in comparison.calls if one.golden is not None}
    own, other = _makers(ours, differing, of_target=True), _makers(theirs, differing, of_target=False)
    if own is None and other is None:
        own = _outermost(_before(list(ours), ours, differing.target.key))
        other = _outermost(_before(comparison.golden_keys, theirs, differing.golden.key))
    if own is not None and other is not None:
        return LoneCalls(own, f"stands where the golden dump has {other.key}")
    on = f", and the dumps differ from {both_keys(differing)} on"
    if own is not None:
        return _alone(own, "target", _run_of(own, list(ours), ours), on)
    return None if other is None else _alone(other, "golden dump", _run_of(other, comparison.golden_keys, theirs), on)


def first_lone(comparison: Comparison) -> LoneCalls | None:
    """Return the first calls that one side alone made in the forward; None if there are none.

    Whatever differs before: for a difference that did not begin in this step. Costs a look at every call.
    """
    ours = {one.target.key: one for one in comparison.calls if one.target is not None}
    theirs = {one.golden.key: one for one in comparison.calls if one.golden is not None}
    before, own = _first_run(list(ours), ours)
    before_other, other = _first_run(comparison.golden_keys, theirs)
    if own and other and before is before_other:
        made = _outermost(own) or own[0], _outermost(other) or other[0]
        return LoneCalls(made[0], f"stands where the golden dump has {made[1].key}", behind=_key(before))
    place = {key: at for at, key in enumerate(ours)}
    if own and not (other and place.get(_key(before_other), -1) < place.get(_key(before), -1)):
        return _alone(own[-1], "target", own, "")._replace(behind=_key(before))
    return _alone(other[-1], "golden dump", other, "")._replace(behind=_key(before_other)) if other else None


def _first_run(keys: Sequence[str], results: Mapping[str, CallResult]) -> tuple[CallResult | None, list[CallResult]]:
    """Return the first forwards in a row that have no partner, and the last one before them that has."""
    before, run = None, list[CallResult]()
    for result in (results[key] for key in keys if key in results):
        if _is_lone(result):
            run.append(result)
        elif run:
            break
        elif _made(result).direction == FORWARD:
            before = result
    return before, run


def _key(result: CallResult | None) -> str:
    return result.target.key if result is not None and result.target is not None else ""


def _shows_first(comparison: Comparison, blamed: CallResult) -> CallResult | None:
    """Return the call whose inputs show a difference for which `blamed` is; None if it is to blame for its results."""
    if blamed.given_to:
        return next((one for one in comparison.calls if one.key == blamed.given_to), None)
    return blamed if blamed.origin.partition(".")[0] == INPUT else None


def _makers(results: Mapping[str, CallResult], differing: CallResult, *, of_target: bool) -> CallResult | None:
    """Return the call of one side alone that made what differs of what `differing` was given; None if none did."""
    changed = [row for row in differing.rows if row.result != PASS and row.target and row.target.state == INPUT]
    given = {value for row in changed if (item := _side(row, of_target=of_target)) and (value := value_of(item))}
    lone = [one for one in results.values() if given and _is_lone(one)]
    return _outermost([one for one in lone if any(_gives(row, given, of_target=of_target) for row in one.rows)])


def _gives(row: ResultRow, values: set[Value], *, of_target: bool) -> bool:
    item = _side(row, of_target=of_target)
    return item is not None and item.state == OUTPUT and value_of(item) in values


def _side(row: ResultRow, *, of_target: bool) -> DumpRow | None:
    return row.target if of_target else row.golden


def _before(keys: Sequence[str], results: Mapping[str, CallResult], at: str) -> list[CallResult]:
    """Return the calls without a partner that stand just before the call `at`, or the calls within it, in order."""
    position = stop = keys.index(at) if at in keys else 0
    while position and _is_within(results[keys[position - 1]], {_path(results[at])}):
        position = stop = position - 1  # what runs within a module stands before it
    while position and _is_lone(results.get(keys[position - 1])):
        position -= 1
    return [results[key] for key in keys[position:stop]]


def _run_of(last: CallResult, keys: Sequence[str], results: Mapping[str, CallResult]) -> list[CallResult]:
    """Return the calls without a partner that stand before one without any between them, and that one, in order."""
    before = takewhile(lambda key: _is_lone(results.get(key)), reversed(keys[: keys.index(last.key)]))
    return [*reversed([results[key] for key in before]), last]


def _alone(last: CallResult, side: str, run: Sequence[CallResult], onwards: str) -> LoneCalls:
    """Return of calls in a row that one side alone made the first module, or of functions the last, and how many."""
    if _path(last):
        return LoneCalls(_outermost(run) or last, f"is in the {side} alone", onwards)
    more = f", like the {len(run) - 1:,} calls before it" if len(run) > 2 else ""
    return LoneCalls(last, f"is in the {side} alone{more}", onwards)


def _is_lone(result: CallResult | None) -> bool:
    if result is None or (result.target is not None and result.golden is not None):
        return False
    return _made(result).direction == FORWARD


def _outermost(calls: Sequence[CallResult]) -> CallResult | None:
    """Return the first of calls that is in none of the others."""
    paths = {_path(one) for one in calls}
    return next((one for one in calls if not _is_within(one, paths)), None)


def _is_within(result: CallResult, paths: set[str]) -> bool:
    """Return whether a call runs in one of the modules `paths`."""
    above = _path(result).rpartition(".")[0] or ("" if _path(result) else _made(result).scope)
    while above:
        if above in paths:
            return True
        above = above.rpartition(".")[0]
    return False


def _path(result: CallResult) -> str:
    return _made(result).path


def _made(result: CallResult) -> DumpCall:
    call = result.target or result.golden
    assert call is not None
    return call
