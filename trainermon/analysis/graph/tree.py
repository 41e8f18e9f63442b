"""The tree of a dump's calls: model > micro step > direction > modules > functions and parameters, as they ran."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.graph.calls import AFTER, GraphCall, read_calls
from trainermon.analysis.graph.values import ValueUse
from trainermon.dump.files.records import BACKWARD, FORWARD, PARAMETERS_GRAD

_T = TypeVar("_T")
_whole_number = re.compile(r"(?<![^. ])\d+(?![^. ])")


class GraphKind(IntEnum):
    """What a node of the graph stands for."""

    MODEL = 0
    MICRO_STEP = 1
    SECTION = 2
    MODULE = 3
    FUNCTION = 4
    COLLECTIVE = 5
    PARAMETER = 6
    GRADIENTS = 7


class NodeSide(IntEnum):
    """Which of two dumps has a node."""

    BOTH = 0
    TARGET = 1
    GOLDEN = 2


@dataclass(slots=True, eq=False)
class GraphNode:
    """A node while the tree is put together.

    Attributes:
        kind: What it stands for.
        name: What it is called below its parent.
        class_name: Class of a module; prefix of a function; "".
        direction: `forward`, `backward` or "".
        call: Its entry in the dump; None: a group.
        slot: Of a parameter: its place in the entry.
        children: What runs within it, in order.
        side: Which of two dumps has it.
    """

    kind: GraphKind
    name: str
    class_name: str
    direction: str
    call: GraphCall | None
    slot: str
    children: list[GraphNode]
    side: NodeSide = NodeSide.BOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTree:
    """All nodes in the order in which they began (pre-order): within node i are those after it, up to i + sizes[i].

    Attributes:
        nodes: The nodes.
        sizes: int32 [n]: nodes in the subtree, itself included.
        parents: int32 [n]: index of the parent; -1: the root.
        structures: int32 [n]: equal for subtrees with the same modules, functions and order, whatever their numbers.
    """

    nodes: tuple[GraphNode, ...]
    sizes: NDArray[np.int32]
    parents: NDArray[np.int32]
    structures: NDArray[np.int32]
    _known: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def worked_out(self, what: str, work: Callable[[], _T]) -> _T:
        """Return what `work` does, known as `what`; it is done once for all trees that are built alike.

        It may depend on the nodes and on which values are one, and on no statistics.
        """
        if what not in self._known:
            self._known[what] = work()
        return self._known[what]  # type: ignore[no-any-return]

    def with_nodes(self, nodes: tuple[GraphNode, ...]) -> GraphTree:
        """Return a tree that is built alike, with other `nodes`."""
        return replace(self, nodes=nodes)


def module_of(tree: GraphTree, place: int) -> str:
    """Return the innermost module that a node is in, or that it is, with its class: `layers.1.norm (RMSNorm)`.

    "" if there is none.
    """
    while place > 0:
        node = tree.nodes[place]
        if node.kind is GraphKind.MODULE and node.call is not None:
            return f"{node.call.module} ({node.call.class_name})"
        place = int(tree.parents[place])
    return ""


def read_tree(directory: Path) -> GraphTree:
    """Return the tree of the dump in `directory`: of one rank and step, of any level.

    Raises:
        DumpError: There is no dump, or it is damaged.
    """
    return number_nodes(build_tree(*read_calls(directory)))


def build_tree(calls: Mapping[str, GraphCall], root_class: str) -> GraphNode:
    """Return the root of the tree of `calls`, which are taken by their key."""
    nodes = {key: _node(call) for key, call in calls.items()}
    outermost = []
    for call in sorted(calls.values(), key=attrgetter("began")):
        node = nodes[call.key]
        if call.parent is None:
            outermost.append(node)
        else:
            parent = nodes[call.parent]
            if node.kind is parent.kind is GraphKind.MODULE:
                node.name = _below(call.module, calls[call.parent].module)
            parent.children.append(node)
    _cut_loops(nodes, outermost)
    root = _group(GraphKind.MODEL, root_class)
    root.children = _micro_steps(outermost)
    return root


def number_nodes(root: GraphNode) -> GraphTree:
    """Return the tree below `root` as columns."""
    nodes: list[GraphNode] = []
    parents: list[int] = []
    waiting = [(root, -1)]
    while waiting:
        node, parent = waiting.pop()
        place = len(nodes)
        nodes.append(node)
        parents.append(parent)
        waiting.extend((child, place) for child in reversed(node.children))
    sizes = [1] * len(nodes)
    within: list[list[int]] = [[] for _ in nodes]
    structures = [0] * len(nodes)
    known: dict[tuple[object, ...], int] = {}
    for place in range(len(nodes) - 1, -1, -1):
        node, parent = nodes[place], parents[place]
        what = (node.kind, node.class_name, node.direction, node.side, numberless(node.name))
        shape = (*what, *reversed(within[place]))
        structures[place] = known.setdefault(shape, len(known))
        if parent >= 0:
            sizes[parent] += sizes[place]
            within[parent].append(structures[place])
    return GraphTree(
        nodes=tuple(nodes),
        sizes=np.array(sizes, np.int32),
        parents=np.array(parents, np.int32),
        structures=np.array(structures, np.int32),
    )


@cache
def numberless(name: str) -> str:
    """Return a name without its numbers: `layers.3` is as `layers.4`, but `conv1` is not as `conv2`.

    >>> numberless("layers.3.mlp"), numberless("micro step 2"), numberless("conv1")
    ('layers..mlp', 'micro step ', 'conv1')
    """
    return _whole_number.sub("", name)


def _node(call: GraphCall) -> GraphNode:
    if call.direction == PARAMETERS_GRAD:
        kind, name = GraphKind.GRADIENTS, "gradients of parameters"
    elif call.is_module:
        kind, name = GraphKind.MODULE, call.module
    else:
        kind = GraphKind.COLLECTIVE if call.class_name == "Distributed" else GraphKind.FUNCTION
        name = call.module
    direction = BACKWARD if call.direction == PARAMETERS_GRAD else call.direction
    node = GraphNode(kind, name, call.class_name, direction, call, "", [])
    if kind is GraphKind.MODULE and direction == FORWARD:
        node.children = [
            GraphNode(GraphKind.PARAMETER, one.slot.partition(".")[2], "", direction, call, one.slot, [])
            for one in call.values
            if one.use is ValueUse.HELD
        ]
    return node


def _below(path: str, parent: str) -> str:
    """Return the part of `path` that differs from the module around it."""
    return path[len(parent) + 1 :] if path.startswith(f"{parent}.") else path


def _cut_loops(nodes: Mapping[str, GraphNode], outermost: list[GraphNode]) -> None:
    """Make what cannot be reached (a damaged dump says that two calls run within each other) outermost."""
    seen: set[int] = set()
    waiting = list(outermost)
    while waiting:
        node = waiting.pop()
        seen.add(id(node))
        waiting.extend(node.children)
    for node in nodes.values():
        if id(node) not in seen:
            fresh = [node]
            while fresh:
                one = fresh.pop()
                seen.add(id(one))
                one.children = [child for child in one.children if id(child) not in seen]
                fresh.extend(one.children)
            outermost.append(node)


def _group(kind: GraphKind, name: str, direction: str = "") -> GraphNode:
    return GraphNode(kind, name, "", direction, None, "", [])


def _micro_steps(outermost: Iterable[GraphNode]) -> list[GraphNode]:
    sections: defaultdict[int, dict[str, list[GraphNode]]] = defaultdict(dict)
    for node in outermost:
        assert node.call is not None
        number = node.call.micro_step
        sections[AFTER if number is None else number].setdefault(node.direction, []).append(node)
    groups = []
    for number, by_direction in sorted(sections.items(), key=lambda item: (item[0] == AFTER, item[0])):
        group = _group(GraphKind.MICRO_STEP, "after the backward" if number == AFTER else f"micro step {number}")
        if number == AFTER:
            group.children = [node for nodes in by_direction.values() for node in nodes]
        else:
            for direction in (FORWARD, BACKWARD):
                if direction in by_direction:
                    section = _group(GraphKind.SECTION, direction, direction)
                    section.children = by_direction[direction]
                    group.children.append(section)
        groups.append(group)
    return groups
