"""What is different in a configuration that was written for msprobe's monitor.

Such a mapping is told by `targets` that map names to selectors, or by `ops` (first version), or by `monitors` (second
version). It means the same here as there: what it does not name has msprobe's default. Every key that cannot have an
effect, or has another one, gives a sentence for the log and for `run.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainermon.core.config.schema import OPS
from trainermon.core.errors import ConfigError
from trainermon.core.strict import require, shown

WITHOUT_EFFECT: Mapping[str, str] = {
    "eps": "`zeros` is the share of elements that are exactly zero",
    "mg_distribution": "msprobe checks this key and reads mg_direction",
    "opt_ty": "the kind of the optimizer is found out",
}
"""Keys of msprobe that are accepted and change nothing, and why."""

WHOLE_NUMBERS = ("start_step", "step_interval", "collect_times", "ndigits", "step_count_per_record")
OF_FILES = ("ops", "ndigits", "step_count_per_record", "append_output")
_QUANTITIES = (
    "mg_direction",
    "monitor_mbs_grad",
    "mv_distribution",
    "param_distribution",
    "recording_l2_features",
    "ur_distribution",
    "xy_distribution",
)
PYTORCH = ("pytorch", "pt", "torch")
V2_WITHOUT_EFFECT: Mapping[str, str] = {
    "async_write": "files are always written by another process",
    "patch_optimizer_step": "a step always ends with the optimizer's",
}
V2_WITHOUT_EFFECT_IN_MONITORS: Mapping[str, str] = {
    "eps": WITHOUT_EFFECT["eps"],
    "micro_batch_number": "set_monitor is told the number of micro steps",
    "module_ranks": "`rank` says which ranks collect",
}
V2_WINDOW = (("start_step", 0), ("step_interval", 1), ("stop_step", None))
V2_DEFAULT_OPS = ("min", "max", "mean", "norm", "nans")


def translated(raw: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Translate a configuration with msprobe's names and forms of values into one for `MonitorConfig`.

    Returns:
        The keys and values, and a sentence for each key that has no effect or another one.

    Raises:
        ConfigError: A value has a form that neither msprobe nor this monitor knows.
    """
    notes: list[str] = []
    wanted = {key: value for key, value in raw.items() if value is not None}
    if "monitors" in wanted:
        wanted = _from_second_version(wanted, notes)
    elif "ops" in wanted or isinstance(wanted.get("targets"), Mapping):
        _take_defaults(wanted, notes)
    _drop(WITHOUT_EFFECT, wanted, notes)
    for key in WHOLE_NUMBERS:
        wanted[key] = _whole(wanted[key]) if key in wanted else None
    _translate_forms(wanted, notes)
    _settle_pairs(wanted, notes)
    return {key: value for key, value in wanted.items() if value is not None}, tuple(notes)


def _drop(keys: Mapping[str, str], wanted: dict[str, Any], notes: list[str]) -> None:
    given = [key for key in keys if wanted.pop(key, None) is not None]
    notes += [f"{key} has no effect: {keys[key]}" for key in given]


def _take_defaults(wanted: dict[str, Any], notes: list[str]) -> None:
    """Take msprobe's defaults; a configuration that asks for nothing else is not left without gradients."""
    collectives = wanted.get("cc_distribution")
    asks_for_more = any(map(wanted.get, _QUANTITIES)) or isinstance(wanted.get("targets"), Mapping)
    asks_for_more |= isinstance(collectives, Mapping) and bool(collectives.get("enable"))
    for key, value in (("format", "csv"), ("wg_distribution", False)):
        if key not in wanted and (asks_for_more or key == "format"):
            wanted[key] = value
            notes.append(f"{key} is not given: {str(value).lower()}, as in msprobe, which this configuration is for")


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _translate_forms(wanted: dict[str, Any], notes: list[str]) -> None:
    if isinstance(wanted.get("targets"), Mapping):
        wanted["targets"] = list(_target_names(wanted["targets"], notes))
    cuts = wanted.pop("squash_name", False)
    require(isinstance(cuts, bool), "squash_name", cuts, "true or false")
    if cuts:
        wanted["targets"] = [_anywhere(name) for name in wanted.get("targets", ())]
        notes.append("squash_name: names are not cut off; targets are looked for anywhere in a name instead")
    if isinstance(wanted.get("format"), str):
        wanted["format"] = [wanted["format"].strip().lower()]
    if isinstance(wanted.get("sa_order"), str):
        wanted["sa_order"] = wanted["sa_order"].replace(" ", "")
    if isinstance(wanted.get("ops"), list | tuple):
        wanted["ops"] = _known_ops(wanted["ops"], notes)
    if isinstance(wanted.get("alert"), Mapping):
        wanted["alert"] = _translated_alert(wanted["alert"], notes)


