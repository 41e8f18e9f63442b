"""Strict reading of plain JSON-like values into frozen dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from trainermon.core.errors import ConfigError

T = TypeVar("T")

# Evaluating the annotations of a class anew costs a millisecond, and files have thousands of parts of one class.
_HINTS: dict[type[Any], dict[str, Any]] = {}
SHOWN_CHARACTERS = 200
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = SHOWN_CHARACTERS


def build(cls: type[T], raw: Mapping[str, Any], prefix: str = "", *, finite: bool = True) -> T:
    """Build the dataclass `cls` from a parsed configuration `raw`; unknown keys and wrong types are errors.

    `prefix` is the path of keys that leads to `raw`, for messages. Fields may be bool, int, float, str, enums by their
    values, tuples of one type, literals, an optional one of these, or another dataclass. An int is a float too; a bool
    is no int. Unless numbers must be `finite`, those that are not may also be written as `as_plain` does ('NaN').

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type; the message has the path of the key.
    """
    hints = _HINTS.get(cls) or _HINTS.setdefault(cls, typing.get_type_hints(cls))
    for key in raw:
        if key not in hints:
            name = str(key)[:SHOWN_CHARACTERS]
            near = difflib.get_close_matches(name, hints, n=1)
            advice = f"did you mean {prefix + near[0]!r}?" if near else f"known keys: {', '.join(sorted(hints))}"
            raise ConfigError(f"{prefix}{name}: unknown key; {advice}")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # T is always a dataclass
        if field.name not in raw and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{field.name}: missing; it has no default")
    return cls(**{key: _convert(hints[key], value, prefix + str(key), finite) for key, value in raw.items()})


def _convert(wanted: Any, value: Any, path: str, finite: bool) -> Any:  # noqa: FBT001
    if dataclasses.is_dataclass(wanted):
        require(isinstance(value, Mapping), path, value, "a mapping")
        return build(typing.cast("type[Any]", wanted), value, f"{path}.", finite=finite)
    origin = typing.get_origin(wanted)
    if origin is tuple:
        require(isinstance(value, list | tuple), path, value, "a list")
        item = typing.get_args(wanted)[0]
        return tuple(_convert(item, entry, f"{path}[{index}]", finite) for index, entry in enumerate(value))
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _convert(typing.get_args(wanted)[0], value, path, finite)
    if origin is typing.Literal or issubclass(wanted, enum.Enum):
        values = typing.get_args(wanted) or [member.value for member in wanted]
        require(value in values, path, value, " or ".join(map(repr, values)))
        return value if origin else wanted(value)
    if wanted is float and not finite:
        value = _NONFINITE.get(value, value) if isinstance(value, str) else value
    if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
        require(math.isfinite(value) or not finite, path, value, "a finite number")
        return float(value)
    exact = isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
    require(
        exact,
        path,
        value,
        {"int": "a whole number", "str": "text", "bool": "true or false"}.get(wanted.__name__, "a number"),
    )
    return value


def shown(found: object) -> str:
    """Return a short text of `found` for an error message: a few hundred characters at most, whatever its size."""
    try:
        return _SHORT.repr(found)[: 2 * SHOWN_CHARACTERS]
    except ValueError:  # a number of more digits than Python writes out
        return "an int that Python does not write out"


def require(condition: object, path: str, found: object, expected: str) -> None:
    """Raise a ConfigError unless `condition` holds.

    The message names `path`, the key; `found`, the value; and what was `expected`, in words.
    """
    if not condition:
        raise ConfigError(f"{path}: found {shown(found)}, expected {expected}")
