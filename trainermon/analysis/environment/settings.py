"""Compares sections whose settings are plain values: each by its whole name, each value as what it means."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from trainermon.analysis.environment.differences import DifferenceLevel, SettingDifference
from trainermon.analysis.environment.rules import LevelRules
from trainermon.core.environment.packages import normal_name, same_version
from trainermon.core.environment.variables import DEFAULTS, PAIRS

PURE_NAME, MAPPING = "pure name", "mapping"  # msprobe's words
ALIASES = (
    ("learning_rate", "lr", "learningrate"),
    ("batch_size", "batch", "bs", "batch_size_per_gpu"),
    ("micro_batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu", "mbs"),
    ("global_batch_size", "train_batch_size", "gbs"),
    ("epochs", "num_epochs", "max_epochs", "epoch", "num_train_epochs"),
    ("weight_decay", "wd", "weightdecay"),
    ("dropout_rate", "dropout", "drop_rate"),
    ("hidden_dropout", "hidden_dropout_prob"),
    ("attention_dropout", "attention_probs_dropout_prob"),
    ("adam_beta1", "beta1"),
    ("adam_beta2", "beta2"),
    ("adam_eps", "adam_epsilon", "eps"),
    ("clip_grad", "max_grad_norm", "gradient_clipping"),
    ("gradient_accumulation_steps", "grad_acc_steps"),
    ("train_iters", "max_steps", "num_steps", "total_steps"),
    ("tensor_model_parallel_size", "tp", "tp_size", "tensor_parallel_size"),
    ("pipeline_model_parallel_size", "pp", "pp_size", "pipeline_parallel_size"),
    ("context_parallel_size", "cp", "cp_size"),
    ("expert_model_parallel_size", "ep", "ep_size"),
    ("num_layers", "num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("hidden_size", "n_embd", "d_model"),
    ("ffn_hidden_size", "intermediate_size"),
    ("seq_length", "max_seq_len", "sequence_length"),
    ("num_query_groups", "num_key_value_heads"),
)
PRECISIONS = (("bf16", "bfloat16"), ("fp16", "float16", "half"), ("fp32", "float32"))
"""Flags of which a training has one."""
_CANONICAL = {alias: group[0] for group in ALIASES for alias in group}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NEAR = 0.8


def compare_values(
    section: str, one: Mapping[str, Any], other: Mapping[str, Any], rules: LevelRules
) -> Iterator[SettingDifference]:
    """Yield a row for each name of either side; a name on one side only is a difference too."""
    for name in sorted({*one, *other}):
        names = (name if name in one else None, name if name in other else None)
        values = (one.get(name), other.get(name))
        is_same = None not in names and same_value(*values)
        level = DifferenceLevel.SAME if is_same else rules.level(section, name)
        yield SettingDifference(
            section=section, names=names, values=values, level=level, reason="" if is_same else _one_sided(names)
        )


def compare_code(one: Mapping[str, Any], other: Mapping[str, Any], rules: LevelRules) -> Iterator[SettingDifference]:
    """Yield a row for each hash and fact of the code, which says what it is that differs."""
    for row in compare_values("code", one, other, rules):
        both_differ = row.level is not DifferenceLevel.SAME and None not in row.names
        yield dataclasses.replace(row, reason=_what_differs(row.name)) if both_differ else row


def _what_differs(name: str) -> str:
    kind, _, rest = name.partition(".")
    if kind == "model":
        module, _, qualified = rest.rpartition(".")
        return f"class {qualified} of {module} has other code"
    if kind == "file":
        return f"{rest} has other content"
    return {"git.commit": "another commit", "git.diff_sha256": "other changes since the commit"}.get(name, "")


def compare_variables(
    one: Mapping[str, Any], other: Mapping[str, Any], rules: LevelRules
) -> Iterator[SettingDifference]:
    """Yield a row for each variable; those of Ascend are paired with what other accelerators call them."""
    paired: set[str] = set()
    for ascend, usual in PAIRS.items():
        if (ascend in one and usual in other and usual not in one) or (
            ascend in other and usual in one and usual not in other
        ):
            names = (ascend, usual) if ascend in one else (usual, ascend)
            values = (one.get(names[0]), other.get(names[1]))
            is_same = same_value(*values)
            level = DifferenceLevel.SAME if is_same else rules.level("variables", usual)
            paired.update(names)
            yield SettingDifference(section="variables", names=names, values=values, level=level, matched_with=MAPPING)
    left, right = ({name: value for name, value in side.items() if name not in paired} for side in (one, other))
    for row in compare_values("variables", left, right, rules):
        missing = None in row.names
        default = DEFAULTS.get(row.name)
        given = row.values[0] if row.names[1] is None else row.values[1]
        if missing and default is not None and same_value(given, default):
            yield SettingDifference(
                section="variables",
                names=row.names,
                values=row.values,
                level=DifferenceLevel.SAME,
                reason="the default",
            )
        else:
            yield row


def compare_packages(
    one: Mapping[str, Any], other: Mapping[str, Any], rules: LevelRules
) -> Iterator[SettingDifference]:
    """Yield a row for each package: by version, then by source, then by the hash of its files."""
    sides = [{normal_name(name): value for name, value in side.items()} for side in (one, other)]
    for name in sorted({*sides[0], *sides[1]}):
        found = [_package(side.get(name)) for side in sides]
        names = (name if found[0] else None, name if found[1] else None)
        reason = _one_sided(names) or _package_difference(found[0], found[1])
        level = rules.level("packages", name) if reason else DifferenceLevel.SAME
        values = tuple(_shown(package, reason) for package in found)
        yield SettingDifference(
            section="packages", names=names, values=(values[0], values[1]), level=level, reason=reason
        )


def _package(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"version": str(value)} if value is not None else {}


def _shown(package: Mapping[str, Any], reason: str) -> str | None:
    if not package:
        return None
    source = package.get("source") if reason and package.get("source") else ""
    return f"{package.get('version', '')}{f' from {source}' if source else ''}"


def _package_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if not same_version(str(one.get("version", "")), str(other.get("version", ""))):
        return "another version"
    sources = [package.get("source", "") for package in (one, other)]
    if sources[0] != sources[1] and all("source" in package for package in (one, other)):
        return "installed from elsewhere"
    records = [package.get("record", "") for package in (one, other)]
    if all(records) and records[0] != records[1]:
        return "same version, other files"
    return ""


def compare_hyperparameters(
    one: Mapping[str, Any], other: Mapping[str, Any], rules: LevelRules
) -> Iterator[SettingDifference]:
    """Yield a row for each hyperparameter: paired by the whole name, then by a known alias; near names are hints."""
    one, other = _with_plain_flags(one, other), _with_plain_flags(other, one)
    pairs, left, right = _paired(one, other)
    for first, second, how in pairs:
        values = (one[first], other[second])
        is_same = same_value(*values) and _precision(first) == _precision(second)
        level = DifferenceLevel.SAME if is_same else rules.level("hyperparameters", plain_name(first))
        yield SettingDifference(
            section="hyperparameters", names=(first, second), values=values, level=level, matched_with=how
        )
    for side, names in enumerate((left, right)):
        others = (right, left)[side]
        for name in names:
            value = (one, other)[side][name]
            usual = None if _is_flag(name, value) else DifferenceLevel.WARNING  # what is not given is off
            near = difflib.get_close_matches(name, others, n=1, cutoff=_NEAR)
            reason = _one_sided((name, None) if side == 0 else (None, name))
            yield SettingDifference(
                section="hyperparameters",
                names=(name, None) if side == 0 else (None, name),
                values=(value, None) if side == 0 else (None, value),
                level=rules.level("hyperparameters", plain_name(name), usual),
                reason=f"{reason}; there is {near[0]} there" if near else reason,
            )


def _paired(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[list[tuple[str, str, str]], list[str], list[str]]:
    """Return names that are paired, with how, and those that only one side has."""
    pairs: list[tuple[str, str, str]] = []
    left, right = list(one), list(other)
    of_precision = [partial(_precision_or_name, values=side) for side in (one, other)]
    for how, key in (
        (PURE_NAME, (str, str)),
        (PURE_NAME, (plain_name, plain_name)),
        (MAPPING, (canonical_name, canonical_name)),
        (MAPPING, of_precision),
    ):
        keys = [_unique(names, form) for names, form in zip((left, right), key, strict=True)]
        for name in sorted(keys[0].keys() & keys[1].keys()):
            pairs.append((keys[0][name], keys[1][name], how))
            left.remove(keys[0][name])
            right.remove(keys[1][name])
    return pairs, sorted(left), sorted(right)


def _unique(names: list[str], key: Any) -> dict[str, str]:
    """Return names by key; a key that stands for two names is left out, since either could be meant."""
    found: dict[str, str] = {}
    twice = set()
    for name in names:
        if key(name) in found:
            twice.add(key(name))
        found[key(name)] = name
    return {form: name for form, name in found.items() if form not in twice}


def _with_plain_flags(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with `no-x` as `x`, the other way round, where the other side has `x`."""
    theirs = {plain_name(name): name for name in other}
    found: dict[str, Any] = {}
    for name, value in one.items():
        above, dot, last = name.rpartition(".")
        positive = theirs.get(plain_name(f"{above}{dot}{last[3:]}")) if plain_name(last).startswith("no_") else None
        flag = _as_bool(value)
        if positive is None or flag is None or positive in one:
            found[name] = value
        else:
            found[positive] = not flag
    return found


