"""A YAML file that is taken apart key by key, so that every mistake is reported with its place and the right name.

What the keys mean is decided in `rules`; here only: how YAML is read, and what an error says. YAML 1.1 has three traps
that would make a rule mean something else than it says: `on` and `no` are booleans, `1e-5` is text, and of two equal
keys the last one wins silently. The loader here reads the first two as people mean them and refuses the third.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trainermon.core import documents
from trainermon.core.errors import ConfigError, RuleError

T = TypeVar("T")

MOST = 10**9
"""No whole number of a rule is larger, unless its key says a smaller one."""

MAX_READINGS = 32
"""So often a rule is read for all of its mistakes."""

_SHOWN = 60  # characters of a value in a message

_BOOLEAN = re.compile(r"^(?:true|True|false|False)$")
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf)$|^\.(?:nan|NaN)$")
_REPLACED = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")


class _RuleLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the booleans and floats of YAML 1.2 and without repeated keys."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - as PyYAML calls it
        """Return the value of a node; one like the date 2024-13-45 is an error with its place, as all others are."""
        try:
            return super().construct_object(node, deep=deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = node.tag.rpartition(":")[2]
            what = f"found {describe(node.value)}, which is no {kind} that can be read"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from error


_RuleLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# The integer resolver stands first in its lists, so a number without point or exponent stays an integer.
_RuleLoader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOLEAN, list("tTfF"))
_RuleLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _construct_mapping(loader: _RuleLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool):
            continue  # construct_mapping reports it
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {describe(key)} appears twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_RuleLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def read_document(path: Path) -> Any:
    """Return the content of a YAML file as plain values.

    Raises:
        RuleError: the file cannot be read, is not UTF-8, or is not YAML; the message names the file and the line.
    """
    try:
        return documents.read_document(path, is_yaml=True, loader=_RuleLoader)
    except ConfigError as error:
        raise RuleError(f"{path}: {error}") from error


class DocumentNode:
    """Reads typed values from one mapping of a YAML file of rules; its errors name the file, the rule and the key.

    Args:
        value: The mapping; anything else is an error.
        known: The keys that are allowed in it.
        where: The file and the rule, as an error message begins.
        path: The keys that lead to the mapping, joined by dots; empty at the top of a rule.
    """

    def __init__(self, value: Any, known: Sequence[str], *, where: str, path: str = "") -> None:
        self.where = where
        self.path = path
        if not isinstance(value, Mapping):
            raise self.error(path, f"found {describe(value)}, expected a mapping with the keys {', '.join(known)}")
        for key in value:
            if key not in known:
                name = key[:_SHOWN] if isinstance(key, str) else describe(key)
                raise self.fail(name, f"unknown key{nearest(name, known)}")
        self._value: Mapping[str, Any] = value

    def __contains__(self, key: str) -> bool:
        return key in self._value

    def error(self, path: str, message: str) -> RuleError:
        """Return (not raise) the error that says `message` about the value at `path`."""
        error = RuleError(": ".join(part for part in (self.where, path, message) if part))
        error.where, error.path = self.where, path
        return error

    def fail(self, key: str, message: str) -> RuleError:
        """Return (not raise) the error that says `message` about the value of `key`."""
        return self.error(self._at(key), message)

    def child(self, key: str, known: Sequence[str]) -> DocumentNode:
        """Return the mapping under `key`, in which the keys `known` are allowed, as a node.

        Raises RuleError if it is none, as all these methods do for a wrong value.
        """
        return DocumentNode(self.raw(key), known, where=self.where, path=self._at(key))

    def raw(self, key: str) -> Any:
        """Return the value under `key`, unchecked."""
        return self._value_or(key, None)

    def plain(self, key: str) -> Mapping[str, Any]:
        """Return the mapping under `key`, unchecked; empty where there is only `true`."""
        value = self.raw(key)
        if value is True:
            return {}
        if not isinstance(value, Mapping):
            raise self.fail(key, f"found {describe(value)}, expected true or a mapping")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return the text under `key`, which must not be empty.

        `default` if the key is missing (None: it is required).
        """
        value = self._value_or(key, default)
        if not isinstance(value, str) or not value.strip():
            raise self.fail(key, f"found {describe(value)}, expected text")
        if any("\ud800" <= character <= "\udfff" for character in value):  # no log or page could hold it
            raise self.fail(key, f"found {describe(value)}, expected text without half characters")
        return value

    def choice(self, key: str, known: Sequence[str], default: str | None = None) -> str:
        """Return the text under `key`, which must be one of `known`.

        `default` if it is missing (None: it is required).
        """
        value = self.text(key, default)
        if value not in known:
            raise self.fail(key, f"found {describe(value)}{nearest(value[:_SHOWN], known)}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return the boolean under `key`; `default` if it is missing."""
        value = self._value_or(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"found {describe(value)}, expected true or false")
        return value

    def whole(self, key: str, default: int | None = None, *, at_least: int = 0, at_most: int = MOST) -> int:
        """Return the whole number under `key`, from `at_least` to `at_most`.

        `default` if it is missing (None: required).
        """
        value = self._value_or(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise self.fail(key, f"found {describe(value)}, expected a whole number, at least {at_least}")
        if value > at_most:
            raise self.fail(key, f"found {describe(value)}, expected at most {at_most}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = -math.inf) -> float:
        """Return the finite number under `key`, greater than `above`.

        `default` if it is missing (None: it is required).
        """
        value = self._value_or(key, default)
        number = _number(value)
        if not math.isfinite(number) or number <= above:
            limit = f", above {above:g}" if math.isfinite(above) else ""
            raise self.fail(key, f"found {describe(value)}, expected a finite number{limit}")
        return number

    def texts(self, key: str, default: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return the list of texts under `key`; a single one may stand without the list around it.

        `default` if the key is missing (None: it is required).
        """
        value = self._value_or(key, default)
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
            raise self.fail(key, f"found {describe(value)}, expected text or a list of texts")
        return tuple(items)

    def only(self, known: Sequence[str]) -> str:
        """Return which of the keys `known` is given; exactly one must be."""
        given = [key for key in known if key in self]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise self.error(self.path, f"found {found}, expected exactly one of {', '.join(known)}")
        return given[0]

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _value_or(self, key: str, default: Any) -> Any:
        if key in self._value:
            return self._value[key]
        if default is None:
            raise self.fail(key, "is missing")
        return default


def every_mistake(
    read: Callable[[Any], object],
    entry: Mapping[str, Any],
    sound: Mapping[str, Any],
    unsure: Mapping[str, Collection[str]],
) -> list[RuleError]:
    """Return all mistakes that `read` meets in a mapping: after each it reads again without the key that is wrong.

    A mistake at a key that holds one before, as a mapping that lacks it now, only follows from that; then the whole
    key of the mapping is replaced by one of `sound`, after which nothing is said of what `unsure` has for it.
    """
    found: list[RuleError] = []
    met: list[str] = []
    replaced: set[str] = set()
    left = copy.deepcopy(dict(entry))
    for _ in range(MAX_READINGS):
        try:
            read(left)
            break
        except RuleError as error:
            top = error.path.partition(".")[0]
            if not any(f"{path}.".startswith(f"{error.path}.") for path in met):
                met.append(error.path)
                found += [] if any(error.path in unsure.get(key, ()) for key in replaced) else [error]
                _remove(left, error.path.split("."))
            elif top in sound and top not in replaced:
                replaced.add(top)
                left[top] = copy.deepcopy(sound[top])
            else:
                break
    return found


def _remove(tree: dict[str, Any], path: Sequence[str]) -> None:
    inner: Any = tree
    for key in path[:-1]:
        inner = inner.get(key) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.pop(path[-1], None)


def nearest(found: str, known: Sequence[str]) -> str:
    """Return the end of an error message: the known name that was probably meant, and the whole list."""
    known = [str(name) for name in known]
    close = difflib.get_close_matches(found, known, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    return f"{meant} Known: {', '.join(known)}"


def describe(value: Any) -> str:
    """Return a value of a rule file as short text for an error message: `a list`, `nothing`, or the value itself."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and value.bit_length() > MOST.bit_length() * 4:  # Python may refuse to write it out
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def _number(value: Any) -> float:
    """Return a number as a float; NaN for what is none, infinite for one that is too large."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def items(value: Any, path: str) -> Iterator[Any]:
    """Yield the entries of the list at `path` of a rule file; RuleError if it is empty or no list."""
    if not isinstance(value, list) or not value:
        found = describe(value) if value != [] else "an empty list"
        raise RuleError(f"{path}: found {found}, expected a list that is not empty")
    yield from value
