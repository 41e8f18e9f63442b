"""What a run keeps of its environment: settings that change numbers or speed, and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Any

from trainermon.core.environment.secrets import Redactor
from trainermon.core.environment.variables import allowed_settings
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


def kept_settings() -> dict[str, Any]:
    """Return variables of the allow-list, switches of torch, and versions of packages that compute, by section."""
    return {
        "variables": allowed_settings(os.environ, Redactor()),
        "torch": torch_settings(),
        "packages": {name: {"version": _version(name)} for module, name in _PACKAGES.items() if module in sys.modules},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
