"""Functions of MindSpore that are replaced for a time by ones that report their calls.

MindSpore's compiler reads the source of what it finds under a name, and looks through `__wrapped__` at the original: so
what is compiled in the meantime is compiled as ever, and has nothing of ours in it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mindspore import ops
from mindspore.graph import api

_ABSENT = object()


class _Thread(threading.local):
    is_inside = False


_thread = _Thread()


class FunctionPlace(NamedTuple):
    """A function that is looked up by name when it is called.

    Attributes:
        owner: The module or class that has it.
        attribute: Its name there.
        shown: What its calls are called.
    """

    owner: Any
    attribute: str
    shown: str


def is_in_backward() -> bool:
    """Return whether a backward runs: a call that is made then belongs to it, or to a forward made again. 0.2 µs."""
    return bool(api._pynative_executor.get_current_autodiff_engine_id() != -1)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Have no call reported that this thread makes: what the monitor itself asks of a tensor is not the script's."""
    before, _thread.is_inside = _thread.is_inside, True
    try:
        yield
    finally:
        _thread.is_inside = before


class ReplacedFunctions:
    """Reports the outermost calls of functions and primitives by the thread that attached it, until `detach`.

    Each original is called once, with what its replacement was called with, and what it returns is returned.

    Args:
        places: The functions.
        primitives: Objects of `ops.Primitive`, each with what its calls are called.
        begins: Called with name, function, arguments and named arguments before a call; None: it is of no interest.
            Must be contained, and so `ends`.
        ends: Called with what `begins` returned and the result after it; not after an exception.
    """

    def __init__(
        self,
        places: Sequence[FunctionPlace],
        primitives: Sequence[tuple[ops.Primitive, str]],
        begins: Callable[..., Any],
        ends: Callable[..., Any],
    ) -> None:
        self._begins, self._ends = begins, ends
        self._is_on = False
        self._thread = 0
        self._functions = [
            _Replaced(place.owner, place.attribute, self._around(getattr(place.owner, place.attribute), place.shown))
            for place in places
        ]
        self._primitives = [
            (primitive, type(primitive), self._class_around(primitive, shown)) for primitive, shown in primitives
        ]

    def attach(self) -> None:
        """Put the replacements in place."""
        self._is_on, self._thread = True, threading.get_ident()
        for function in self._functions:
            function.put()
        for primitive, _, replacement in self._primitives:
            primitive.__class__ = replacement

    def detach(self) -> None:
        """Restore the originals; where somebody else has replaced one since, only stop reporting."""
        self._is_on = False
        for function in self._functions:
            function.restore()
        for primitive, original, replacement in self._primitives:
            if type(primitive) is replacement:
                primitive.__class__ = original

    def _around(self, function: Callable[..., Any], shown: str, subject: Any = None) -> Callable[..., Any]:
        subject = function if subject is None else subject

        @functools.wraps(function)
        def around(*args: Any, **kwargs: Any) -> Any:
            if _thread.is_inside or not self._is_on or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            with unseen():
                call = self._begins(shown, subject, args, kwargs)
                result = function(*args, **kwargs)
                if call is not None:
                    self._ends(call, result)
            return result

        return around

    def _class_around(self, primitive: ops.Primitive, shown: str) -> type:
        cls = type(primitive)
        around = self._around(functools.partial(cls.__call__, primitive), shown, primitive)
        return type(cls.__name__, (cls,), {"__call__": lambda _primitive, *args, **kwargs: around(*args, **kwargs)})


class _Replaced:
    """A function of a module or class, and what takes its place."""

    __slots__ = ("_attribute", "_original", "_owner", "_replacement")

    def __init__(self, owner: Any, attribute: str, replacement: Callable[..., Any]) -> None:
        self._owner, self._attribute, self._replacement = owner, attribute, replacement
        self._original = vars(owner).get(attribute, _ABSENT)  # a class may only inherit it

    def put(self) -> None:
        if vars(self._owner).get(self._attribute, _ABSENT) is self._original:
            setattr(self._owner, self._attribute, self._replacement)

    def restore(self) -> None:
        if vars(self._owner).get(self._attribute) is not self._replacement:
            return
        if self._original is _ABSENT:
            delattr(self._owner, self._attribute)
        else:
            setattr(self._owner, self._attribute, self._original)
