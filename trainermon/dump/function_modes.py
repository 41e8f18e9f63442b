"""A function mode that comes and goes while others do: each of those finds the stack as it expects it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

from trainermon.hooks.guard import ContainedCall
from trainermon.hooks.patch import CallPatch

# The engine is entered by it, after torch has taken the modes off for the call of `backward`.
ENTERS_ENGINE = "_engine_run_backward"

_stack: Any = overrides


class ModeSwitch:
    """Makes a torch function mode see all calls of this thread, in a backward too, where torch removes modes.

    Args:
        mode: The mode, which torch calls in place of each of its functions.
        contain: Makes, of a function and its first arguments, a callable that never raises into training.
    """

    def __init__(self, mode: TorchFunctionMode, contain: Callable[..., ContainedCall]) -> None:
        self._mode = mode
        self._contain = contain
        self._is_on = False
        self._engine = self._engine_patch() if ENTERS_ENGINE in vars(torch.autograd) else None

    def attach(self) -> None:
        """Turn the mode on for this thread."""
        if self._engine is not None:
            self._engine.attach()
        self._is_on = True
        put_in(self._mode)

    def detach(self) -> None:
        """Turn the mode off for this thread."""
        if self._is_on:
            self._is_on = False
            take_out(self._mode)
        if self._engine is not None:
            self._engine.detach()

    def _engine_patch(self) -> CallPatch:
        """Return a patch that has the mode on in the backward, where checkpoints repeat functions."""
        leaves = self._contain(lambda *_: take_out(self._mode))
        return CallPatch(
            torch.autograd, ENTERS_ENGINE, begins=self._contain(self._enters_engine), ends=leaves, fails=leaves
        )

    def _enters_engine(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool | None:
        if not self._is_on or is_in(self._mode):
            return None
        put_in(self._mode)
        return True


def put_in(mode: TorchFunctionMode) -> None:
    """Add `mode` to torch's stack of function modes, at the bottom: it sees every call after the others.

    It goes to the bottom: a `with` block that is left while it is there takes its own mode from the top. Below it stays
    only that of `torch.set_default_device`, which torch looks for at the very bottom.
    """
    others = _taken_off()
    if others and others[-1] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None):
        _stack._push_mode(others.pop())
    for each in (mode, *reversed(others)):
        _stack._push_mode(each)


def take_out(mode: TorchFunctionMode) -> None:
    """Remove `mode` from the stack wherever it is; does nothing if it is not there."""
    for each in reversed(_taken_off()):
        if each is not mode:
            _stack._push_mode(each)


def is_in(mode: TorchFunctionMode) -> bool:
    """Return whether `mode` is on the stack now."""
    return any(each is mode for each in _stack._get_current_function_mode_stack())


def _taken_off() -> list[TorchFunctionMode]:
    """Take all modes off, and return them from the top to the bottom."""
    return [_stack._pop_mode() for _ in range(_stack._len_torch_function_stack())]
