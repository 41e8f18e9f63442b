"""What is said of two dumps in which no call is to blame: that they agree, where they begin to differ, or why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from trainermon.analysis.compare.answer.arguments import given_literal
from trainermon.analysis.compare.answer.frozen import differs_in_gradient_alone, frozen_parameters
from trainermon.analysis.compare.causes.unseen_arguments import argument_of
from trainermon.analysis.compare.comparison import Comparison, Mode
from trainermon.analysis.compare.frameworks import dtype_name
from trainermon.analysis.compare.items import INPUT, MODULE, OUTPUT, PARAMETERS, DumpCall, DumpRow
from trainermon.analysis.compare.noise import is_coarse, overwrites, roundoff_of
from trainermon.analysis.compare.verdicts import (
    ERROR,
    NOT_COMPARED,
    PASS,
    UNMATCHED,
    WARNING,
    CallResult,
    is_lone_tensor,
)
from trainermon.dump.files.records import FORWARD

_NO_PARTNERS = "no call of the target is in the golden dump"
# Of two models, a small part has the same names by chance: of what has as many of the same kinds, the names differ.
_LONE_SHARE = 0.8
_SAME_KINDS = 0.5


def incomparable(comparison: Comparison) -> str:
    """Return why the two dumps do not belong together, as a sentence: one dump, or two models; "" if they do."""
    if comparison.target.resolve() == comparison.golden.resolve():
        return f"The target is the golden dump itself, {comparison.target}: nothing can differ."
    lone = sum(call.result == UNMATCHED for call in comparison.calls)
    if lone <= _LONE_SHARE * len(comparison.calls) or not any(call.result != UNMATCHED for call in comparison.calls):
        return ""
    ours, theirs = _kinds(call.target for call in comparison.calls), _kinds(call.golden for call in comparison.calls)
    if (ours & theirs).total() > _SAME_KINDS * max(ours.total(), theirs.total()):
        return ""
    return (
        f"These are different models: {lone:,} of {len(comparison.calls):,} calls are on one side only, and what they "
        "compute is not the same."
    )


def without_blame(comparison: Comparison) -> str:
    """Return the answer of a comparison in which no call is to blame, as a sentence."""
    counts = comparison.row_counts()
    if said := _other_shapes(comparison) or frozen_parameters(comparison.calls):
        return said
    differing = first_differing(comparison)
    if differing is not None:
        why = f"{_origin(comparison, differing)}{_behind(comparison, differing)}{_other_type(comparison)}"
        return f"No call is to blame: the dumps differ from {both_keys(differing)} on, {why}{_remark(comparison)}."
    untold = _not_compared(comparison)
    if not counts[PASS] and counts[NOT_COMPARED]:
        return f"Nothing could be compared{f': {untold}' if untold else ''}."
    if not counts[PASS]:
        why = f"no call was dumped in {comparison.empty}" if comparison.empty else _NO_PARTNERS
        return f"Nothing could be compared: {why}."
    lone = f", but {counts[UNMATCHED]:,} rows are on one side only{_lone_tensor(comparison)}"
    missing = lone if counts[UNMATCHED] else ""
    agreed = f"{_passed(comparison, counts[PASS])}{missing}{_signs(comparison)}{_remark(comparison)}."
    if untold:
        return f"{untold}; of the others, {agreed}"
    return f"The dumps agree{' as far as they go' if comparison.gaps or counts[NOT_COMPARED] else ''}: {agreed}"


def _passed(comparison: Comparison, number: int) -> str:
    """Return how far the rows that pass are apart: not at all, or by rounding."""
    if any(row.result == PASS and row.difference.relative for row in comparison.rows()):
        return f"{number:,} rows differ by no more than rounding"
    return f"{number:,} rows {'have equal statistics' if comparison.mode is Mode.STATISTICS else 'are equal'}"


def _lone_tensor(comparison: Comparison) -> str:
    """Return the first tensor that a call of both sides took or gave on one side alone, as it follows on a sentence."""
    for call in comparison.calls:
        for row in call.rows:
            if row.target and row.golden and row.result == UNMATCHED and is_lone_tensor(row.target, row.golden):
                side = "the target" if row.target.is_tensor else "the golden dump"
                return f", the first of a call of both sides {call.key}.{row.target.place}, a tensor in {side} alone"
    return ""


def _other_type(comparison: Comparison) -> str:
    """Return the first tensor that has another type, as it follows on a sentence; "" if all have one type."""
    for call in comparison.calls:
        for row in call.rows:
            types = [dtype_name(one.dtype) for one in row[:2] if one is not None and roundoff_of(one.dtype)]
            if len(types) > 1 and types[0] != types[1] and row.target:
                first = f"{call.key}.{row.target.place}"
                return f"; the first that has another type is {first} ({types[0]}, {types[1]} in the golden dump)"
    return ""


def _not_compared(comparison: Comparison) -> str:
    """Return how many rows were read and not compared, and why the first was not, as a clause; "" if none."""
    untold = [
        (f"{call.key}.{row.target.place}", row.messages[0].partition(": ")[2].removesuffix("."))
        for call in comparison.calls
        for row in call.rows
        if row.result == NOT_COMPARED and not row.difference.unread and row.target
    ]
    if not untold:
        return ""
    place, why = untold[0]
    number = "1 row was not compared," if len(untold) == 1 else f"{len(untold):,} rows were not compared, the first"
    return f"{number} {place}: {why}"


def first_differing(comparison: Comparison) -> CallResult | None:
    """Return the first call of which something differs by more than rounding; None if none does."""
    return next((call for call in comparison.calls if call.result in (ERROR, WARNING)), None)


def both_keys(call: CallResult) -> str:
    """Return the key of a call, and that in the golden dump if it is another: there the first may be another call's."""
    theirs = call.golden.key if call.golden is not None else call.key
    return call.key if theirs == call.key else f"{call.key} ({theirs} in the golden dump)"


