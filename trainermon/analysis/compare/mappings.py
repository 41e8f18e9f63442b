"""Mapping files as msprobe takes them: which names of the target stand for which of the golden dump.

Decides what a file may hold, and says what is wrong with one. YAML, or JSON, of these forms:

* API mapping: a list of `{ms_api, pt_api, ms_args, pt_args, ms_output, pt_output, ms_parameters, pt_parameters,
  ms_parameters_grad, pt_parameters_grad}`, functions and the places of their arguments and results;
* cell mapping: `{fc1.Dense: fc1.Linear}`, modules with their classes, or parts of such names;
* data mapping: `{Functional.dense.0.forward.input.0: Functional.linear.0.forward.input.0}`, rows;
* layer mapping: `{Class: {path below it: path in the golden dump}}`, `TopLayer` for the outermost;
* ours, of modules that do what others do: a list of `{target, golden, order}`, paths with `*`, one or several on either
  side; or `graph_notes.json`, as the page of a graph saves what was matched by hand there.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainermon.core.errors import ConfigError
from trainermon.core.private_files import replace_file
from trainermon.dashboards.graph_notes import HandMatch, notes_of

TOP_LAYER = "TopLayer"
MAX_BYTES = 1 << 20
"""Size of a mapping file: those of the largest models have some thousand lines."""

_OLD_TOP_LAYER = "Cell"
_MAX_PLACES = 1 << 16
_MAX_WILDCARDS = 4  # the time to fit a name grows with its length to the power of them
_SIDES = (("args", "input"), ("output", "output"), ("parameters", "parameters"), ("parameters_grad", ""))
_SPELLINGS = {"ms_outputs": "ms_output", "pt_outputs": "pt_output"}
_RULE_KEYS = {"ms_api", "pt_api", *(f"{side}_{word}" for side in ("ms", "pt") for word, _ in _SIDES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRule:
    """Which function of PyTorch corresponds to one of MindSpore, and how their arguments correspond.

    Attributes:
        ms_api: MindSpore's name of the function.
        pt_api: PyTorch's.
        places: PyTorch's place of an argument or result (`input.0`) by MindSpore's.
        listed: Sides (`input`, `output` …) of which only the places above have a counterpart; on the others place
            corresponds to place.
    """

    ms_api: str
    pt_api: str
    places: Mapping[str, str] = field(default_factory=dict)
    listed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRule:
    """Modules that do on one side, together where they are several, what one or several others do on the other side.

    Attributes:
        target: Paths of the target's modules; `*` stands for any text, the same in all.
        golden: Those of the golden dump.
        keeps_order: The elements of the joined tensors lie in the same order on both sides; if not, as where heads
            alternate, only their statistics are compared.
        by_hand: Somebody matched them on the page of a graph.
    """

    target: tuple[str, ...]
    golden: tuple[str, ...]
    keeps_order: bool = True
    by_hand: bool = False

    @property
    def is_single(self) -> bool:
        """Whether one module stands for one other, so that nothing is joined."""
        return len(self.target) == len(self.golden) == 1

    def __str__(self) -> str:
        """Return what is matched, as the notes of a comparison say it."""
        return f"{' + '.join(self.target)} = {' + '.join(self.golden)}{' (by hand)' if self.by_hand else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMappings:
    """Names of the target's dump, and what the same things are called in the golden dump.

    Attributes:
        api: Rules for functions, by MindSpore's name.
        cell: Modules with their classes, or parts of such names.
        data: Full names of rows.
        layer: By class of the target: pairs (path below it in the target, path in the golden dump), longest first.
        joins: Modules that are matched, or joined, before any other calls are.
        modules: Golden paths and classes of modules, by the target's paths, that nobody said: see `siblings.py`.
    """

    api: Mapping[str, ApiRule] = field(default_factory=dict)
    cell: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    joins: tuple[JoinRule, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether anything is called otherwise; modules that are joined have the golden names already.

        Nor does it count what nobody said.
        """
        return bool(self.api or self.cell or self.data or self.layer)


