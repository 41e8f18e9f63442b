"""What is different in a training file of MindFormers, which has a block `monitor_config`, or `monitor` from 2.0 on.

Only these blocks, and `tensorboard`, are read of it. Every key that cannot have an effect, or has another one, gives a
sentence for the log and for `run.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainermon.core.config.outputs import EVENT_FORMS
from trainermon.core.strict import require

BLOCK, SECOND_BLOCK = "monitor_config", "monitor"
METRICS: Mapping[str, tuple[str, str | None]] = {
    "local_norm_format": ("local_norm", "wg_distribution"),
    "device_local_norm_format": ("device_local_norm", "wg_distribution"),
    "local_loss_format": ("local_loss", None),
    "device_local_loss_format": ("device_local_loss", None),
    "optimizer_state_format": ("optimizer_state", "mv_distribution"),
    "weight_state_format": ("weight_state", "param_distribution"),
}
"""By key: the field of `mindformers` that says where the metric is written, and the quantity that it needs."""

STOPPING = ("check_for_global_norm", "global_norm_spike_threshold", "global_norm_spike_count_threshold")
WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(STOPPING, "alert rules find such steps (gradient-spike); whether to stop is for the script to say"),
    "global_norm_record_path": "alerts are in alerts.jsonl of the run",
}
_DEFAULT_PATH = "./dump"


def is_for_mindformers(raw: Mapping[str, Any]) -> bool:
    """Return whether a mapping is a training file of MindFormers."""
    second = raw.get(SECOND_BLOCK)
    return BLOCK in raw or (isinstance(second, Mapping) and not {"train_state", "moe_monitor"}.isdisjoint(second))


def translated(raw: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Translate a training file of MindFormers into a configuration for `MonitorConfig`.

    Returns:
        The keys and values, and a sentence for each key that has no effect or another one.

    Raises:
        ConfigError: A value has a form that MindFormers does not know.
    """
    notes: list[str] = []
    if BLOCK not in raw:
        return _from_second_version(raw[SECOND_BLOCK], notes), tuple(notes)
    block = raw[BLOCK] or {}
    require(isinstance(block, Mapping), BLOCK, block, "a mapping")
    given = {str(key): value for key, value in block.items() if value is not None}
    wanted: dict[str, Any] = {"output_dir": given.pop("dump_path", _DEFAULT_PATH), "wg_distribution": False}
    is_on = given.pop("monitor_on", False)
    require(isinstance(is_on, bool), f"{BLOCK}.monitor_on", is_on, "true or false")
    if not is_on:
        wanted["collect_times"] = 0
        notes.append(f"{BLOCK}.monitor_on is false, or not given: no tensors are collected")
    wanted["step_interval"] = given.pop("step_interval", 1)
    _add_targets(wanted, given)
    wanted["mindformers"] = _add_metrics(wanted, given, notes, has_events=bool(raw.get("tensorboard")))
    wanted["format"] = ["mindformers"]
    if given.pop("print_struct", False):
        wanted["print_struct"] = True
        notes.append(f"{BLOCK}.print_struct: the structure is written to the run directory, and the training goes on")
    notes.append("tensorboard.tensorboard_dir: event files are in the folder mindformers of the run directory")
    notes += [f"{BLOCK}.{key} has no effect: {WITHOUT_EFFECT.get(key, 'it is not known')}" for key in given]
    return wanted, tuple(notes)


def _add_targets(wanted: dict[str, Any], given: dict[str, Any]) -> None:
    targets = given.pop("target", [".*"])
    is_list = isinstance(targets, list | tuple) and all(isinstance(one, str) for one in targets)
    require(is_list, f"{BLOCK}.target", targets, "a list of regular expressions")
    is_inverted = given.pop("invert", False)
    require(isinstance(is_inverted, bool), f"{BLOCK}.invert", is_inverted, "true or false")
    wanted["exclude" if is_inverted else "targets"] = [
        f"~{target}" for target in targets if is_inverted or target != ".*"
    ]


def _add_metrics(
    wanted: dict[str, Any], given: dict[str, Any], notes: list[str], *, has_events: bool
) -> dict[str, Any]:
    """Take what is collected into `wanted`, and return where each metric is written."""
    found: dict[str, Any] = {}
    lacks_events = False
    for key, (field, quantity) in METRICS.items():
        forms = given.pop(key, [])
        forms = [forms] if isinstance(forms, str) else forms
        is_known = isinstance(forms, list | tuple) and all(form in EVENT_FORMS for form in forms)
        require(is_known, f"{BLOCK}.{key}", forms, "tensorboard, log, a list of them, or null")
        if forms and quantity is not None:
            wanted[quantity] = True
        if forms and not has_events:
            lacks_events |= "tensorboard" in forms
            forms = ["log"]
        found[field] = list(dict.fromkeys(forms))
    if lacks_events:
        notes.append("tensorboard is not configured: what was to go there is logged, as in MindFormers")
    baseline = given.pop("throughput_baseline", 0)
    is_number = isinstance(baseline, int | float) and not isinstance(baseline, bool) and baseline >= 0
    require(is_number, f"{BLOCK}.throughput_baseline", baseline, "a number above 0, or null")
    found["throughput_baseline"] = baseline
    return found


def _from_second_version(block: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the configuration of MindFormers 2.0's `monitor`, which writes to the log alone."""
    state = block.get("train_state") or {}
    require(isinstance(state, Mapping), f"{SECOND_BLOCK}.train_state", state, "a mapping")
    norms = {key: state.get(key) or () for key in ("local_norm", "device_norm")}
    wanted: dict[str, Any] = {"wg_distribution": any(norms.values()), "format": ["mindformers"]}
    wanted["monitor_mbs_grad"] = bool(norms["local_norm"])
    wanted["mindformers"] = {
        "local_norm": _log_if(norms["local_norm"]),
        "device_local_norm": _log_if(norms["device_norm"]),
        "local_loss": _log_if(state.get("local_loss")),
        "device_local_loss": _log_if(state.get("device_loss")),
    }
    parts = [_parts(f"{SECOND_BLOCK}.train_state.{key}", value) for key, value in norms.items() if value]
    if all(parts):
        wanted["targets"] = [f"*{part}*" for part in dict.fromkeys(sum(parts, ()))]
    if block.get("moe_monitor"):
        notes.append(f"{SECOND_BLOCK}.moe_monitor has no effect: the load of experts is always recorded")
    known = {"local_norm", "device_norm", "local_loss", "device_loss"}
    notes += [f"{SECOND_BLOCK}.train_state.{key} has no effect: it is not known" for key in state if key not in known]
    return wanted


def _log_if(asked: object) -> list[str]:
    return ["log"] if asked else []


def _parts(path: str, value: object) -> tuple[str, ...]:
    """Return the parts of names that choose parameters; none: all of them."""
    if value is True:
        return ()
    parts = (value,) if isinstance(value, str) else value
    is_known = isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts)
    require(is_known, path, value, "true, part of a name, or a list of such parts")
    return tuple(parts) if isinstance(parts, list | tuple) else ()