class UnequalCall(NamedTuple):
    """The first call of which not all is equal.

    Attributes:
        call: The call.
        size: By how much, relative to the tensor's size.
        is_given: Whether that is what it was given.
        is_behind: Whether results before it are equal.
    """

    call: CallResult
    size: float
    is_given: bool
    is_behind: bool = True


def first_unequal(comparison: Comparison) -> UnequalCall | None:
    """Return the first call of which not all is equal, where that says something.

    Two runs of which hundreds of results are equal have no noise, so even less than rounding tells where one went
    another way. Before any result, two things tell: what was given, which no rounding of these runs made, and numbers
    of 8 bits, whose rounding hides much. Calls of one side alone are passed over. None if all is equal, or the first
    difference says nothing, or cannot be measured.
    """
    is_any_equal = False
    for call in comparison.calls:
        if call.result == UNMATCHED:
            continue
        found = _unequal(call)
        if found is not None and not is_any_equal:
            return found._replace(is_behind=False) if found.size < 1 and _tells(found) else None
        if found is not None:
            return _innermost(comparison, found) if found.size < 1 else None
        is_any_equal = is_any_equal or any(_is_result(row.target) for row in call.rows)
    return None


def _unequal(call: CallResult) -> UnequalCall | None:
    unequal = [
        row
        for row in call.rows
        if row.target and row.golden and row.difference.relative and not _is_chance(call, row.target)
    ]
    if not unequal:
        return None
    given = [row for row in unequal if row.target and row.target.state != OUTPUT]
    size = max(row.difference.relative or 0.0 for row in given or unequal)
    return UnequalCall(call, size, bool(given))


def _tells(found: UnequalCall) -> bool:
    """Return whether a difference with no equal result before it tells something: one in numbers of one type."""
    rows = [(row.target, row.golden) for row in found.call.rows if row.difference.relative]
    return any(
        ours is not None
        and theirs is not None
        and ours.dtype == theirs.dtype
        and not (ours.merged or theirs.merged)  # whose statistics are rounded once more
        and (ours.state == INPUT if found.is_given else is_coarse(ours))
        for ours, theirs in rows
    )


def _is_chance(call: CallResult, item: DumpRow) -> bool:
    return call.target is not None and overwrites(call.target, item.place)


def _innermost(comparison: Comparison, found: UnequalCall) -> UnequalCall:
    """Return the call within a module whose results are not equal either: backwards may stand before those within."""
    call = found.call.target
    if found.is_given or call is None or call.family != MODULE or call.direction == FORWARD:
        return found
    path = call.name.rpartition(".")[0]
    for result in comparison.calls:
        inner = result.target
        if inner is None or result.golden is None or inner.direction != call.direction or result is found.call:
            continue
        if inner.scope == path or inner.scope.startswith(f"{path}."):
            unequal = _unequal(result)
            if unequal is not None and not unequal.is_given:
                return unequal
    return found


