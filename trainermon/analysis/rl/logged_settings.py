"""Settings as training frameworks print them into their logs, and in which of them two runs differ.

Read are: what Megatron and slime print (`name ..... value`), nested dictionaries (verl), `Namespace(name=value, …)`
(OpenRLHF), overrides of Hydra (`name.name=value`), options of a command line (`--name value`), JSON and YAML files.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trainermon.core.errors import DumpError

MAX_BYTES = 64 << 20
MAX_PRINTED = 256 << 10
"""Characters of one printed dictionary or namespace."""
MAX_ATTEMPTS = 50
_SPECIAL = re.compile(r"\\.|[{}()'\"]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(
    r"^(?:\([^)]*pid=[^)]*\)\s*|\[[^\]]*\]:?\s*|\d{4}-\d\d-\d\d[ T][\d:,.]+\s*(?:-\s*)?(?:INFO|DEBUG)?[:\s-]*)+"
)
_DOTTED = re.compile(r"^\s*([A-Za-z_][\w.-]*) ?\.{3,} ?(.*?)\s*$")
_OVERRIDE = re.compile(r"(?<![\w=+~-])\+{0,2}([a-z_]\w*(?:\.\w+)+)=(\S+)")
_OPTION = re.compile(r"(?<!\S)--([A-Za-z][\w-]*)(?:[ =](?!--)(\S+))?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDifference:
    """A setting in which two runs differ.

    Attributes:
        name: Its name, levels joined by dots.
        first: Its value in the first run; None: it is not there.
        second: In the second.
        why: Why it matters to rollouts; empty: it may not.
    """

    name: str
    first: str | None
    second: str | None
    why: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SettingsComparison:
    """Two runs' settings.

    Attributes:
        equal: How many settings are equal.
        differing: Those that differ, the ones that matter to rollouts first.
        traps: What is questionable in one run by itself, in words.
    """

    equal: int
    differing: tuple[LoggedDifference, ...]
    traps: tuple[str, ...]


# Words of a setting's name, and why it matters when rollout and trainer are compared.
_MATTERS = (
    (("temperature",), "the trainer must divide logits by the same temperature"),
    (("top_p", "top_k", "min_p"), "cuts the support of what is sampled; the trainer's distribution has all of it"),
    (("logprobs_mode", "calculate_log_probs"), "which log-probabilities the engine logs"),
    (("dropout",), "the trainer's log-probabilities change at random"),
    (("remove_padding", "rmpad", "packing"), "other kernels and positions"),
    (("micro_batch", "dynamic_bsz", "max_token_len", "chunk"), "moves log-probabilities by rounding"),
    (("prefix_caching", "prefix_cache", "radix_cache"), "a cache that outlives an update is stale"),
    (("dtype", "precision", "quantization", "fp8"), "what rounding gives"),
    (("free_cache_engine", "sleep"), "weights and caches must be sent anew after sleeping"),
    (("lr", "learning_rate"), "how far policies move between syncs"),
    (("seed",), "other samples"),
)


def read_settings(path: Path) -> dict[str, str]:
    """Return the settings in a log, or in a JSON or YAML file, by name, as text; the last word on each counts.

    Raises:
        DumpError: The file cannot be read, or no settings are in it.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror}") from error
    found = _of_file(path, text) if path.suffix in (".json", ".yaml", ".yml") else _of_log(text)
    if not found:
        raise DumpError(
            f"{path}: found no settings; expected what Megatron, slime, verl or OpenRLHF print at the start"
        )
    return found


def compare_settings(first: Mapping[str, str], second: Mapping[str, str]) -> SettingsComparison:
    """Return in which settings two runs differ, and what is questionable in either."""
    names = [*first, *(name for name in second if name not in first)]
    differing = [
        LoggedDifference(name=name, first=first.get(name), second=second.get(name), why=_why(name))
        for name in names
        if _plain(first.get(name)) != _plain(second.get(name))
    ]
    return SettingsComparison(
        equal=len(names) - len(differing),
        differing=tuple(sorted(differing, key=lambda each: not each.why)),
        traps=tuple(
            f"{run} run: {trap}" for run, found in (("first", first), ("second", second)) for trap in traps(found)
        ),
    )


