"""Which parameters are frozen on one side only: then their gradients are missing, and nothing else differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from trainermon.analysis.compare.items import MODULE, PARAMETERS, DumpRow
from trainermon.analysis.compare.noise import takes_weight
from trainermon.analysis.compare.verdicts import CallResult, ResultRow
from trainermon.dump.files.records import FORWARD, PARAMETERS_GRAD

_TARGET, _GOLDEN, _MIXED = "in the target", "in the golden dump", "on one side"


def frozen_parameters(calls: Sequence[CallResult]) -> str:
    """Return which parameters take a gradient on one side only, and how many gradients are missing for it.

    As a sentence; "" if there are none. Costs one pass over the rows.
    """
    known = dict(_parameters(calls))
    sides = {name: row.target.requires_grad for name, row in known.items() if row.target and _is_frozen(row)}
    if not sides:
        return ""
    where = _MIXED if len(set(sides.values())) > 1 else _GOLDEN if any(sides.values()) else _TARGET
    what = _common(list(sides))
    within = [name for name in known if name[: len(what)] == what]
    number = len(sides)
    counted = f"{number:,} parameter{'s' if number > 1 else ''}"
    missing = _missing(calls)
    lost = f"{missing:,} gradient{'s' if missing != 1 else ''} missing"
    if what and len(within) == number:
        return f"{'.'.join(what)} is frozen {where}: {counted}, {lost}."
    of = f" of {'.'.join(what)}" if what else f", the first of them {'.'.join(next(iter(sides)))},"
    return f"{counted} of the {len(within):,}{of} {'are' if number > 1 else 'is'} frozen {where}: {lost}."


def differs_in_gradient_alone(row: ResultRow) -> bool:
    """Return whether all that differs of a row is that it requires a gradient on one side only."""
    ours, theirs = row.target, row.golden
    if ours is None or theirs is None or ours.requires_grad == theirs.requires_grad:
        return False
    return ours.is_tensor and theirs.is_tensor and ours.shape == theirs.shape and not row.difference.relative


def _is_frozen(row: ResultRow) -> bool:
    ours, theirs = row.target, row.golden
    return ours is not None and theirs is not None and ours.requires_grad != theirs.requires_grad


def _parameters(calls: Sequence[CallResult]) -> Iterator[tuple[tuple[str, ...], ResultRow]]:
    """Yield each parameter, as the parts of its name and its row; without modules, weights that functions take."""
    both = [call for call in calls if call.target and call.golden and call.target.direction == FORWARD]
    has_modules = any(_is_parameter(row.target) for call in both for row in call.rows)
    for call in both:
        assert call.target
        for row in call.rows:
            if row.target is None or row.golden is None or not (row.target.is_tensor and row.golden.is_tensor):
                continue
            name = row.target.place.partition(".")[2]
            if row.target.state == PARAMETERS:
                yield tuple(f"{call.target.path}.{name}".lstrip(".").split(".")), row
            elif not has_modules and takes_weight(call.target, row.target.place):
                yield (f"{call.key}.{row.target.place}",), row


def _is_parameter(item: DumpRow | None) -> bool:
    return item is not None and item.state == PARAMETERS


def _common(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return what all names begin with, whole parts; () if they have nothing in common."""
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    return tuple(parts[0] for parts in alike)


def _missing(calls: Sequence[CallResult]) -> int:
    """Return how many gradients only one side has: of parameters, or where none are dumped, of what functions took."""
    alone: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}
    has_own = False
    for call in calls:
        made = call.target or call.golden
        if made is None or made.direction == FORWARD:
            continue
        is_own = made.direction == PARAMETERS_GRAD
        has_own |= is_own
        if not is_own and made.family == MODULE:
            continue
        alone[is_own].update((call.key, place) for place in _lone(call.rows))
    return len(alone[has_own])


def _lone(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Yield the places of results that are tensors on one side alone."""
    for row in rows:
        sides = [item for item in (row.target, row.golden) if item is not None and item.is_tensor]
        if len(sides) == 1 and sides[0].state == "output":
            yield sides[0].place
