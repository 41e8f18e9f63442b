"""Whether a replay has room: when one rank of several runs out of memory in the middle, the others wait for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

MIB = 1 << 20
# What statistics and unfinished gradients of a replay may take beside what the step itself took.
SPARE_BYTES = 64 * MIB


def lack_of_memory(devices: Iterable[torch.device], kept_bytes: int) -> str:
    """Return a sentence on the memory that a replay would lack on one of `devices`; "" if it lacks none.

    It needs what the step took at its peak, and `kept_bytes` stay alive meanwhile. Waits for nothing.
    """
    for device in devices:
        module = getattr(torch, device.type)
        if not hasattr(module, "mem_get_info"):
            continue  # nothing is known of this kind of device
        allocated, peak = module.memory_allocated(device), module.max_memory_allocated(device)
        free = module.mem_get_info(device)[0] + module.memory_reserved(device) - allocated
        needed = peak - allocated + kept_bytes + SPARE_BYTES
        if free < needed:
            return f"{device} has {free / MIB:.0f} MiB left, a replay may need {needed / MIB:.0f} MiB"
    return ""