def read_mappings(
    *,
    api: Path | str | None = None,
    cell: Path | str | None = None,
    data: Path | str | None = None,
    layer: Path | str | None = None,
    match: Path | str | None = None,
) -> NameMappings:
    """Read the mapping files that the user gave, and return the names they relate; None: there is no such file.

    Raises:
        ConfigError: a file cannot be read, or is not of the form that its kind has; it names the file and the place.
    """
    return NameMappings(
        api=_read(api, "API mapping", _api),
        cell=_read(cell, "cell mapping", _names),
        data=_read(data, "data mapping", _names),
        layer=_read(layer, "layer mapping", _layers),
        joins=tuple(_read(match, "file of modules that match", _joins)),
    )


def matched_by_hand(mappings: NameMappings, matches: Iterable[HandMatch]) -> NameMappings:
    """Return `mappings` with what was matched by hand, as rules of these very paths, which count before the others."""
    return replace(mappings, joins=(*_by_hand(matches), *mappings.joins))


def write_matches(path: Path, matches: Iterable[HandMatch]) -> None:
    """Write what was matched by hand as a file for `--match`.

    Raises:
        OSError: It cannot be written.
    """
    import yaml

    rules = [{"target": _one_or_all(rule.target), "golden": _one_or_all(rule.golden)} for rule in _by_hand(matches)]
    replace_file(path, yaml.safe_dump(rules, sort_keys=False, allow_unicode=True).encode())


def _one_or_all(names: tuple[str, ...]) -> str | list[str]:
    return names[0] if len(names) == 1 else list(names)


def _by_hand(matches: Iterable[HandMatch]) -> Iterator[JoinRule]:
    for one in matches:
        target, golden = (tuple(module.rpartition(".")[0] for module in side) for side in one)
        yield JoinRule(target=target, golden=golden, by_hand=True)


def _read(path: Path | str | None, kind: str, parse: Any) -> Any:
    if path is None:
        return {}
    try:
        return parse(_load(Path(path)))
    except ConfigError as error:
        raise ConfigError(f"{path}, given as {kind}: {error}") from error


def _load(path: Path) -> Any:
    import yaml

    from trainermon.analysis.plain_yaml import load_plain

    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"is larger than {MAX_BYTES >> 20} MiB, expected a list of names")
        text = data.decode("utf-8")
        return json.loads(text) if path.suffix == ".json" else load_plain(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"is neither YAML nor JSON ({' '.join(str(error).split())})") from error


