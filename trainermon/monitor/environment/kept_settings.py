"""What a run keeps of its environment: settings that change numbers or speed, and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from trainermon.core.environment.code import script_arguments
from trainermon.core.environment.secrets import Redactor, clean_argument
from trainermon.core.environment.variables import allowed_settings
from trainermon.monitor.environment.model_settings import model_settings
from trainermon.monitor.environment.torch_settings import torch_settings

_PACKAGES = {
    "accelerate": "accelerate",
    "apex": "apex",
    "datasets": "datasets",
    "deepspeed": "deepspeed",
    "flash_attn": "flash-attn",
    "lightning": "lightning",
    "megatron.core": "megatron-core",
    "numpy": "numpy",
    "peft": "peft",
    "torch": "torch",
    "torch_npu": "torch-npu",
    "transformer_engine": "transformer-engine",
    "transformers": "transformers",
    "triton": "triton",
}
"""Packages that compute, by the module that says whether they are used."""


_MAX_GROUPS = 16
_SCALARS = (bool, int, float, str, type(None))


def kept_settings(models: Sequence[nn.Module], optimizer: Any) -> dict[str, Any]:
    """Return variables of the allow-list, switches of torch, versions of packages that compute, by section.

    Beside them the arguments of the script, without secrets, and the settings of models and optimizer; tensors are not
    read.
    """
    return {
        "arguments": script_arguments(sys.argv[1:], os.environ),
        "hyperparameters": dict(optimizer_settings(optimizer)),
        "model": model_settings(models),
        "variables": allowed_settings(os.environ, Redactor()),
        "torch": torch_settings(),
        "packages": {name: {"version": _version(name)} for module, name in _PACKAGES.items() if module in sys.modules},
    }


def groups_of(optimizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the settings of each parameter group of an optimizer, with a name for them, the first 16 groups."""
    for number, group in enumerate(list(getattr(optimizer, "param_groups", None) or [])[:_MAX_GROUPS]):
        name = f"optimizer.group{number}" if number else "optimizer"
        yield name, {key: value for key, value in group.items() if key != "params"}


def optimizer_settings(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield by name the class of an optimizer, the norm to which it clips if it does, and settings of groups."""
    if optimizer is None:
        return
    yield "optimizer.class", type(optimizer).__name__
    for holder in (optimizer, getattr(optimizer, "config", None)):
        clipped = getattr(holder, "clip_grad", None)  # DeepSpeed's optimizers and Megatron's configuration
        if isinstance(clipped, float | int):
            yield "optimizer.clip_grad", clipped
    for name, group in groups_of(optimizer):
        for key, value in group.items():
            if isinstance(value, _SCALARS):
                yield f"{name}.{key}", clean_argument(str(key), value) if isinstance(value, str) else value
            elif isinstance(value, tuple | list) and all(isinstance(part, _SCALARS) for part in value):
                yield f"{name}.{key}", list(value)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
