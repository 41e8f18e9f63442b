"""How many series a rank may show, and which modules are merged or chosen so that they fit.

Decided when series are registered and from what is known then (names and sizes), never from values: the labels of a run
do not depend on what happens in it, and every rank of a replicated model gets the same ones. Full detail stays in the
store.

Tensors that are parts of a module (parameters, gradients, optimizer state) are merged by `roll_up`. The modules shown
are a partition of the tensors:

* all modules down to the same depth, as deep as fits (`h.3.attn.q.weight` → `h.3.attn` → `h.3` → `h`);
* what is left of the budget goes to the largest ones, one level deeper each. A list of layers that does not fit as a
  whole is cut into ranges (`h.0-3`), so that the profile over depth stays;
* if not even the top level fits, its largest members and `(rest)`.

An activation is not the union of the activations inside the module, so it cannot be merged: `outermost` chooses.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from trainermon.core.values import Coordinates

REST = "(rest)"

_Name = TypeVar("_Name", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeriesBudget:
    """Upper limits on the number of series.

    Attributes:
        per_rank: Series of one rank, its share of the node's own series included.
        per_node: Series of all ranks of a node and of its agent.
        per_job: Series of all ranks and agents of a job.
    """

    per_rank: int = 300
    per_node: int = 5_000
    per_job: int = 100_000

    def of_rank(self, coordinates: Coordinates, *, node_series: int, num_local: int = 1) -> int:
        """Return how many series of its own a rank may have, 0 or more.

        An agent knows the sizes of the job, not the other agents: every rank gets an equal part of the job's and the
        node's limit, and bears an equal part of its node's `node_series`.

        Args:
            coordinates: Of the rank; only the sizes count.
            node_series: Series that the node has whatever its ranks do.
            num_local: Ranks seen on this node; counts if it is more than the launcher announced.
        """
        local = max(coordinates.local_world_size, num_local)
        limit = min(self.per_rank, self.per_job // coordinates.world_size, self.per_node // local)
        return max(0, limit - -(-node_series // local))


def share(demands: Mapping[_Name, int], limit: int) -> dict[_Name, int]:
    """Divide `limit` among names: return what each gets of its demand, in equal parts.

    What one does not need the others get.
    """
    granted: dict[_Name, int] = {}
    for position, name in enumerate(sorted(demands, key=lambda name: (demands[name], str(name)))):
        granted[name] = min(demands[name], limit // (len(demands) - position))
        limit -= granted[name]
    return granted


def outermost(names: Iterable[str], limit: int) -> list[str]:
    """Return at most `limit` of the dotted names: whole levels from the outside in, then a part of the next level.

    That part is evenly spaced in natural order, so that of 80 layers every fourth is kept and not the first 20.
    """
    levels: dict[int, list[str]] = {}
    for name in sorted(set(names), key=_natural):
        levels.setdefault(name.count("."), []).append(name)
    chosen: list[str] = []
    for depth in sorted(levels):
        free = limit - len(chosen)
        if free <= 0:
            break
        chosen += levels[depth][:: -(-len(levels[depth]) // free)]
        if len(levels[depth]) > free:
            break
    return chosen


def roll_up(elements: Mapping[str, int], limit: int) -> dict[str, str]:
    """Choose, for each module name, the label under which it is shown, so that there are at most `limit` labels.

    Args:
        elements: Number of elements by dotted name; more elements are shown in more detail.
        limit: Most labels; 0 gives an empty result.

    A label is the name itself or a module above it. The same input gives the same output, whatever its order. Linear in
    the length of all names, plus a sort.
    """
    if limit <= 0:
        return {}
    if len(elements) <= limit:
        return {name: name for name in elements}
    shown = _partition(_tree(elements), limit)
    return {name: _label(name, shown) for name in elements}


@dataclasses.dataclass(slots=True)
class _ModuleNode:
    """A module: its path, the number of elements in and below it, whether its path is a name too."""

    path: str
    elements: int = 0
    named: bool = False
    children: dict[str, _ModuleNode] = dataclasses.field(default_factory=dict)

    def below(self) -> list[_ModuleNode]:
        """Return what it consists of, in natural order; nothing for a leaf."""
        if not self.children:
            return []
        own = [_ModuleNode(self.path)] if self.named else []
        return own + [self.children[part] for part in sorted(self.children, key=_natural)]

    @property
    def rank(self) -> tuple[int, tuple[tuple[int, str], ...]]:
        """Sort key: the largest first, then in natural order."""
        return -self.elements, _natural(self.path)


def _tree(elements: Mapping[str, int]) -> _ModuleNode:
    root = _ModuleNode("")
    for name, count in elements.items():
        node = root
        path = ""
        for part in name.split("."):
            path = part if node is root else f"{path}.{part}"
            node = node.children.setdefault(part, _ModuleNode(path))
            node.elements += count
        node.named = True
    return root


def _partition(root: _ModuleNode, limit: int) -> dict[str, str]:
    """Return a label by the path of each node of the cut; a name belongs to the longest path that it begins with."""
    level = root.below()
    if len(level) > limit:
        largest = sorted(level, key=lambda node: node.rank)[: limit - 1]
        return {node.path: node.path for node in largest}
    while True:
        deeper = [part for node in level for part in (node.below() or [node])]
        if len(deeper) > limit:  # happens: there are more names than the limit
            return _refine(level, limit - len(level))
        level = deeper


def _refine(level: list[_ModuleNode], free: int) -> dict[str, str]:
    """Return the labels of the cut by path, after its largest nodes were given `free` more."""
    shown = {node.path: node.path for node in level}
    queue = [(node.rank, node) for node in level if node.children]
    heapq.heapify(queue)
    while queue:
        _, node = heapq.heappop(queue)
        below = node.below()
        if len(below) - 1 <= free:
            labels = {part.path: part.path for part in below}
            for part in below:
                if part.children:
                    heapq.heappush(queue, (part.rank, part))
        else:
            labels = _ranges(node, below, free + 1)
        if labels:
            del shown[node.path]
            shown |= labels
            free -= len(set(labels.values())) - 1
    return shown


def _ranges(node: _ModuleNode, below: list[_ModuleNode], limit: int) -> dict[str, str]:
    """Return at most `limit` labels for contiguous ranges of numbered parts; none if they are not numbered."""
    numbers = [part.path.rpartition(".")[2] for part in below]
    if limit < 2 or node.named or not all(map(str.isdecimal, numbers)):
        return {}
    width = -(-len(below) // limit)
    labels: dict[str, str] = {}
    for first in range(0, len(below), width):
        members = numbers[first : first + width]
        label = f"{node.path}.{members[0]}" + (f"-{members[-1]}" if len(members) > 1 else "")
        labels |= {part.path: label for part in below[first : first + width]}
    return labels


def _label(name: str, shown: Mapping[str, str]) -> str:
    path = name
    while path not in shown:
        path, dot, _ = path.rpartition(".")
        if not dot:
            return REST
    return shown[path]


def _natural(path: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that puts `h.2` before `h.10`."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in path.split("."))
