"""Which calls of functions a reentrant checkpoint repeats in the backward: only there they have gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from trainermon.dump.gradients import Backward

# Beyond this many calls the first ones are forgotten.
MAX_CALLS = 100_000


@dataclasses.dataclass(slots=True, eq=False)
class _Segment:
    """What one node of the graph has run so far: functions, and None for those that have no graph here either."""

    node: Any
    names: list[str] = dataclasses.field(default_factory=list)
    backwards: list[Backward | None] = dataclasses.field(default_factory=list)


class RecomputedCalls:
    """Finds the call that is repeated by the sequence of functions: the same one, the latest that was not repeated.

    `bind(backward, call)` gives a backward the key of a call.
    """

    def __init__(self, bind: Callable[[Backward, Any], None]) -> None:
        self._bind = bind
        self._calls: list[Any] = []
        self._names: list[str] = []
        self._segment = _Segment(None)

    def note(self, name: str, call: Any) -> None:
        """Note a call of the forward: its function, and what `bind` is to be given. Not None."""
        if len(self._calls) >= MAX_CALLS:
            del self._calls[: MAX_CALLS // 2], self._names[: MAX_CALLS // 2]
        self._calls.append(call)
        self._names.append(name)

    def repeat(self, name: str) -> Backward | None:
        """Return the backward of a call that a node of the running backward makes; None if it has no graph.

        Its key is known when the first gradient arrives: by then the whole segment was repeated.
        """
        node: Any = torch._C._current_autograd_node()
        if not self._calls or not isinstance(node, BackwardCFunction):
            return None
        if self._segment.node is not node:
            self._segment = _Segment(node)
        segment = self._segment
        backward = None
        if torch.is_grad_enabled():
            backward = Backward("", sink=_nowhere, settle=lambda: self._settle(segment))
        segment.names.append(name)
        segment.backwards.append(backward)
        return backward

    def _settle(self, segment: _Segment) -> None:
        """Bind the backwards of a segment to the calls that it has repeated, and have it begin afresh."""
        segment.node = None
        names, backwards = segment.names, segment.backwards
        real = [position for position, backward in enumerate(backwards) if backward is not None]
        first, last = real[0], real[-1] + 1
        names, backwards = names[first:last], backwards[first:last]
        start = self._latest(names, backwards)
        for position, backward in enumerate(backwards, start or 0):
            if backward is None:
                continue
            if start is None:
                backward.written = True  # nobody knows of which call
            else:
                self._bind(backward, self._calls[position])
                self._calls[position] = None

    def _latest(self, names: list[str], backwards: list[Backward | None]) -> int | None:
        for start in range(len(self._names) - len(names), -1, -1):
            if self._names[start : start + len(names)] == names and all(
                self._calls[start + offset] is not None for offset, backward in enumerate(backwards) if backward
            ):
                return start
        return None


def _nowhere(_key: str, _value: dict[str, Any]) -> None:
    """Drop an entry of which nobody knows what call it belongs to."""