def _is_flag(name: str, value: Any) -> bool:
    """Return whether this is an option without a value, as a command line has them."""
    return value is True and "." not in name


def _precision(name: str) -> str:
    """Return the precision that a flag asks for; "" if it asks for none.

    >>> _precision("bf16"), _precision("half"), _precision("lr")
    ('bf16', 'fp16', '')
    """
    return next((group[0] for group in PRECISIONS if plain_name(name) in group), "")


def _precision_or_name(name: str, values: Mapping[str, Any]) -> str:
    """Return one key for all flags of precision: a training has one of them."""
    return "precision" if _precision(name) and _is_flag(name, values[name]) else name


def plain_name(name: str) -> str:
    """Return a name as it is compared: `Adam-Beta2` is `adam_beta2`.

    >>> plain_name("optim.Learning-Rate")
    'optim.learning_rate'
    """
    return name.replace("-", "_").lower()


def canonical_name(name: str) -> str:
    """Return a name with its last part by the first of its aliases; what stands before it is kept.

    >>> canonical_name("optim.lr"), canonical_name("other.lr")
    ('optim.learning_rate', 'other.learning_rate')
    """
    above, dot, last = plain_name(name).rpartition(".")
    return f"{above}{dot}{_CANONICAL.get(last, last)}"


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values mean the same: numbers as numbers, `true`, `True`, 1 and a given flag.

    >>> same_value("1e-4", 0.0001), same_value("True", True), same_value("1", "true"), same_value("02", "2")
    (True, True, False, True)
    """
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, bool) or isinstance(other, bool):
        return _as_bool(one) is not None and _as_bool(one) == _as_bool(other)
    if one is None or other is None:
        return all(value is None or str(value).lower() in ("none", "null") for value in (one, other))
    numbers = [as_number(value) for value in (one, other)]
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1] or (math.isnan(numbers[0]) and math.isnan(numbers[1]))
    words = [str(value).strip().lower() for value in (one, other)]
    return str(one) == str(other) or (words[0] == words[1] and words[0] in (*_TRUE, *_FALSE, "none", "null"))


def _as_bool(value: Any) -> bool | None:
    word = str(value).strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def as_number(value: Any) -> float | None:
    """Return the number that a value is, however it is written; None if it is none.

    >>> as_number("1e-4"), as_number("fp16")
    (0.0001, None)
    """
    if isinstance(value, str) and "_" in value:
        return None
    try:
        is_whole = isinstance(value, int) or (isinstance(value, str) and value.strip().lstrip("+-").isdigit())
        return int(value) if is_whole else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _one_sided(names: tuple[str | None, str | None]) -> str:
    return "only the first has it" if names[1] is None else "only the second has it" if names[0] is None else ""
