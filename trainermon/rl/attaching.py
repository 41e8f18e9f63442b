"""How an adapter stands in for a method of a framework's trainer: checked first, contained, and taken back whole."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from trainermon.core.errors import AttachError

_log = logging.getLogger(__name__)


class Attachment:
    """A method of one object that tells an observer of each call; `detach` takes it back.

    Args:
        owner: The object; its class and other objects are not touched.
        method: Name of the method.
        parameters: Names of the parameters that it must have first, after self.
        observe: Is called with what the method returned, and its arguments. Its errors are logged once.

    Raises:
        AttachError: There is no such method, or it has other parameters.
    """

    def __init__(self, owner: Any, method: str, parameters: Sequence[str], observe: Callable[..., None]) -> None:
        original: Any = getattr(owner, method, None)
        found = list(inspect.signature(original).parameters) if callable(original) else None
        if found is None or found[: len(parameters)] != list(parameters):
            has = "no such method" if found is None else f"parameters {', '.join(found)}"
            raise AttachError(
                f"{type(owner).__name__}.{method}: found {has}, expected {', '.join(parameters)}; this version of the "
                "framework is not supported: call Watch.rollout and Watch.train where both log-probabilities are known"
            )
        self._owner, self._method = owner, method
        self._was_own = vars(owner).get(method)
        self._has_failed = False

        @functools.wraps(original)
        def standing_in(*args: Any, **kwargs: Any) -> Any:
            outcome = original(*args, **kwargs)
            self._tell(observe, outcome, args, kwargs)
            return outcome

        setattr(owner, method, standing_in)

    def detach(self) -> None:
        """Give the object its method back."""
        if self._was_own is None:
            vars(self._owner).pop(self._method, None)
        else:
            setattr(self._owner, self._method, self._was_own)

    def _tell(self, observe: Callable[..., None], outcome: Any, args: Any, kwargs: Any) -> None:
        try:
            observe(outcome, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # nothing of an observer may reach training
            if not self._has_failed:
                _log.warning("trainermon.rl: %s could not be observed: %r", self._method, error, exc_info=error)
            self._has_failed = True
