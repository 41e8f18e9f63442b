"""How torch is built and set in this process, as far as it can change numbers or speed."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

_MISSING = object()


def torch_settings() -> dict[str, Any]:
    """Return torch's version, build and switches by name; what this version of torch does not have is left out.

    Reads attributes only: no device is initialised.
    """
    read = {name: _read(reader) for name, reader in _READERS.items()}
    return {name: value for name, value in read.items() if value is not _MISSING}


def _read(reader: Callable[[], Any]) -> Any:
    try:
        return _plain(reader())
    except (AttributeError, RuntimeError, AssertionError, TypeError, ValueError, KeyError):
        return _MISSING


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _cudnn_version() -> int | None:
    return torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]


def _config() -> str:
    """Return a hash of what the build says of itself: it is long, and equal or not."""
    return hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16]


_READERS: Mapping[str, Callable[[], Any]] = {
    "version": lambda: torch.__version__,
    "git_version": lambda: torch.version.git_version,
    "cuda": lambda: torch.version.cuda,
    "hip": lambda: torch.version.hip,
    "debug": lambda: torch.version.debug,
    "config": _config,
    "cpu_capability": lambda: torch.backends.cpu.get_cpu_capability(),
    "cudnn.version": _cudnn_version,
    "default_dtype": torch.get_default_dtype,
    "threads": torch.get_num_threads,
    "threads.interop": torch.get_num_interop_threads,
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "deterministic_algorithms.warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "fill_uninitialized_memory": lambda: vars(torch.utils.deterministic)["fill_uninitialized_memory"],
    "flush_denormal": lambda: (torch.tensor([1e-39]) * 1).item() == 0.0,
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "cuda.matmul.allow_fp16_reduced_precision": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cuda.matmul.allow_bf16_reduced_precision": lambda: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "cudnn.enabled": lambda: torch.backends.cudnn.enabled,
    "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
    "sdp.flash": torch.backends.cuda.flash_sdp_enabled,
    "sdp.memory_efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "sdp.math": torch.backends.cuda.math_sdp_enabled,
    "sdp.cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "autocast.enabled": torch.is_autocast_enabled,
    "autocast.cpu": lambda: torch.is_autocast_enabled("cpu"),
    "autocast.dtype.cuda": lambda: torch.get_autocast_dtype("cuda"),
    "autocast.dtype.cpu": lambda: torch.get_autocast_dtype("cpu"),
    "compile.disabled": lambda: torch._dynamo.config.disable if "torch._dynamo" in sys.modules else None,
}
