"""Which neighbours are alike and are shown as one: layers, experts, micro steps, runs of functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.graph.tree import GraphTree

MAX_PERIOD = 32


class NodeFold(NamedTuple):
    """Neighbours in the tree that are shown as one.

    Attributes:
        members: Nodes of each repetition: a single one each for equal layers, several if they repeat as a group.
    """

    members: tuple[tuple[int, ...], ...]

    @property
    def first(self) -> tuple[int, ...]:
        """The nodes of the first repetition; those of the others are like them."""
        return self.members[0]


def children_of(tree: GraphTree, node: int) -> list[int]:
    """Return the children of a node, in order."""
    found, place, end = [], node + 1, node + int(tree.sizes[node])
    while place < end:
        found.append(place)
        place += int(tree.sizes[place])
    return found


def fold_children(
    tree: GraphTree, node: int, apart: Collection[int] = (), worst: Sequence[int] | NDArray[np.uint8] = ()
) -> Iterator[NodeFold]:
    """Yield the children of a node, neighbours that repeat together; those in `apart` always stand alone.

    A repetition has 1 to 32 neighbours, all of them like those before it: equal structures and, where `worst` says by
    node the worst verdict within it, equal verdicts. The one that covers most is taken, of several the shortest.
    """
    children = children_of(tree, node)
    shapes = [
        (-child, 0) if child in apart else (int(tree.structures[child]), int(worst[child]) if len(worst) else 0)
        for child in children
    ]
    at = 0
    while at < len(children):
        period, count = _repetition(shapes, at)
        yield NodeFold(tuple(tuple(children[at + k * period : at + (k + 1) * period]) for k in range(count)))
        at += period * count


def _repetition(shapes: Sequence[tuple[int, int]], at: int) -> tuple[int, int]:
    """Return the period and the number of repetitions that cover most from `at` on; (1, 1) if nothing repeats."""
    best = (1, 1)
    for period in range(1, MAX_PERIOD + 1):
        end = at + period
        while end < len(shapes) and shapes[end] == shapes[end - period]:
            end += 1
        count = (end - at) // period
        if count > 1 and count * period > best[0] * best[1]:
            best = (period, count)
    return best
