"""Parameters that differ before the step: what an earlier one left is said once, and not of each of them."""

from __future__ import annotations

import math

from trainermon.analysis.compare.answer.recomputation import BlamedPlace
from trainermon.analysis.compare.answer.settings import setting_of
from trainermon.analysis.compare.answer.structure import first_lone
from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.items import PARAMETERS, DumpCall, value_of
from trainermon.analysis.compare.noise import takes_weight
from trainermon.analysis.compare.verdicts import PASS, CallResult, ResultRow
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import FORWARD


def drift_of(comparison: Comparison) -> BlamedPlace | None:
    """Return the parameters that an earlier step left different as one cause, at the one that differs most.

    None unless more than half of them differ, if only by rounding, and two or more by more than rounding. Where that
    step was dumped, one is enough, and it says what made that. Costs a look at every row.
    """
    known = _parameters(comparison)
    changed = [(call, row) for call, row in known if row.result != PASS]
    unequal = sum(bool(row.difference.relative) and _is_one_type(row) for _, row in known)
    before = comparison.step_before
    is_general = len(changed) > 1 and 2 * max(len(changed), unequal) > len(known)
    if not changed or not (before or is_general):
        return None
    call, row = max(changed, key=lambda one: _size_of(one[1]))
    by = f" by {_size_of(row):.2g} of its size," if math.isfinite(_size_of(row)) else ""
    why = before.words if before is not None else "an earlier step did, or what was loaded"
    most = f"{len(changed):,} of {len(known):,} parameters differ before the step, this one most,"
    words = f"{most if len(changed) > 1 else 'the parameter differs'}{by} and no call of the step made that: {why}"
    return BlamedPlace(call, row.target.place if row.target else "", words)


def first_in_script(comparison: Comparison) -> BlamedPlace | None:
    """Return the first setting that differs or call that one side alone made, in a forward; None: there is neither.

    Where parameters differ before the step: it may have made that in an earlier step. Costs a look at every row.
    """
    places = {call.key: at for at, call in enumerate(comparison.calls)}
    lone = first_lone(comparison)
    last = len(places) if lone is None else places.get(lone.behind, -1) + 1
    for call in comparison.calls[:last]:
        if (setting := setting_of(comparison, call)) is not None:
            return BlamedPlace(call, setting.place, setting.words)
    return None if lone is None else BlamedPlace(lone.call, "", lone.words)


def _parameters(comparison: Comparison) -> list[tuple[CallResult, ResultRow]]:
    """Return each parameter's row and the first call that has it: what functions take, where no module is dumped."""
    found: dict[object, tuple[CallResult, ResultRow]] = {}
    of_functions: dict[object, tuple[CallResult, ResultRow]] = {}
    for call in comparison.calls:
        if call.target is None or call.golden is None or call.target.direction != FORWARD:
            continue
        for row in call.rows:
            if row.target is None or row.golden is None:
                continue
            if row.target.state == PARAMETERS:
                found.setdefault((split_key(call.key)[0], row.target.place), (call, row))
            elif takes_weight(call.target, row.target.place) and row.target.is_tensor:
                of_functions.setdefault(value_of(row.target) or (call.key, row.target.place), (call, row))
    return list((found or of_functions).values())


def _is_one_type(row: ResultRow) -> bool:
    return row.target is not None and row.golden is not None and row.target.dtype == row.golden.dtype


def is_weight(cause: BlamedPlace) -> bool:
    """Return whether a difference began with a parameter, or with a weight or trained operand that a function took."""
    call = cause.call.target
    if call is None or not any(row.place == cause.place and row.is_tensor for row in call.items):
        return False
    return _is_parameter(cause.place) or takes_weight(call, cause.place) or _is_trained(call, cause.place)


def _is_trained(call: DumpCall, place: str) -> bool:
    """Return whether a forward took a tensor at `place` that requires a gradient: one that no call made is a leaf."""
    return call.direction == FORWARD and any(row.place == place and row.requires_grad for row in call.items)


def _is_parameter(place: str) -> bool:
    return place.startswith(f"{PARAMETERS}.")


def _size_of(row: ResultRow) -> float:
    """Return how far a row that differs is apart; what cannot be measured is infinitely far."""
    size = row.difference.relative
    return math.inf if size is None or math.isnan(size) else size
