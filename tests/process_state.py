"""Switches of the whole process: whoever leaves one changed is named, and not the later test that suffers from it."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import ModuleType

State = dict[str, object]

# Variables that our code or torch's jobs read; libraries set others of their own on import (Ray, DeepSpeed, inductor).
OURS = ("TRAINERMON_", "MSPROBE_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "PYTHONHASHSEED", "CUBLAS_")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# As right after its import: so the first test file that imports torch is held to it like every other.
FRESH_TORCH: State = {
    "default dtype of torch": "torch.float32",
    "deterministic algorithms of torch": 0,
    "frozen flags of torch": False,
    "gradients of torch": True,
    "anomaly mode of torch": False,
    "modes of torch": (0, 0),
    "process group of torch": False,
}


def torch_state(torch: ModuleType) -> State:
    """Return the switches of torch by name; 5 µs."""
    cudnn = torch.backends.cudnn
    return {
        "default dtype of torch": str(torch.get_default_dtype()),
        "deterministic algorithms of torch": torch.get_deterministic_debug_mode(),
        "frozen flags of torch": torch.backends.flags_frozen(),
        "gradients of torch": torch.is_grad_enabled(),
        "anomaly mode of torch": torch.is_anomaly_enabled(),
        "modes of torch": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "process group of torch": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "threads of torch": torch.get_num_threads(),
        "cuDNN of torch": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
    }


def process_state() -> State:
    """Return the switches by name, 65 µs; those of torch are read only where it was imported."""
    state: State = {f"${name}": value for name, value in os.environ.items() if name.startswith(OURS)}
    state |= {f"handler of {number.name}": signal.getsignal(number) for number in SIGNALS}
    state |= torch_state(sys.modules["torch"]) if "torch" in sys.modules else FRESH_TORCH
    return state | {
        "working directory": os.getcwd(),
        "level of the root logger": logging.root.level,
        "disabled logging": logging.root.manager.disable,
    }


def changes(before: State, after: State) -> list[str]:
    """Return one line for every switch that differs, empty where none does.

    What torch says only once it is imported (threads, cuDNN) is no change.
    """
    if before == after:
        return []
    names = sorted(before.keys() | {name for name in after if name.startswith("$")})
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names if before.get(name) != after.get(name)]
