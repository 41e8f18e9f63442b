"""What `TrainerMon.set_monitor` does for a model of MindSpore before anything is attached, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mindspore import nn

from trainermon.core.config import MonitorConfig, is_waiting
from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.log import make_log_visible
from trainermon.core.topology import name_run
from trainermon.core.values import Coordinates
from trainermon.hooks.names import advice, chosen
from trainermon.monitor.mindspore.attached import AttachedCell
from trainermon.monitor.mindspore.place import find_coordinates
from trainermon.monitor.mindspore.training import CellTraining
from trainermon.monitor.mindspore.updates import check_formula

_NAMED = 5  # parameters that a message lists
# What the session of torch has and this one has not, by the key that asks for it.
_UNAVAILABLE = ("recording_l2_features",)


def open_training(
    model: Sequence[Any], optimizer: Any, config: MonitorConfig, groups: Mapping[str, Any]
) -> tuple[AttachedCell, list[str]]:
    """Return the monitor of a training, of which nothing is attached yet, and what there is to say of the model.

    Args:
        model: The model, or its virtual pipeline stages.
        optimizer: The optimizer that is called with the gradients.
        config: What is asked for.
        groups: Names of communication groups by axis, or None; `tp`, `dp` and `pp`.

    Raises:
        AttachError, ConfigError, SpoolError: Something cannot be watched, or written, as asked.
    """
    cells = [cell for cell in model if isinstance(cell, nn.Cell)]
    if len(cells) != len(model):
        found = ", ".join(type(cell).__name__ for cell in model)
        raise AttachError(f"model: found {found}, expected a mindspore.nn.Cell or a list of them")
    coordinates = find_coordinates(groups)
    make_log_visible(quiet=coordinates.local_rank != 0)
    training = CellTraining(cells, optimizer)
    config = check_against_model(config, training, coordinates)
    run = name_run(coordinates, run_id=config.run_id, output_dir=config.output_dir, has_store=False)
    return AttachedCell(run, coordinates, config, training), _notes(training)


def check_against_model(config: MonitorConfig, training: CellTraining, coordinates: Coordinates) -> MonitorConfig:
    """Check that this model and this session have all that `config` asks for; return the configuration of this rank.

    It is `config`, or one that collects nothing: on a rank that is not chosen, and while a dynamic configuration waits.

    Raises:
        ConfigError: Something is asked for that is not there.
    """
    for key in _UNAVAILABLE:
        if getattr(config, key):
            raise ConfigError(f"{key} is true, but it is not available for MindSpore: set it to false")
    if config.cc_distribution.enable:
        raise ConfigError("cc_distribution.enable is true, but collectives of MindSpore are not seen: set it to false")
    if config.histograms.kinds:
        raise ConfigError("histograms.kinds is set, but histograms are not available for MindSpore: leave it out")
    if config.framework not in (None, training.framework):
        raise ConfigError(f"framework: found {config.framework!r}, expected 'mindspore' or nothing for this model")
    if config.mv_distribution and not training.states():
        name = type(training.optimizer).__name__
        raise ConfigError(f"mv_distribution is true but {name} keeps no state for its parameters: set it to false")
    if config.ur_distribution:
        check_formula(training.optimizer)
    if config.mg_direction and not training.first_moments():
        name = type(training.optimizer).__name__
        raise ConfigError(f"mg_direction is true but {name} keeps no first moment or momentum: set it to false")
    if coordinates.pp_size == 1:
        _check_targets(config, training)
    is_left_out = bool(config.module_ranks) and coordinates.rank not in config.module_ranks
    return dataclasses.replace(config, collect_times=0) if is_left_out or is_waiting(config) else config


def _check_targets(config: MonitorConfig, training: CellTraining) -> None:
    stages = [(p.name, p.stage) for p in training.parameters] + [(m.name, m.stage) for m in training.modules]
    for target in config.targets:
        if not any(chosen(name, [target], stage) for name, stage in stages):
            names = [name for name, _ in stages]
            raise ConfigError(f"targets: {target!r} names no cell or parameter of the model; {advice(target, names)}")


def _notes(training: CellTraining) -> list[str]:
    held = {id(parameter.tensor) for parameter in training.parameters}
    missing = [p.name for root in training.roots for p in root.trainable_params() if id(p) not in held]
    if not missing:
        return []
    named = ", ".join(missing[:_NAMED]) + (" …" if len(missing) > _NAMED else "")
    return [
        f"{len(missing)} parameters that require a gradient are not among those of the watched optimizer, which will "
        f"never change them: {named}"
    ]
