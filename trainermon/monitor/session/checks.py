"""Whether a configuration can be met on the model at hand; asked before anything is attached."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from trainermon.core.config import MonitorConfig, is_waiting
from trainermon.core.config.schema import HISTOGRAM_KINDS
from trainermon.core.errors import ConfigError
from trainermon.core.values import Coordinates
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.names import advice, chosen
from trainermon.monitor.taps import compiled_regions, features, optimizer
from trainermon.monitor.taps.training import Training

_NAMED = 5  # parameters that a message lists
_FOREIGN = (
    "the watched optimizer steps {number} parameters that are in no watched module: nothing is known of them, nor "
    "whether their gradients are reduced; hand set_monitor a module that contains all"
)


def check_against_model(config: MonitorConfig, training: Training, coordinates: Coordinates) -> MonitorConfig:
    """Check that the model and optimizer have all that `config` asks for; return the configuration for this rank.

    It is `config`, or one that collects nothing: on a rank that is not chosen, and while a dynamic configuration waits
    to be started.

    Raises:
        ConfigError, AttachError: Something is asked for that this model or optimizer does not have.
    """
    if config.xy_distribution:
        modules = [
            m for m in training.modules if config.all_xy or chosen(m.name, config.targets, m.stage, config.exclude)
        ]
        compiled_regions.check(modules, training.roots, backward=not config.forward_only)
    for key in ("recording_l2_features", "print_struct", "stack_info"):
        if getattr(config, key) and _is_compiled(training):
            raise ConfigError(
                f"{key} is true but the model is compiled: hooks attached after torch.compile never fire; set {key} "
                "to false, or call set_monitor on the model that is not compiled and train that one"
            )
    for key, reason in _asked_in_vain(config, training).items():
        raise ConfigError(f"{key} is true but {reason}: set it to false")
    if config.monitor_mbs_grad:
        _check_micro_gradients(training)
    is_whole = coordinates.pp_size == 1 and coordinates.ep_size == 1  # else a name may be that of another rank's module
    features.check(training.modules, config, is_whole=is_whole)
    if is_whole:
        _check_targets(config, training)
    is_left_out = bool(config.module_ranks) and coordinates.rank not in config.module_ranks
    if is_left_out or is_waiting(config):
        return dataclasses.replace(config, collect_times=0)
    return config


def without_lacking(config: MonitorConfig, training: Training) -> tuple[MonitorConfig, list[str]]:
    """Return `config` without the quantities that the optimizer cannot give, and a line on them, if there are any.

    A training is not stopped for them: the same file often serves runs with other optimizers.
    """
    found = _asked_in_vain(config, training)
    if not found:
        return config, []
    reasons = "; ".join(f"{key} ({reason})" for key, reason in found.items())
    kinds = tuple(kind for kind in config.histograms.kinds if HISTOGRAM_KINDS[kind] not in found)
    without: dict[str, Any] = dict.fromkeys(found, False)
    without["histograms"] = dataclasses.replace(config.histograms, kinds=kinds)
    return dataclasses.replace(config, **without), [f"the optimizer cannot give {reasons}: left out"]


def parameters_without_optimizer(training: Training) -> str:
    """Return a warning on parameters that need a gradient but are in no group of the watched optimizer.

    Else on those in its groups that are in no watched model. Empty where there are none, or where the optimizer holds
    copies of its own, of which this cannot be told.
    """
    groups = getattr(training.optimizer, "param_groups", None) or []
    held = {id(parameter) for group in groups for parameter in group.get("params", ())}
    missing = [parameter.name for parameter in training.parameters if id(parameter.tensor) not in held]
    if len(missing) == len(training.parameters):
        return ""
    own = {id(parameter) for root in training.roots for parameter in root.parameters()}
    foreign = len(held - own)
    if not missing:
        return _FOREIGN.format(number=foreign) if foreign else ""
    stale = f" (it holds {foreign} others: was it made before a module was replaced, or sharded?)" if foreign else ""
    named = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
    return (
        f"{len(missing)} of {len(training.parameters)} parameters that require a gradient are in no group of the "
        f"watched optimizer{stale}, which will never change them: {named}; add them to it, or set requires_grad to "
        "False (it is no fault if an optimizer of their own steps them)"
    )


def _asked_in_vain(config: MonitorConfig, training: Training) -> dict[str, str]:
    return {key: reason for key, reason in optimizer.lacking(training).items() if getattr(config, key)}


def _check_micro_gradients(training: Training) -> None:
    """Watch the gradients of single backwards for a moment: a framework that cannot show them says so now."""
    for handle in training.watch_micro_gradients(FaultGuard(lambda _message: None), lambda _index, _gradient: None):
        handle.remove()


def _check_targets(config: MonitorConfig, training: Training) -> None:
    stages = [(p.name, p.stage) for p in training.parameters] + [(m.name, m.stage) for m in training.modules]
    names = [name for name, _ in stages]
    lists = {"targets": config.targets, "exclude": config.exclude, "histograms.targets": config.histograms.targets}
    for key, target in [(key, one) for key, targets in lists.items() for one in targets]:
        if not any(chosen(name, [target], stage) for name, stage in stages):
            raise ConfigError(f"{key}: {target!r} names no module or parameter of the model; {advice(target, names)}")


def _is_compiled(training: Training) -> bool:
    return any(
        isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None
        for root in training.roots
        for module in root.modules()
    )
