"""Which call made the value that another takes: the edges of the graph.

An edge leads from the innermost call that gave a value to the innermost that takes it, and never out of a call that is
still running: what is drawn between two boxes are the edges between what is in them. A value that calls pass on
unchanged has several that gave it; the last before the taker counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from trainermon.analysis.graph.tree import GraphKind, GraphTree
from trainermon.analysis.graph.values import ValueUse

_Uses = defaultdict[object, list[tuple[int, int]]]


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
    """Return the edges of `tree`. Costs one pass over its values, the first time."""
    return tree.worked_out("flow", partial(_flow, tree))


def _flow(tree: GraphTree) -> FlowSummary:
    sizes = tree.sizes.tolist()
    makers, takers = _innermost(tree, sizes)
    edges, entering, taken = [], 0, 0
    for identity, uses in takers.items():
        places = [place for place, _ in makers.get(identity, ())]
        for consumer, num_bytes in uses:
            taken += 1
            producer = _last_before(sizes, places, consumer)
            if producer is None:
                entering += 1
            else:
                edges.append(ValueEdge(producer, consumer, num_bytes, isinstance(identity, int)))
    edges.sort(key=lambda edge: (edge.consumer, edge.producer))
    return FlowSummary(tuple(edges), taken, entering)


def _innermost(tree: GraphTree, sizes: Sequence[int]) -> tuple[_Uses, _Uses]:
    """Return by value the places and sizes of the nodes that make it, and of those that take it.

    Left out are nodes that have one within them that does the same. A parameter is made by its node.
    """
    makers: _Uses = defaultdict(list)
    takers: _Uses = defaultdict(list)
    for place in range(len(tree.nodes) - 1, -1, -1):
        node = tree.nodes[place]
        if node.call is None:
            continue
        end = place + sizes[place]
        is_parameter = node.kind is GraphKind.PARAMETER
        for use, slot, identity, num_bytes, *_ in node.call.values:
            if identity is None or (use is ValueUse.HELD) is not is_parameter or (is_parameter and slot != node.slot):
                continue
            so_far = (takers if use is ValueUse.TAKEN else makers)[identity]
            if not so_far or so_far[-1][0] >= end:
                so_far.append((place, num_bytes))
    for uses in (makers, takers):
        for places in uses.values():
            places.reverse()
    return makers, takers


def _last_before(sizes: Sequence[int], places: Sequence[int], consumer: int) -> int | None:
    """Return the last of `places` before `consumer` that had ended when it began."""
    for at in range(bisect_left(places, consumer) - 1, -1, -1):
        if places[at] + sizes[places[at]] <= consumer:
            return places[at]
    return None
