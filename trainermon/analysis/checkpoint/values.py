"""What a checkpoint holds beside tensors: steps, learning rates, arguments, states of generators.

Arguments and configurations are paired by name or known alias, and compared as what they mean (`1e-4` is `0.0001`), by
the rules of `trainermon env compare`; all else by its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from trainermon.analysis.checkpoint.formats.inert import InertObject
from trainermon.analysis.checkpoint.pieces import StoredArray
from trainermon.analysis.checkpoint.verdicts import ValueDifference
from trainermon.core.errors import CheckpointError

_MAX_DEPTH = 8
_MAX_VALUES = 100_000
_MAX_TEXT = 200
_MAX_ELEMENTS = 1 << 20  # of an array that is compared: states of generators have 5,056 bytes
_SETTINGS = ("args.", "config.", "hyper_parameters.")


def value_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[ValueDifference]:
    """Yield the values that differ: first those that both have, the gravest first; then those of one side alone."""
    sides = [plain_values(side) for side in (ours, theirs)]
    settings = [{key: side.pop(key) for key in list(side) if key.startswith(_SETTINGS)} for side in sides]
    found = list(_by_place(*sides))
    if settings[0] or settings[1]:
        named = [{_without_prefix(key): (key, value) for key, value in side.items()} for side in settings]
        found += _by_meaning(*named)
    yield from sorted(found, key=lambda value: (value.is_alone, _GRAVITY.index(value.level)))


_GRAVITY = ("error", "warning", "info")


def _by_place(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[ValueDifference]:
    for key in [*first, *(key for key in second if key not in first)]:
        one, other = first.get(key, _NOTHING), second.get(key, _NOTHING)
        if not _are_equal(one, other):
            yield ValueDifference(key, _text(one), _text(other))


def _by_meaning(
    first: Mapping[str, tuple[str, Any]], second: Mapping[str, tuple[str, Any]]
) -> Iterator[ValueDifference]:
    if first.keys() == second.keys() and all(_are_equal(first[key][1], second[key][1]) for key in first):
        return  # as mostly: the rules need not be loaded
    from trainermon.analysis.environment.differences import DifferenceLevel
    from trainermon.analysis.environment.rules import LevelRules
    from trainermon.analysis.environment.settings import compare_hyperparameters

    plain = [{key: value for key, (_, value) in side.items()} for side in (first, second)]
    for row in compare_hyperparameters(plain[0], plain[1], LevelRules()):
        if row.level is DifferenceLevel.SAME:
            continue
        texts = [
            (*side[name][:1], _text(side[name][1])) if name is not None else (None, None)
            for side, name in zip((first, second), row.names, strict=True)
        ]
        key = texts[0][0] or texts[1][0] or ""
        yield ValueDifference(key, texts[0][1], texts[1][1], row.level.value, texts[1][0] if texts[0][0] else None)


def _without_prefix(key: str) -> str:
    return next((key.removeprefix(prefix) for prefix in _SETTINGS if key.startswith(prefix)), key)


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by their places, as `args.lr`; at most 100 000 of them."""
    found: dict[str, Any] = {}
    for key, value in _walk("", values, 0):
        found[key] = value
        if len(found) >= _MAX_VALUES:
            break
    return found


class _Nothing(Enum):
    NOTHING = ""


_NOTHING = _Nothing.NOTHING


def _walk(key: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    state = getattr(value, "state", None)
    inside = value if isinstance(value, Mapping | list | tuple) else state if isinstance(state, Mapping) else None
    if inside is None or depth >= _MAX_DEPTH:
        yield key, _said(value) if isinstance(value, InertObject) else value
        return
    items = inside.items() if isinstance(inside, Mapping) else enumerate(inside)
    for name, item in items:
        yield from _walk(f"{key}.{name}" if key else str(name), item, depth + 1)


def _said(value: InertObject) -> str:
    """Return an object of an unknown class as text: its name and arguments, as an enumeration has them."""
    arguments = [_said(part) if isinstance(part, InertObject) else repr(part)[:40] for part in value.arguments[:4]]
    return f"{value.name}({', '.join(arguments)})"


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same; 1 and 1.0 are, and so are NaN and NaN, and arrays of the same bits."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    if isinstance(one, StoredArray) and isinstance(other, StoredArray):
        return _bits(one) == _bits(other)
    try:
        return bool(one == other)
    except (ValueError, TypeError):  # arrays
        return repr(one) == repr(other)


def _bits(stored: StoredArray) -> tuple[Any, ...]:
    """Return what tells arrays apart: dtype, shape and elements; of large or damaged ones the place instead."""
    if stored.num_elements > _MAX_ELEMENTS:
        return stored.dtype, stored.shape, stored.path, stored.offset
    try:
        return stored.dtype, stored.shape, stored.array().tobytes()
    except CheckpointError:
        return stored.dtype, stored.shape, stored.path, stored.offset


def _text(value: Any) -> str | None:
    if value is _NOTHING:
        return None
    if isinstance(value, StoredArray):
        return f"{value.dtype}{list(value.shape)}"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
