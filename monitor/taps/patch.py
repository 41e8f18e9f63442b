"""The one place where a method of somebody else's object is replaced, checked, and put back."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from trainermon.monitor.errors import AttachError

_ABSENT = object()


class Patch:
    """Calls something around a method of one object, or of one class; `remove()` puts back what was there.

    The replacement is a bound method (a function on a class), as the original was: schedulers, pickles and frameworks
    that look at it find what they expect. `before(args, kwargs)` runs first, `after(result)` last and not after an
    exception; both must be contained. The original is always called, exactly once, with what it was called with, and
    what it returns is returned.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None,
        after: Callable[[Any], Any] | None = None,
    ) -> None:
        self._owner = owner
        self._name = name
        self._before = before
        self._after = after
        self._previous = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name, None)
        if not callable(original):
            raise AttachError(
                f"{_describe(owner)}: found no method {name}, which this version of trainermon watches; "
                "its version is newer or older than those that are supported"
            )
        self._replacement = self._make(original)
        setattr(owner, name, self._replacement)

    def _make(self, original: Callable[..., Any]) -> Any:
        if inspect.isclass(self._owner):
            return self._around(original, skip=0)
        around = self._around(original, skip=1)
        return types.MethodType(around, self._owner)

    def _around(self, original: Callable[..., Any], *, skip: int) -> Callable[..., Any]:
        @functools.wraps(original)
        def around(*args: Any, **kwargs: Any) -> Any:
            if self._before is not None:
                self._before(args[skip:], kwargs)
            result = original(*args[skip:], **kwargs)
            if self._after is not None:
                self._after(result)
            return result

        return around

    def remove(self) -> None:
        """Put the original back; where somebody else has replaced the method since, only fall silent."""
        self._before = self._after = None
        if vars(self._owner).get(self._name) is not self._replacement:
            return
        if self._previous is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._previous)


def _describe(owner: Any) -> str:
    kind = owner if inspect.isclass(owner) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"