def _target_names(targets: Mapping[str, Any], notes: list[str]) -> Iterator[str]:
    selected = [str(name) for name, selectors in targets.items() if selectors]
    if selected:
        notes.append(
            f"targets: the selectors of {', '.join(selected)} have no effect: all tensors of a module are taken"
        )
    if "" not in targets:
        yield from targets


def _anywhere(name: Any) -> Any:
    """Return a pattern that finds a name of which msprobe has cut off the beginning."""
    if not isinstance(name, str):
        return name
    stage, colon, rest = name.rpartition(":")
    return f"{stage}{colon}*{rest}*"


def _known_ops(ops: list[Any] | tuple[Any, ...], notes: list[str]) -> list[Any]:
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        notes.append(f"ops: {', '.join(map(repr, unknown))} has no effect; known are {', '.join(OPS)}")
    return [op for op in ops if op in OPS] or ["norm"]


def _translated_alert(alert: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    rules = alert.get("rules") or []
    require(isinstance(rules, list | tuple), "alert.rules", rules, "a list")
    kept = []
    for index, rule in enumerate(rules):
        require(isinstance(rule, Mapping), f"alert.rules[{index}]", rule, "a mapping")
        given = {key: value for key, value in rule.items() if value is not None}
        needs_threshold = given.get("rule_name") == "AnomalyTurbulence" and "args" not in given
        if "rule_name" not in given or needs_threshold:
            notes.append(f"alert.rules[{index}] has no effect: {'args' if needs_threshold else 'rule_name'} is missing")
        else:
            kept.append(given)
    dump = alert.get("dump") or False
    if dump and not kept:
        notes.append("alert.dump has no effect: there are no rules")
    return {**alert, "rules": kept, "dump": dump}


def _settle_pairs(wanted: dict[str, Any], notes: list[str]) -> None:
    """Take back what another key leaves without effect."""
    if wanted.get("forward_only") is True and wanted.get("backward_only") is True:
        wanted["forward_only"] = wanted["backward_only"] = False
        notes.append("forward_only and backward_only are both true, which leaves nothing: neither has an effect")
    for key in ("all_xy", "forward_only", "backward_only"):
        _needs(wanted, notes, key, "xy_distribution")
    if "wg_distribution" in wanted:
        _needs(wanted, notes, "monitor_mbs_grad", "wg_distribution")
    if wanted.get("l2_targets"):
        _needs(wanted, notes, "l2_targets", "recording_l2_features")
    if not wanted.get("format"):
        without = [key for key in OF_FILES if wanted.get(key)]
        notes += [f"{key} has no effect: format names no form that is written beside the store" for key in without]


def _needs(wanted: dict[str, Any], notes: list[str], key: str, other: str) -> None:
    if wanted.get(key) and wanted[key] is not False and wanted.get(other, False) is False:
        del wanted[key]
        notes.append(f"{key} has no effect: {other} is false")


def _from_second_version(raw: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return a configuration of msprobe's second monitor in the keys of the first one."""
    framework = str(raw.get("framework", PYTORCH[0])).strip().lower()
    if framework not in PYTORCH:
        raise ConfigError(f"framework: found {shown(framework)}, expected one of {', '.join(PYTORCH)}")
    require(isinstance(raw["monitors"], Mapping), "monitors", raw["monitors"], "a mapping")
    monitors = {name: keys for name, keys in raw["monitors"].items() if _is_enabled(name, keys)}
    wanted = {key: value for key, value in raw.items() if key not in ("framework", "monitors", "rank", "stop_step")}
    if "rank" in raw:
        wanted["module_ranks"] = [raw["rank"]] if isinstance(raw["rank"], int) else raw["rank"]
    if "stop_step" in raw:
        wanted["collect_times"] = _times_until(raw)
    wanted.setdefault("format", "csv")
    wanted["ops"] = _all_ops(monitors)
    wanted["wg_distribution"] = False
    notes.append(
        "monitors: a configuration of msprobe's second monitor; csv files have the first one's names and columns"
    )
    for name, keys in monitors.items():
        _add_monitor(wanted, name, dict(keys), notes)
    if "targets" in wanted and len(monitors) > 1:
        del wanted["targets"]
        notes.append("monitors.module.targets has no effect: it would leave out parameters; all modules are collected")
    _drop(V2_WITHOUT_EFFECT, wanted, notes)
    return wanted


def _is_enabled(name: str, keys: Any) -> bool:
    require(isinstance(keys, Mapping), f"monitors.{name}", keys, "a mapping")
    return bool(keys.get("enabled", name == "module"))


def _all_ops(monitors: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Return the statistics of all monitors, each once; a row has the same columns whatever it is of."""
    found: list[Any] = []
    for name, keys in monitors.items():
        ops = keys.get("ops") or V2_DEFAULT_OPS
        require(isinstance(ops, str | list | tuple), f"monitors.{name}.ops", ops, "a list")
        found += [op for op in ([ops] if isinstance(ops, str) else ops) if op not in found]
    return found


def _times_until(raw: Mapping[str, Any]) -> Any:
    """Return how many steps are collected before `stop_step`."""
    first, interval, stop = (_whole(raw.get(key, default)) for key, default in V2_WINDOW)
    if not all(isinstance(number, int) for number in (first, interval, stop)) or interval < 1:
        return raw.get("collect_times")  # what is wrong with the others is said where they are read
    times = max(0, math.ceil((stop - first) / interval))
    limit = raw.get("collect_times")
    return min(times, _whole(limit)) if isinstance(limit, int | float) else times


def _add_monitor(wanted: dict[str, Any], name: str, keys: dict[str, Any], notes: list[str]) -> None:
    keys = {key: value for key, value in keys.items() if key not in ("enabled", "ops") and value is not None}
    if name == "module":
        wanted["xy_distribution"] = True
        parts = keys.pop("targets", [])
        require(isinstance(parts, list | tuple), "monitors.module.targets", parts, "a list")
        if parts:
            wanted["targets"] = [f"*{part}*" for part in parts]
    elif name == "weight_grad":
        wanted["wg_distribution"] = True
        wanted["monitor_mbs_grad"] = bool(keys.pop("monitor_mbs_grad", False))
    elif name == "optimizer":
        wanted["mv_distribution"] = bool(keys.pop("mv_distribution", True))
    elif name == "param":
        wanted["param_distribution"] = bool(keys.pop("param_distribution", True))
    elif name == "cc":
        of_calls = ("cc_codeline", "cc_log_only", "cc_pre_hook")
        wanted["cc_distribution"] = {"enable": True, **{key: keys.pop(key) for key in of_calls if key in keys}}
    else:
        notes.append(f"monitors.{name} has no effect: known are module, weight_grad, optimizer, param, cc")
        return
    reasons = {key: V2_WITHOUT_EFFECT_IN_MONITORS.get(key, "it is not known") for key in keys}
    notes += [f"monitors.{name}.{key} has no effect: {reason}" for key, reason in reasons.items()]
