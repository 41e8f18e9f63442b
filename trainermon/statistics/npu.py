"""What only an Ascend NPU has: a flag in the hardware that says that a float16 result was saturated.

Everything else runs on an NPU as on any other accelerator. `torch_npu` is imported here only, and only for a device of
type `npu`.
"""

from __future__ import annotations

import importlib

import torch


def overflow_flag(device: torch.device) -> bool | None:
    """Return whether an operation on this NPU has overflowed since the flag was cleared; None if that is not known.

    The flag exists in saturation mode only (the first Atlas training series), where an overflow becomes the largest
    number instead of an infinity, so that no statistic shows it. In INF/NAN mode (Atlas A2 and later) infinities are in
    the tensors, and are counted. It is read, not cleared: loss scalers clear it. Waits for the device, so it is for a
    question that somebody asked, not for every step.

    Source: `get_npu_overflow_flag` and `is_support_inf_nan` of torch_npu/npu/utils.py.
    """
    if device.type != "npu":
        return None
    utils = importlib.import_module("torch_npu.npu.utils")
    if utils.is_support_inf_nan():
        return None
    return bool(utils.get_npu_overflow_flag())
