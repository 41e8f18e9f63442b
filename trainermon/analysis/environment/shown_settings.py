"""Hyperparameters and layout as a running job has them: what frameworks keep of their arguments."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from trainermon.analysis.environment.files import flattened
from trainermon.core.topology import find_coordinates
from trainermon.monitor.environment.kept_settings import optimizer_settings
from trainermon.monitor.taps.training import Training

_SCALARS = (bool, int, float, str, type(None))


def hyperparameters_in(models: Sequence[nn.Module], optimizer: Any) -> dict[str, Any]:
    """Return hyperparameters by name: Megatron's, `TrainingArguments`, `hparams`, `config`, DeepSpeed's, groups.

    Reads attributes only; what is no plain value is left out.
    """
    found: dict[str, Any] = {}
    for name, value in _sources(models):
        found.update({key: item for key, item in flattened(_plain(value), name) if _is_plain(item)})
    return found | dict(optimizer_settings(optimizer))


def _sources(models: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    megatron = sys.modules.get("megatron.training.global_vars")
    arguments = getattr(megatron, "_GLOBAL_ARGS", None)
    if arguments is not None:
        yield "", vars(arguments)
    model = models[0]
    if isinstance(getattr(model, "hparams", None), Mapping):  # Lightning
        yield "hparams", dict(model.hparams)  # type: ignore[arg-type]  # a Mapping
    yield from _of_trainer()
    inner = getattr(model, "module", model)
    as_dict: Callable[[], Any] | None = getattr(getattr(inner, "config", None), "to_dict", None)  # transformers
    if callable(as_dict):
        yield "model", as_dict()
    if isinstance(getattr(model, "config", None), Mapping):  # DeepSpeed's engine
        yield "deepspeed", dict(model.config)  # type: ignore[arg-type]  # a Mapping


def _of_trainer() -> Iterator[tuple[str, Any]]:
    """Yield the `TrainingArguments` of the transformers `Trainer` that has called the model, if one did."""
    frame: types.FrameType | None = sys._getframe() if "transformers.trainer" in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer" and "self" in frame.f_code.co_varnames:
            arguments: Any = getattr(frame.f_locals.get("self"), "args", None)
            if hasattr(arguments, "to_dict"):
                yield "", arguments.to_dict()
                return
        frame = frame.f_back


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    is_named = type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device")
    return str(value) if is_named else value


def _is_plain(value: Any) -> bool:
    return isinstance(value, _SCALARS) or (isinstance(value, list) and all(isinstance(v, _SCALARS) for v in value))


def layout_in(training: Training | None) -> dict[str, Any]:
    """Return how the job is split: the size of each axis, and the framework."""
    coordinates = (training.coordinates if training is not None else None) or find_coordinates(groups={})
    axes = ("world_size", "dp_size", "tp_size", "pp_size", "cp_size", "ep_size")
    found: dict[str, Any] = {axis: getattr(coordinates, axis) for axis in axes}
    return {"framework": training.framework, **found} if training is not None else found
