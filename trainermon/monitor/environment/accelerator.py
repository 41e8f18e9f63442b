"""Which accelerator this rank trains on, in words that the agent can find it by among those of its driver."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def describe_accelerator(tensors: Iterable[torch.Tensor]) -> dict[str, Any] | None:
    """Return type, index, visible devices and, where torch knows it, the UUID of the device that this rank trains on.

    That is the device of the first of `tensors` that is on one; where they are all in host memory (offloaded
    parameters), the process's own device, if it has begun to use one. None: it trains on no accelerator. Touches no
    device, and starts none.
    """
    device = next((tensor.device for tensor in tensors if tensor.device.type in VISIBLE), None) or _own_device()
    if device is None:
        return None
    index = device.index
    visible = os.environ.get(VISIBLE[device.type], "")
    return {"type": device.type, "index": index, "visible": visible, "uuid": _uuid(device.type, index)}


def _own_device() -> torch.device | None:
    for name in VISIBLE:
        module = getattr(torch, name, None)
        is_in_use = getattr(module, "is_initialized", lambda: False)
        if module is not None and is_in_use():
            return torch.device(name, module.current_device())
    return None


def _uuid(name: str, index: int) -> str:
    """Return what torch says that the device is; '' where it does not (an older torch, another vendor)."""
    properties_of = getattr(getattr(torch, name), "get_device_properties", None)
    return str(getattr(properties_of(index), "uuid", "")) if properties_of else ""
