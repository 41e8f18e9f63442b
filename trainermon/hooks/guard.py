"""What contains the monitor's errors in torch: see `containment`. Compiled code leaves these callables out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from torch._C import _dynamo
from torch.compiler import is_dynamo_compiling

from trainermon.hooks.containment import NOTHING, FaultBorder, PlainContainedCall, PlainFaultGuard

__all__ = ["NOTHING", "ContainedCall", "FaultBorder", "FaultGuard", "never_compiled"]

_F = TypeVar("_F", bound=Callable[..., Any])


def never_compiled(function: _F) -> _F:
    """Have Dynamo leave alone `function`, and all that it calls, where torch calls it from within a compiled function.

    `torch.compiler.disable` says the same, but imports Dynamo (seconds), and stands between a hook and torch. Where
    `function` is inlined in what is compiled this changes nothing: see `ContainedCall`. Returns `function` itself.
    """
    dynamo = _dynamo.eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):  # not in older torch
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
    return function


class ContainedCall(PlainContainedCall):
    """Calls a function and returns None instead of raising; compiled code calls nothing."""

    __slots__ = ()
    __torch_unserializable__: ClassVar[bool] = True  # torch need not warn that this hook of a tensor is not saved

    @never_compiled
    def __call__(self, *args: Any) -> Any:
        """Return what the function returns, None if it fails; it is not called once tripped, or while Dynamo compiles.

        Compiled code would call it for ever.
        """
        if is_dynamo_compiling() or self._border.tripped:
            return None
        try:  # as in the class above, whose call would cost as much again
            return self._function(*args)
        except Exception as error:  # noqa: BLE001  # the border to training: whatever it is, training goes on
            self._border.trip(error)
            return None


class FaultGuard(PlainFaultGuard):
    """Catches the monitor's own errors in hooks of torch: see `PlainFaultGuard`."""

    def wrap(self, function: Callable[..., Any], *bound: Any) -> ContainedCall:
        """Return `function`, with first arguments `bound`, in a form that never raises; see `ContainedCall`.

        After a fault it does nothing and returns None.
        """
        return ContainedCall(self, function, bound)
