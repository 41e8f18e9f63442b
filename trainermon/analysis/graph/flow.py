"""Which call made the value that another takes: the edges of the graph.

An edge leads from the innermost call that gave a value to the innermost that takes it, and never out of a call that is
still running: what is drawn between two boxes are the edges between what is in them. A value that calls pass on
unchanged has several that gave it; the last before the taker counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from trainermon.analysis.graph.tree import GraphKind, GraphTree
from trainermon.analysis.graph.values import ValueUse


class ValueEdge(NamedTuple):
    """A value that one node makes and another takes.

    Attributes:
        producer: Index of the node that gave it, or of the parameter.
        consumer: Index of the node that takes it.
        num_bytes: Size of the value.
        is_exact: Whether the dump says that it is the same tensor; else it looks the same.
    """

    producer: int
    consumer: int
    num_bytes: int
    is_exact: bool


class FlowSummary(NamedTuple):
    """The edges, and how many taken values have one.

    Attributes:
        edges: The edges by consumer.
        num_taken: Values that innermost calls take, parameters of their module included.
        num_entering: Of these, those that no call before gave: from outside, or through what was not dumped.
    """

    edges: tuple[ValueEdge, ...]
    num_taken: int
    num_entering: int


def find_flow(tree: GraphTree) -> FlowSummary:
    """Return the edges of `tree`. Costs one pass over its values."""
    makers = _innermost(tree, (ValueUse.GIVEN, ValueUse.HELD))
    takers = _innermost(tree, (ValueUse.TAKEN,))
    edges, entering, taken = [], 0, 0
    for identity, uses in takers.items():
        places = [place for place, _ in makers.get(identity, ())]
        for consumer, num_bytes in uses:
            taken += 1
            producer = _last_before(tree, places, consumer)
            if producer is None:
                entering += 1
            else:
                edges.append(ValueEdge(producer, consumer, num_bytes, isinstance(identity, int)))
    edges.sort(key=lambda edge: (edge.consumer, edge.producer))
    return FlowSummary(tuple(edges), taken, entering)


def _innermost(tree: GraphTree, uses: Sequence[ValueUse]) -> dict[object, list[tuple[int, int]]]:
    """Return by value the places and sizes of the nodes that use it so and have none within them that does."""
    found: defaultdict[object, list[tuple[int, int]]] = defaultdict(list)
    sizes = tree.sizes.tolist()
    for place in range(len(tree.nodes) - 1, -1, -1):
        node = tree.nodes[place]
        if node.call is None:
            continue
        if node.kind is GraphKind.PARAMETER:
            values = [one for one in node.call.values if one.slot == node.slot and ValueUse.HELD in uses]
        else:
            values = [one for one in node.call.values if one.use in uses and one.use is not ValueUse.HELD]
        for value in {one.identity: one for one in values if one.identity is not None}.values():
            so_far = found[value.identity]
            if not so_far or so_far[-1][0] >= place + sizes[place]:
                so_far.append((place, value.num_bytes))
    for places in found.values():
        places.reverse()
    return found


def _last_before(tree: GraphTree, places: list[int], consumer: int) -> int | None:
    """Return the last of `places` before `consumer` that had ended when it began."""
    for at in range(bisect_left(places, consumer) - 1, -1, -1):
        if places[at] + tree.sizes[places[at]] <= consumer:
            return places[at]
    return None
