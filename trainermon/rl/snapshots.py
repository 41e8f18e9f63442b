"""Copies of what a script passes in, made so that the script may go on and change it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies on the host; those of an accelerator's tensors are there once `values` returns.

    Attributes:
        copies: By name.
        events: Of each stream that copies, one that has passed when it is done.
    """

    copies: Mapping[str, Any]
    events: tuple[Any, ...]

    def values(self) -> dict[str, Any]:
        """Return the copies; waits for those that are under way."""
        for event in self.events:
            event.synchronize()
        return dict(self.copies)


def snapshot(values: Mapping[str, Any]) -> Snapshot:
    """Return copies of arrays, tensors and lists of them. Tensors of an accelerator are copied without waiting."""
    devices: set[Any] = set()
    copies = {name: _copy(value, devices) for name, value in values.items() if value is not None}
    return Snapshot(copies, tuple(_event(device) for device in devices))


def _copy(value: Any, devices: set[Any]) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            return value.detach().clone()
        devices.add(value.device)
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return host.copy_(value.detach(), non_blocking=True)
    if isinstance(value, np.ndarray):
        return value.copy()
    return [_copy(each, devices) for each in value] if isinstance(value, list | tuple) else value


def _event(device: Any) -> Any:
    import torch

    module = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    return event