def _shown(value: object) -> str:
    """Return the beginning of what a file holds, however much it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to write a number of thousands of digits
        return "a number of more digits than can be shown"


def _names(value: Any) -> dict[str, str]:
    """Return a mapping of names to names; an empty file has none."""
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"found a {type(value).__name__} at the top, expected `name of the target: golden name`")
    for name, other in (value or {}).items():
        if not isinstance(name, str) or not isinstance(other, str) or not name:
            raise ConfigError(
                f"found {_shown(name)}: {_shown(other)}, expected a name of the target and one of the golden dump"
            )
    return dict(value or {})


def _joins(value: Any) -> list[JoinRule]:
    """Return the rules of a list of mappings, or of the notes on a graph."""
    if isinstance(value, dict) and "matches" in value:
        try:
            return list(_by_hand(notes_of(value).matches))
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if not isinstance(value, list):
        raise ConfigError(f"found a {type(value).__name__} at the top, expected a list of `target: …, golden: …`")
    return [_join_rule(number, rule) for number, rule in enumerate(value, 1)]


def _join_rule(number: int, rule: Any) -> JoinRule:
    if not isinstance(rule, Mapping) or not {"target", "golden"} <= set(rule) <= {"target", "golden", "order"}:
        raise ConfigError(f"rule {number} is {_shown(rule)}, expected target, golden, and perhaps order")
    sides = []
    for side in ("target", "golden"):
        names = [rule[side]] if isinstance(rule[side], str) else rule[side]
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(
                f"rule {number}: {side} is {_shown(rule[side])}, expected a module's path, or a list of them"
            )
        sides.append(tuple(names))
    wildcards = {name.count("*") for names in sides for name in names}
    if len(wildcards) > 1:
        raise ConfigError(
            f"rule {number}: its paths have {sorted(wildcards)} times `*`, expected the same number in all"
        )
    if max(wildcards) > _MAX_WILDCARDS:
        raise ConfigError(
            f"rule {number}: its paths have {max(wildcards)} times `*`, expected at most {_MAX_WILDCARDS}: write out "
            "parts of the names instead, or one rule for each"
        )
    order = rule.get("order", "same")
    if order not in ("same", "other"):
        raise ConfigError(f"rule {number}: order is {_shown(order)}, expected same or other")
    return JoinRule(target=sides[0], golden=sides[1], keeps_order=order == "same")


def _layers(value: Any) -> dict[str, tuple[tuple[str, str], ...]]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"found a {type(value).__name__} at the top, expected `class: {{path: golden path}}`")
    found = {}
    for name, paths in value.items():
        try:
            table = _names(paths)
        except ConfigError as error:
            raise ConfigError(f"below {_shown(name)}: {error}") from error
        # a golden path may be followed by its class in parentheses
        pairs = [(path, other.partition("(")[0].strip()) for path, other in table.items()]
        pairs.sort(key=lambda pair: -pair[0].count("."))
        if not isinstance(name, str):
            raise ConfigError(f"found the class {_shown(name)}, expected its name")
        found[TOP_LAYER if name == _OLD_TOP_LAYER else name] = tuple(pairs)
    return found


def _api(value: Any) -> dict[str, ApiRule]:
    if not isinstance(value, list | None):
        raise ConfigError(f"found a {type(value).__name__} at the top, expected a list of rules (`- ms_api: …`)")
    rules = {}
    for number, rule in enumerate(value or [], 1):
        try:
            parsed = _rule(rule)
        except ConfigError as error:
            raise ConfigError(f"rule {number}: {error}") from error
        rules[parsed.ms_api] = parsed
    return rules


def _rule(rule: Any) -> ApiRule:
    if not isinstance(rule, Mapping):
        raise ConfigError(f"found {_shown(rule)}, expected keys such as ms_api and pt_api")
    known: dict[Any, Any] = {_SPELLINGS.get(key, key): value for key, value in rule.items()}
    for key in known:
        if key not in _RULE_KEYS:
            raise ConfigError(f"found the key {_shown(key)}, expected one of {', '.join(sorted(_RULE_KEYS))}")
    for key in ("ms_api", "pt_api"):
        if not isinstance(known.get(key), str) or "." not in known[key]:
            raise ConfigError(
                f"{key} is {_shown(known.get(key))}, expected a family and a function, as in Functional.conv2d"
            )
    listed = tuple(state for word, state in _SIDES if f"ms_{word}" in known or f"pt_{word}" in known)
    return ApiRule(ms_api=known["ms_api"], pt_api=known["pt_api"], places=dict(_places(known)), listed=listed)


def _places(rule: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for word, state in _SIDES:
        ours, theirs = (_list(f"{side}_{word}", rule) for side in ("ms", "pt"))
        if len(ours) != len(theirs):
            raise ConfigError(
                f"{rule['ms_api']}: ms_{word} has {len(ours)} places and pt_{word} has {len(theirs)}; each needs the "
                "one that it stands for"
            )
        prefix = f"{state}." if state else ""
        yield from ((f"{prefix}{one}", f"{prefix}{other}") for one, other in zip(ours, theirs, strict=True))


def _list(key: str, rule: Mapping[str, Any]) -> list[Any]:
    value = rule.get(key)
    if not isinstance(value, list | None):
        raise ConfigError(f"{rule['ms_api']}: {key} is {_shown(value)}, expected a list of numbers or names")
    for place in value or []:
        if not isinstance(place, str) and not (type(place) is int and 0 <= place < _MAX_PLACES):
            raise ConfigError(f"{rule['ms_api']}: {key} has {_shown(place)}, expected a number or a name")
    return value or []