def _is_result(item: DumpRow | None) -> bool:
    return item is not None and item.state == OUTPUT and item.num_elements > 1 and bool(roundoff_of(item.dtype))


def _signs(comparison: Comparison) -> str:
    """Return that statistics do not tell the signs of infinities, as it follows on a sentence; "" if there are none."""
    if comparison.mode is not Mode.STATISTICS:
        return ""
    targets = (row.target for call in comparison.calls for row in call.rows if row.result == PASS)
    number = sum(row is not None and row.is_tensor and bool(row.infs) for row in targets)
    return f"; in {number:,} of them Inf was counted on both sides, and its sign not looked at" if number else ""


def _remark(comparison: Comparison) -> str:
    """Return where the first difference is, however small, as it follows on a sentence; "" if that says nothing."""
    found = first_unequal(comparison)
    if found is None or (not found.is_behind and found.call is first_differing(comparison)):
        return ""
    what = "what was given to " if found.is_given else ""
    where = f"{what}{found.call.key} ({found.size:.2g}){_behind(comparison, found.call) if found.is_given else ''}"
    first = "nothing of floating point was made before it"
    if comparison.mode is Mode.STATISTICS:
        before = "those of everything before are" if found.is_behind else first
        return f"; the first whose statistics are not equal to the last digit is {where}, {before}"
    before = "everything before is" if found.is_behind else first
    return f"; the first that is not equal bit for bit is {where}, {before}"


def _behind(comparison: Comparison, call: CallResult) -> str:
    """Return which call of the target alone ran just before `call`, as it follows on its name; "" if none did."""
    at = comparison.calls.index(call)
    before = comparison.calls[at - 1] if at else None
    return f", behind {before.key} (target only)" if before is not None and before.golden is None else ""


def _other_shapes(comparison: Comparison) -> str:
    """Return, as a sentence, that the first call that both sides made was given other shapes; "" if it was not."""
    both = (call for call in comparison.calls if call.target and call.golden)
    first = next((call for call in both if any(row.target and row.target.is_tensor for row in call.rows)), None)
    for row in first.rows if first is not None else ():
        ours, theirs = row.target, row.golden
        if ours is None or theirs is None or ours.state != INPUT or not (ours.is_tensor and theirs.is_tensor):
            continue
        if ours.shape != theirs.shape and first is not None:
            shapes = f"{list(ours.shape or ())}, {list(theirs.shape or ())}"
            return f"The inputs have other shapes ({shapes}): not comparable from {first.key} on."
    return ""


def _kinds(calls: Iterator[DumpCall | None]) -> Counter[str]:
    """Return how many forwards there are of each function, and of each class of modules."""
    forwards = (call for call in calls if call is not None and call.direction == FORWARD)
    return Counter(call.name.rpartition(".")[2] for call in forwards)


def _origin(comparison: Comparison, call: CallResult) -> str:
    changed = [row for row in call.rows if row.result != PASS and row.target]
    if changed and all(map(differs_in_gradient_alone, changed)):
        places = ", ".join(row.target.place for row in changed if row.target)
        return f"where {places} requires a gradient on one side only"
    states = {row.target.state for row in changed if row.target}
    if PARAMETERS in states:
        return _other_parameters(call)
    if (argument := argument_of(call, is_first=True)) is not None:
        return f"which {given_literal(comparison, call, argument)}"
    place = next((f" ({row.target.place})" for row in changed if row.target and row.target.state != OUTPUT), "")
    if call.target and call.target.direction == FORWARD and OUTPUT not in states:
        return f"which was given other inputs{place}"
    return f"by what it was given{place}"


def _other_parameters(call: CallResult) -> str:
    for row in call.rows:
        ours, theirs = row.target, row.golden
        if ours is not None and theirs is not None and ours.state == PARAMETERS and ours.shape != theirs.shape:
            return (
                f"where {ours.place} has another shape, {list(ours.shape or ())} beside {list(theirs.shape or ())}: "
                "another model, or parts of one that ranks share otherwise (--target-split and --golden-split say how)"
            )
    return "which had other parameters"
