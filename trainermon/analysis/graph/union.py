"""Puts what the golden dump alone has into the tree of the target: two dumps become one graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain

from trainermon.analysis.graph.tree import GraphNode, NodeSide


def join_trees(target: GraphNode, golden: GraphNode, partners: Mapping[str, tuple[str, ...]]) -> None:
    """Add to the tree below `target` what only that below `golden` has, each behind what comes before it there.

    `partners` are the keys of the target's calls by those of their counterparts: several where these do together what
    the counterpart does. Nodes of the target that have none are marked, too.
    """
    found = {node.call.key: node for node in _below(target) if node.call is not None and not node.slot}
    for key in found.keys() - set(chain.from_iterable(partners.values())):
        found[key].side = NodeSide.TARGET
    counterparts = {key: found[ours[-1]] for key, ours in partners.items() if ours[-1] in found}
    waiting = [(target, golden)]
    while waiting:
        waiting.extend(_join(*waiting.pop(), counterparts))


def _join(
    target: GraphNode, golden: GraphNode, partners: Mapping[str, GraphNode]
) -> Iterator[tuple[GraphNode, GraphNode]]:
    """Add the children that `golden` alone has; yield those that both have."""
    own = set(map(id, target.children))
    behind: defaultdict[int | None, list[GraphNode]] = defaultdict(list)
    last = None
    for child in golden.children:
        partner = _partner(target, child, partners)
        if partner is not None:
            last = id(partner) if id(partner) in own else last
            yield partner, child
        elif not child.slot:  # of a parameter its call's rows say so
            for node in (child, *_below(child)):
                node.side = NodeSide.GOLDEN
            behind[last].append(child)
    target.children = [*behind[None], *(one for ours in target.children for one in (ours, *behind[id(ours)]))]


def _partner(target: GraphNode, child: GraphNode, partners: Mapping[str, GraphNode]) -> GraphNode | None:
    """Return the counterpart of a child of the golden tree; of groups that of the same name."""
    if child.call is not None and not child.slot:
        return partners.get(child.call.key)
    return next((one for one in target.children if one.kind is child.kind and one.name == child.name), None)


def _below(node: GraphNode) -> list[GraphNode]:
    found, waiting = [], list(node.children)
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting.extend(one.children)
    return found
