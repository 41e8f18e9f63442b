"""Which calls of functions a reentrant checkpoint repeats in the backward: only there they have gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from trainermon.dump.files.records import RECOMPUTED
from trainermon.dump.function_kinds import only_moves
from trainermon.dump.gradients import BackwardEntry

# Beyond this many calls all are forgotten.
MAX_CALLS = 100_000


@dataclasses.dataclass(slots=True, eq=False)
class _NodeSegment:
    """What one node of the graph has run so far: functions, and None for those that have no graph here either."""

    node: Any
    names: list[str] = dataclasses.field(default_factory=list)
    backwards: list[BackwardEntry | None] = dataclasses.field(default_factory=list)


class RecomputedCalls:
    """Finds which recorded call of a function is being repeated when activation checkpointing runs a forward again.

    It compares the sequence of functions. Those that only move elements are no landmarks, since frameworks call others
    of them in a repetition; they are found where they are the same between two landmarks.

    Args:
        bind: `bind(backward, call)` gives a backward entry the key of the call it belongs to.
    """

    def __init__(self, bind: Callable[[BackwardEntry, Any], None]) -> None:
        self._bind = bind
        self._calls: list[Any] = []
        self._names: list[str] = []
        self._landmarks: list[int] = []
        self._segment = _NodeSegment(None)

    def note(self, name: str, call: Any) -> None:
        """Record that the forward called the function `name`.

        `call` is any object for it, not None, that `bind` will be given.
        """
        if len(self._calls) >= MAX_CALLS:
            self._calls, self._names, self._landmarks = [], [], []
        if _is_landmark(name):
            self._landmarks.append(len(self._calls))
        self._calls.append(call)
        self._names.append(name)

    def repeat(self, name: str) -> BackwardEntry | None:
        """Return a backward entry for a call of `name` during a recomputation; None if no recomputation is running.

        The entry's key is filled in when its first gradient arrives: by then the whole checkpointed part was repeated,
        and can be compared.
        """
        node: Any = torch._C._current_autograd_node()
        if not self._calls or not isinstance(node, BackwardCFunction):
            return None
        if self._segment.node is not node:
            self._segment = _NodeSegment(node)
        segment = self._segment
        backward = None
        if torch.is_grad_enabled():
            backward = BackwardEntry("", sink=_nowhere, settle=lambda: self._settle(segment), extra={RECOMPUTED: True})
        segment.names.append(name)
        segment.backwards.append(backward)
        return backward

    def _settle(self, segment: _NodeSegment) -> None:
        """Bind the backwards of a segment to the calls that it has repeated, and have it begin afresh."""
        segment.node = None
        for here, there in self._pairs(segment):
            backward = segment.backwards[here]
            if backward is not None:
                self._bind(backward, self._calls[there])
                self._calls[there] = None
        for backward in segment.backwards:
            if backward is not None:
                backward.settle = None
                backward.written = not backward.key  # nobody knows of which call

    def _pairs(self, segment: _NodeSegment) -> Iterator[tuple[int, int]]:
        """Yield the positions of functions in a segment, and of the same ones in the forward."""
        real = [position for position, backward in enumerate(segment.backwards) if backward is not None]
        own = [at for at in range(real[0], real[-1] + 1) if _is_landmark(segment.names[at])]
        theirs = self._latest([segment.names[at] for at in own], [segment.backwards[at] is not None for at in own])
        previous: tuple[int, int] | None = None
        for here, there in zip(own, theirs, strict=True) if theirs else ():
            if previous is not None and segment.names[previous[0] : here] == self._names[previous[1] : there]:
                yield from zip(range(previous[0] + 1, here), range(previous[1] + 1, there), strict=True)
            yield here, there
            previous = here, there

    def _latest(self, names: list[str], repeats: list[bool]) -> list[int]:
        """Return where in the forward the landmarks `names` are in a row, the repeated ones for the first time."""
        for start in range(len(self._landmarks) - len(names), -1, -1) if names else ():
            positions = self._landmarks[start : start + len(names)]
            if [self._names[at] for at in positions] == names and all(
                self._calls[at] is not None for at, repeated in zip(positions, repeats, strict=True) if repeated
            ):
                return positions
        return []


@functools.lru_cache(maxsize=4096)
def _is_landmark(name: str) -> bool:
    return not only_moves(name, name.rpartition(".")[2])


def _nowhere(_key: str, _value: dict[str, Any]) -> None:
    """Drop an entry of which nobody knows what call it belongs to."""
