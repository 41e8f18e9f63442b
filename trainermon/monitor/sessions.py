"""Which session watches a model: it depends on the classes of the model, never on which packages are installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainermon.core.config import MonitorConfig

if TYPE_CHECKING:
    from trainermon.monitor.session.attached_rank import AttachedRank


def is_of_mindspore(value: object) -> bool:
    """Return whether a value is a Cell or a tensor of MindSpore, without loading it."""
    return any(base.__module__.startswith("mindspore.") for base in type(value).__mro__)


def open_session(
    model: Sequence[Any], optimizer: Any, config: MonitorConfig, groups: Mapping[str, Any]
) -> tuple[AttachedRank, list[str]]:
    """Return the monitor of a training, of which nothing is attached yet, and what there is to say of the model.

    Args:
        model: The model's stages: modules of torch, or cells of MindSpore.
        optimizer: The optimizer.
        config: What is asked for.
        groups: Process groups by axis (`tp`, `dp`, `pp`), or None.

    Raises:
        AttachError, ConfigError, SpoolError: Something cannot be watched, or written, as asked.
    """
    if model and is_of_mindspore(model[0]):
        from trainermon.monitor.mindspore.opening import open_training as open_cells  # loads MindSpore

        return open_cells(model, optimizer, config, groups)
    from trainermon.monitor.session.opening import open_training as open_modules  # loads torch

    return open_modules(model, optimizer, config, groups)
