"""Where one of two sequences of functions has more, as with a layer more: what belongs together, by equal weights.

Names and shapes alone would match the functions of the new layer with those of the next one, and so on to the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

from trainermon.analysis.compare.alignment import align
from trainermon.analysis.compare.items import INPUT, DumpCall, Value, value_of

Parts = Iterator[tuple[Sequence[DumpCall], Sequence[DumpCall]]]


class CallSequence(NamedTuple):
    """Functions of one side, in the order in which they ran.

    Attributes:
        calls: The functions.
        kinds: What a partner must have in common with each.
        passing: How many values pass by each: made before it, and taken by it or after it.
    """

    calls: Sequence[DumpCall]
    kinds: Sequence[Hashable]
    passing: Sequence[int]

    def part(self, start: int, stop: int) -> CallSequence:
        """Return the functions from `start` on, up to `stop`."""
        return CallSequence(self.calls[start:stop], self.kinds[start:stop], self.passing[start : stop + 1])


def matching_parts(
    ours: Sequence[DumpCall], theirs: Sequence[DumpCall], kinds: tuple[Sequence[Hashable], Sequence[Hashable]]
) -> Parts:
    """Yield the parts of two sequences of functions that belong together, in order; all as one if they are as many.

    They are cut at functions that take equal weights, if one alone on either side takes these; and where between two
    such functions one side has all that the other has, and more, around what it has more. If that may begin at several
    places, it begins where the fewest values pass by: between two layers, and not within one. Costs a look at each row.

    Args:
        ours: Functions of the target.
        theirs: Functions of the golden dump.
        kinds: What a partner must have in common with each of them.
    """
    if len(ours) == len(theirs):
        yield ours, theirs
        return
    one, other = (CallSequence(calls, same, _passing(calls)) for calls, same in zip((ours, theirs), kinds, strict=True))
    start = (0, 0)
    for at in (*_anchors(one, other), (len(ours), len(theirs))):
        yield from _around(one.part(start[0], at[0]), other.part(start[1], at[1]))
        yield ours[at[0] : at[0] + 1], theirs[at[1] : at[1] + 1]
        start = at[0] + 1, at[1] + 1


def _around(one: CallSequence, other: CallSequence) -> Parts:
    """Yield what stands before and behind that which one side has more; all as one part if it is not that alone."""
    longer, number = max(one, other, key=lambda side: len(side.calls)), min(len(one.calls), len(other.calls))
    more = len(longer.calls) - number
    front, back = _common(one.kinds, other.kinds), _common(one.kinds[::-1], other.kinds[::-1])
    possible = range(min(front, number), max(0, number - back) - 1, -1)
    if not possible:
        yield one.calls, other.calls
        return
    at = min(possible, key=lambda place: longer.passing[place] + longer.passing[place + more])
    yield one.calls[:at], other.calls[:at]
    yield one.calls[len(one.calls) - number + at :], other.calls[len(other.calls) - number + at :]


def _common(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return how many elements are the same at the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _passing(calls: Sequence[DumpCall]) -> list[int]:
    """Return how many values pass by each call, and by the end: first seen before, and taken there or later."""
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    for at, call in enumerate(calls):
        for item in call.items:
            value = value_of(item)
            if value is not None:
                first.setdefault(value, at)
                if item.state == INPUT:
                    last[value] = at
    steps = [0] * (len(calls) + 2)
    for value, at in last.items():
        steps[first[value] + 1] += 1
        steps[at + 1] -= 1
    return list(accumulate(steps))[:-1]


def _anchors(one: CallSequence, other: CallSequence) -> list[tuple[int, int]]:
    """Return the positions, on both sides, of functions that take equal weights; rising on both."""
    ours, theirs = _by_weights(one), _by_weights(other)
    shared = ours.keys() & theirs.keys()
    ours, theirs = ({key: at for key, at in found.items() if key in shared} for found in (ours, theirs))
    places = list(ours.values()), list(theirs.values())
    return [(places[0][a], places[1][b]) for a, b in align(list(ours), list(theirs))]


def _by_weights(side: CallSequence) -> dict[Hashable, int]:
    """Return the positions of functions by kind and weights, in order, of those that are one alone.

    A weight is what requires a gradient and was made by none of the functions before.
    """
    made: set[Value | None] = {None}
    keys: list[Hashable] = []
    for call, kind in zip(side.calls, side.kinds, strict=True):
        values = [(item, value_of(item)) for item in call.items]
        weights = [value for item, value in values if item.state == INPUT and item.requires_grad and value not in made]
        keys.append((kind, *weights) if weights else None)
        made.update(value for _, value in values)
    counts = Counter(keys)
    return {key: at for at, key in enumerate(keys) if key is not None and counts[key] == 1}
