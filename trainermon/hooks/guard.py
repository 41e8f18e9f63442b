"""What contains the monitor's errors in torch: see `containment`. Compiled code leaves these callables out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch.compiler import is_dynamo_compiling

from trainermon.hooks.containment import NOTHING, FaultBorder, PlainContainedCall, PlainFaultGuard

__all__ = ["NOTHING", "ContainedCall", "FaultBorder", "FaultGuard"]


class ContainedCall(PlainContainedCall):
    """Calls a function and returns None instead of raising; compiled code calls nothing."""

    __slots__ = ()
    __torch_unserializable__: ClassVar[bool] = True  # torch need not warn that this hook of a tensor is not saved

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
    """Catches the monitor's own errors in hooks of torch: the first one is logged and detaches the monitor."""

    def wrap(self, function: Callable[..., Any], *bound: Any) -> ContainedCall:
        """Return `function`, with first arguments `bound`, in a form that never raises; see `ContainedCall`.

        After a fault it does nothing and returns None.
        """
        return ContainedCall(self, function, bound)
