"""The one place where a method of somebody else's object is replaced, checked, and put back."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from trainermon.core.errors import AttachError
from trainermon.hooks.containment import FaultBorder
from trainermon.hooks.guard import ContainedCall, never_compiled

_ABSENT = object()


class Patch:
    """Replaces a method of one object or class by one that calls hooks around it, until `remove()`.

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
            raise _missing(owner, name)
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
        """Restore the original; where somebody else has replaced the method since, only stop calling the hooks."""
        self._before = self._after = None
        if vars(self._owner).get(self._name) is not self._replacement:
            return
        if self._previous is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._previous)


class CallPatch:
    """Replaces a method of a class or a function of a module by one that reports begin and end of each call.

    `begins(args, kwargs)` runs before the original, a method's `self` included; what it returns is handed to
    `ends(token, result)` unless it is None, after an exception to `fails(token)`. All must be contained, or `border` be
    given, which contains them at half the cost. Not called while torch.compile traces. Nothing is replaced before
    `attach()`. The replacement is always the same object, so that what was compiled with and without it stays valid
    when it comes and goes.

    Raises:
        AttachError: `owner` itself has no such function.
    """

    def __init__(  # noqa: PLR0913  # what is replaced, and whom it tells
        self,
        owner: Any,
        name: str,
        *,
        begins: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        ends: Callable[[Any, Any], Any],
        fails: Callable[[Any], Any] | None = None,
        border: FaultBorder | None = None,
    ) -> None:
        if name not in vars(owner) or not callable(getattr(owner, name)):
            raise _missing(owner, name)
        self._owner = owner
        self._name = name
        self._original = vars(owner)[name]
        self._is_on = False
        self._fails = fails
        self._border = border
        around = self._around if border is None else self._around_contained
        around = around if inspect.isclass(owner) else functools.partial(self._around_traceable, around)
        self._replacement = around(getattr(owner, name), begins, ends)

    @property
    def fits(self) -> bool:
        """Whether the owner's function is still the original or the replacement, and not somebody else's."""
        return vars(self._owner).get(self._name) in (self._original, self._replacement)

    def attach(self) -> None:
        """Install the replacement; does nothing if it is installed."""
        self._is_on = True
        if vars(self._owner).get(self._name) is self._original:
            setattr(self._owner, self._name, self._replacement)

    def detach(self) -> None:
        """Restore the original; where somebody else has replaced the function since, only stop reporting."""
        self._is_on = False
        if vars(self._owner).get(self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)

    def _around(self, function: Callable[..., Any], begins: Callable[..., Any], ends: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def around(*args: Any, **kwargs: Any) -> Any:
            token = begins(args, kwargs) if self._is_on else None
            try:
                result = function(*args, **kwargs)
            except BaseException:  # an interrupt too leaves the call begun; it goes on to the script
                if token is not None and self._fails is not None:
                    self._fails(token)
                raise
            if token is not None:
                ends(token, result)
            return result

        return around

    def _around_contained(
        self, function: Callable[..., Any], begins: Callable[..., Any], ends: Callable[..., Any]
    ) -> Any:
        """Contain the callbacks here, not each in a call of its own: between two calls all of that leaves the cache."""
        border, fails = self._border, self._fails
        assert border is not None

        @functools.wraps(function)
        def around(*args: Any, **kwargs: Any) -> Any:
            token = None
            if self._is_on and not border.tripped and not is_dynamo_compiling():
                try:
                    token = begins(args, kwargs)
                except Exception as error:  # noqa: BLE001  # the border to training: whatever it is, training goes on
                    border.trip(error)
            try:
                result = function(*args, **kwargs)
            except BaseException:  # an interrupt too leaves the call begun; it goes on to the script
                if token is not None and fails is not None:
                    ContainedCall(border, fails)(token)
                raise
            if token is not None and not border.tripped:
                try:
                    ends(token, result)
                except Exception as error:  # noqa: BLE001  # as above
                    border.trip(error)
            return result

        return never_compiled(around)

    def _around_traceable(
        self, around_call: Callable[..., Any], function: Callable[..., Any], *callbacks: Callable[..., Any]
    ) -> Any:
        watched = around_call(function, *callbacks)

        @functools.wraps(function)
        def around(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            return watched(*args, **kwargs)

        return around


def with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and all that are derived from it."""
    yield cls
    for subclass in cls.__subclasses__():
        yield from with_subclasses(subclass)


def _missing(owner: Any, name: str) -> AttachError:
    return AttachError(
        f"{_describe(owner)}: found no method {name}, which this version of trainermon watches; "
        "its version is newer or older than those that are supported"
    )


def _describe(owner: Any) -> str:
    if inspect.ismodule(owner):
        return owner.__name__
    kind = owner if inspect.isclass(owner) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"
