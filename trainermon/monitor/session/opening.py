"""What `TrainerMon.set_monitor` does for a model of torch before anything is attached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from trainermon.core.config import MonitorConfig
from trainermon.core.errors import AttachError
from trainermon.core.log import make_log_visible
from trainermon.core.strict import shown
from trainermon.core.topology import find_coordinates, name_run
from trainermon.monitor.frameworks import detect
from trainermon.monitor.session.attached import AttachedTraining
from trainermon.monitor.session.checks import check_against_model, parameters_without_optimizer, without_lacking


def open_training(
    model: Sequence[Any], optimizer: Any, config: MonitorConfig, groups: Mapping[str, Any]
) -> tuple[AttachedTraining, list[str]]:
    """Return the monitor of a training, of which nothing is attached yet, and what there is to say of the model.

    Args:
        model: The virtual pipeline stages.
        optimizer: The optimizer.
        config: What is asked for.
        groups: Process groups by axis, or None; `tp`, `dp` and `pp`.

    Raises:
        AttachError, ConfigError, SpoolError: Something cannot be watched, or written, as asked.
    """
    modules = [chunk for chunk in model if isinstance(chunk, nn.Module)]
    if not modules or len(modules) != len(model):
        found = ", ".join(type(chunk).__name__ for chunk in model) or "an empty list"
        raise AttachError(f"model: found {found}, expected a torch.nn.Module or a list of them, or a mindspore.nn.Cell")
    _require_groups(groups)
    coordinates = find_coordinates(groups=groups)
    make_log_visible(quiet=coordinates.local_rank != 0)
    training = detect(modules, optimizer, coordinates, framework=config.framework)
    coordinates = training.coordinates or coordinates
    given = {purpose: group for purpose, group in groups.items() if group is not None}
    config, notes = without_lacking(config, training)
    config = check_against_model(config, training, coordinates)
    left_out = parameters_without_optimizer(training)
    run = name_run(coordinates, run_id=config.run_id, output_dir=config.output_dir)
    attached = AttachedTraining(run, coordinates, config, training, {**training.process_groups(), **given})
    return attached, [*notes, left_out] if left_out else notes


def _require_groups(groups: Mapping[str, Any]) -> None:
    for axis, group in groups.items():
        # torch hands a bare object() to ranks that are no members of a new group
        if group is not None and not hasattr(group, "size") and type(group) is not object:
            name = "process_group" if axis == "pp" else f"{axis}_group"
            raise AttachError(f"{name}: found {shown(group)}, expected a process group of torch.distributed, or None")
