"""The one place where an error of the monitor meets training: it is caught, told once, and the monitor lets go.

Every callable that a framework calls on the monitor's behalf is contained: it never raises, and it stays behind when
the model it is registered on is copied or pickled. Under a guard the first exception detaches everything; from then on
contained callables return at once. Here no framework is known; `guard` is what torch needs beside it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

from trainermon.core.errors import TrainermonError

logger = logging.getLogger("trainermon")

# A function that takes anything and returns None. It is one of the standard library's, so that a watched model that was
# saved whole can be loaded where trainermon is not installed.
NOTHING = (contextlib.nullcontext, "__exit__")


class FaultBorder(Protocol):
    """Interface of what receives the errors of contained callables. While `tripped` is true they are not called."""

    tripped: bool

    def trip(self, error: BaseException) -> None:
        """Handle an error of the monitor's own; does not raise."""


class PlainContainedCall:
    """Calls `function(*bound, *args)`, and returns None instead of raising.

    Neither copies nor pickles lead to the monitor: both are a function that does nothing. So a model can be copied,
    saved or sent to another process while hooks of this kind are on it. Costs about 125 ns a call.
    """

    __slots__ = ("_border", "_function")

    def __init__(self, border: FaultBorder, function: Callable[..., Any], bound: tuple[Any, ...] = ()) -> None:
        self._border = border
        self._function = functools.partial(function, *bound) if bound else function

    def __call__(self, *args: Any) -> Any:
        """Return what the function returns, None if it fails; it is not called once tripped."""
        if self._border.tripped:
            return None
        try:
            return self._function(*args)
        except Exception as error:  # noqa: BLE001  # the border to training: whatever it is, training goes on
            self._border.trip(error)
            return None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Let copies and pickles be a function that does nothing."""
        return getattr, NOTHING


class PlainFaultGuard:
    """Catches the monitor's own errors: the first one is logged and detaches the monitor, or a part of it.

    `on_fault` is called once, with a one-line message, after the first fault; it detaches what is attached. `left_out`
    is what is not looked for from then on; "": the whole monitor is what is detached.
    """

    def __init__(self, on_fault: Callable[[str], None], *, left_out: str = "") -> None:
        self._on_fault = on_fault
        self._left_out = left_out
        self.tripped = False

    def wrap(self, function: Callable[..., Any], *bound: Any) -> PlainContainedCall:
        """Return `function`, with first arguments `bound`, in a form that never raises; see `PlainContainedCall`.

        After a fault it does nothing and returns None.
        """
        return PlainContainedCall(self, function, bound)

    def trip(self, error: BaseException) -> None:
        """Log the first error, and have what is guarded detach; later errors do nothing."""
        if self.tripped:
            return
        self.tripped = True
        fault = f"{type(error).__name__}: {error}"
        message = f"the monitor detached itself after {fault}; training goes on unwatched"
        if self._left_out:
            message = f"the search for {self._left_out} has ended after {fault}; all else is watched as before"
        # A full disk or a folder that cannot be written is no fault in the code: where it was met helps nobody.
        is_told_whole = isinstance(error, TrainermonError | OSError)
        logger.error(message, exc_info=None if is_told_whole else error)
        try:
            self._on_fault(message)
        except Exception:  # a second fault while letting go of the first
            logger.exception("the monitor could not detach cleanly")
