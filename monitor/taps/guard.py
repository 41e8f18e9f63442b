"""The one place where an error of the monitor meets training: it is caught, told once, and the monitor lets go.

Every callable that torch calls on the monitor's behalf goes through `Guard.wrap`. The first exception detaches
everything; from then on wrapped callables return at once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger("trainermon")

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Guard:
    """Contains the monitor's own faults.

    `on_fault` is called once, with a one-line message, after the first fault; it detaches what is attached.
    """

    def __init__(self, on_fault: Callable[[str], None]) -> None:
        self._on_fault = on_fault
        self.tripped = False

    def wrap(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """Return `function` such that it never raises; after a fault it does nothing and returns None.

        Costs about 60 ns a call.
        """

        @functools.wraps(function)
        def contained(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
            if self.tripped:
                return None
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # the border to training: whatever it is, training goes on
                self.trip(error)
                return None

        return contained

    def trip(self, error: BaseException) -> None:
        """Record the first fault, tell about it once, and detach."""
        if self.tripped:
            return
        self.tripped = True
        message = f"the monitor detached itself after {type(error).__name__}: {error}; training goes on unwatched"
        logger.error(message, exc_info=error)
        try:
            self._on_fault(message)
        except Exception:  # a second fault while letting go of the first
            logger.exception("the monitor could not detach cleanly")