def traps(settings: Mapping[str, str]) -> Iterator[str]:
    """Yield what in the settings of one run makes rollout and trainer differ."""
    for name, value in settings.items():
        number = _number(value)
        last = name.rsplit(".", 1)[-1]
        is_validation = "val" in name.lower().replace("value", "")
        if number is None or is_validation:
            continue
        if last.endswith("top_p") and number < 1:
            yield f"{name} = {value}: what is sampled has no tail, and the trainer's distribution has one"
        if last.endswith("top_k") and number > 0:
            yield f"{name} = {value}: what is sampled has no tail, and the trainer's distribution has one"
        if "dropout" in last and number > 0:
            yield f"{name} = {value}: the trainer's log-probabilities change at random"
        if last.endswith("temperature") and number not in (1.0, 0.0):
            yield f"{name} = {value}: the trainer must divide its logits by it, and the engine log processed ones"


def _of_file(path: Path, text: str) -> dict[str, str]:
    try:
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise DumpError(f"{path}: expected {path.suffix[1:]}; {error}") from error
    return dict(_flat(value)) if isinstance(value, dict) else {}


def _of_log(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    clean = "\n".join(_PREFIX.sub("", line) for line in _COLOUR.sub("", text).splitlines())
    for reader in _READERS:
        found.update(reader(clean))
    return found


def _dotted(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        match = _DOTTED.match(line)
        if match:
            yield match[1], match[2]


def _dictionaries(text: str) -> Iterator[tuple[str, str]]:
    """Yield the entries of dictionaries that begin a line, as pprint writes them."""
    for match in itertools.islice(re.finditer(r"^\{\s*['\"]", text, flags=re.MULTILINE), MAX_ATTEMPTS):
        value = _literal(text, match.start(), "{", "}")
        if isinstance(value, dict):
            yield from _flat(value)


def _namespaces(text: str) -> Iterator[tuple[str, str]]:
    for match in itertools.islice(re.finditer(r"\bNamespace\(", text), MAX_ATTEMPTS):
        inside = _balanced(text, match.end() - 1, "(", ")")
        try:
            call = ast.parse(f"f{inside}", mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if isinstance(call, ast.Call):
            yield from ((each.arg, ast.unparse(each.value)) for each in call.keywords if each.arg)


def _overrides(text: str) -> Iterator[tuple[str, str]]:
    yield from ((match[1], match[2].strip("'\"\\")) for match in _OVERRIDE.finditer(text))


def _options(text: str) -> Iterator[tuple[str, str]]:
    yield from ((match[1].replace("-", "_"), match[2] or "True") for match in _OPTION.finditer(text))


_READERS: tuple[Callable[[str], Iterator[tuple[str, str]]], ...] = (
    _options,
    _overrides,
    _dotted,
    _namespaces,
    _dictionaries,
)


def _literal(text: str, begin: int, opening: str, closing: str) -> Any:
    inside = _balanced(text, begin, opening, closing)
    try:
        return ast.literal_eval(inside)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _balanced(text: str, begin: int, opening: str, closing: str) -> str:
    """Return what stands between brackets that begin at `begin`, with them; "" if they are not closed soon."""
    depth, quote = 0, ""
    for match in _SPECIAL.finditer(text, begin, begin + MAX_PRINTED):
        letter = match[0]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == opening:
            depth += 1
        elif letter == closing:
            depth -= 1
            if not depth:
                return text[begin : match.end()]
    return ""


def _flat(value: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, each in value.items():
        if isinstance(each, dict) and each:
            yield from _flat(each, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(each)


def _plain(value: str | None) -> object:
    """Return a value so that `1`, `1.0` and `'1'` are equal, and `True` and `true`."""
    if value is None:
        return None
    bare = value.strip("'\"")
    number = _number(bare)
    return bare.lower() if number is None else number


def _number(value: str) -> float | None:
    try:
        return float(value.strip("'\""))
    except ValueError:
        return None


def _why(name: str) -> str:
    last = name.lower().replace("-", "_")
    for words, why in _MATTERS:
        if any(word == last.rsplit(".", 1)[-1] or (len(word) > 4 and word in last) for word in words):
            return why
    return ""
