"""A function mode that comes and goes while others do: each of those finds the stack as it expects it."""

from __future__ import annotations

from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

_stack: Any = overrides


def put_in(mode: TorchFunctionMode) -> None:
    """Let `mode` see every call from now on, after the modes that are entered already.

    It goes to the bottom: a `with` block that is left while it is there takes its own mode from the top. Below it stays
    only that of `torch.set_default_device`, which torch looks for at the very bottom.
    """
    others = _taken_off()
    if others and others[-1] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None):
        _stack._push_mode(others.pop())
    for each in (mode, *reversed(others)):
        _stack._push_mode(each)


def take_out(mode: TorchFunctionMode) -> None:
    """Take `mode` off wherever it is; does nothing if it is not there."""
    for each in reversed(_taken_off()):
        if each is not mode:
            _stack._push_mode(each)


def is_in(mode: TorchFunctionMode) -> bool:
    """Return whether `mode` sees calls now."""
    return any(each is mode for each in _stack._get_current_function_mode_stack())


def _taken_off() -> list[TorchFunctionMode]:
    """Take all modes off, and return them from the top to the bottom."""
    return [_stack._pop_mode() for _ in range(_stack._len_torch_function_stack())]
