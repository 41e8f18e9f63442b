"""Which elements of two sequences belong together, where each has some that the other has not.

Source: E. W. Myers, Algorithmica 1 (1986), the greedy algorithm for the shortest edit script.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

MAX_EDITS = 1000
"""With more elements on one side only, the n-th of each kind is paired with the n-th: costs grow with the square."""

Pairs = Iterator[tuple[int, int]]


def align(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the longest matching of two sequences: pairs (position in `ours`, position in `theirs`) of equal elements.

    Positions rise in both, as in `diff`.

    >>> align("abcd", "xabd")
    [(0, 1), (1, 2), (3, 3)]
    """
    start, stop = _common(ours, theirs)
    ends = len(ours) - stop, len(theirs) - stop
    middle = _middle(ours[start : ends[0]], theirs[start : ends[1]])
    before = [(index, index) for index in range(start)]
    after = [(ends[0] + index, ends[1] + index) for index in range(stop)]
    return [*before, *((start + one, start + other) for one, other in middle), *after]


def _common(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> tuple[int, int]:
    """Return how many elements are the same at the beginning, and how many of the others at the end."""
    shorter = min(len(ours), len(theirs))
    start = 0
    while start < shorter and ours[start] == theirs[start]:
        start += 1
    stop = 0
    while stop < shorter - start and ours[-1 - stop] == theirs[-1 - stop]:
        stop += 1
    return start, stop


def _middle(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> list[tuple[int, int]]:
    if not ours or not theirs:
        return []
    reached = _reach(ours, theirs)
    return list(_by_number(ours, theirs)) if reached is None else list(_trace(reached, len(ours), len(theirs)))[::-1]


def _reach(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> list[dict[int, int]] | None:
    """Return for every number of edits how far each diagonal was reached before it; None if there are too many."""
    furthest = {1: 0}
    history = []
    for edits in range(min(MAX_EDITS, len(ours) + len(theirs)) + 1):
        history.append(dict(furthest))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1])
            x = furthest[diagonal + 1] if down else furthest[diagonal - 1] + 1
            y = x - diagonal
            while x < len(ours) and y < len(theirs) and ours[x] == theirs[y]:
                x, y = x + 1, y + 1
            furthest[diagonal] = x
            if x >= len(ours) and y >= len(theirs):
                return history
    return None


def _trace(history: Sequence[dict[int, int]], x: int, y: int) -> Pairs:
    """Yield the pairs on the shortest way back, from the last to the first."""
    for edits in range(len(history) - 1, -1, -1):
        furthest, diagonal = history[edits], x - y
        down = diagonal == -edits or (diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1])
        before = diagonal + 1 if down else diagonal - 1
        start = furthest[before] if edits else 0
        stop = start if down or not edits else start + 1
        while x > stop and y > 0 and x > 0:
            x, y = x - 1, y - 1
            yield x, y
        x, y = start, start - before


def _by_number(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> Pairs:
    places: dict[Hashable, list[int]] = defaultdict(list)
    for index in reversed(range(len(theirs))):
        places[theirs[index]].append(index)
    for index, element in enumerate(ours):
        if places[element]:
            yield index, places[element].pop()
