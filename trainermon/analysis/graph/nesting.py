"""Nests calls by the functions of the script in which they ran: for dumps of level L1, which name no module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import PurePath

from trainermon.analysis.graph.calls import partner_key
from trainermon.analysis.graph.tree import GraphKind, GraphNode
from trainermon.dump.files.records import FORWARD
from trainermon.dump.files.sources import SourceFrame, parse_frame

_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen")
_Nested = tuple[tuple[str, ...], GraphNode]


def nest_by_stack(root: GraphNode, stacks: Mapping[str, Sequence[str]]) -> None:
    """Put the outermost calls below `root` into the functions of the script in which they ran, named with their caller.

    That is done to functions, not to modules. Calls that follow each other in one function, called from one line, are
    one group; the order stays. A backward stands where its forward does. Functions of libraries are left out, and so
    are those that all calls have in common. `stacks` are the lines that made a call, by its key, innermost first; a
    call without them stays where it is.
    """
    for group in _groups(root):
        nested = [(_lines(child, stacks), child) for child in group.children]
        common = _num_common([lines for lines, _ in nested if lines is not None])
        group.children = list(_nest([((lines or ())[common:], child) for lines, child in nested], group.direction))


def _groups(root: GraphNode) -> Iterator[GraphNode]:
    """Yield the groups that have calls right within them: directions, and what comes after the last backward."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        groups = [child for child in node.children if child.call is None]
        if len(groups) < len(node.children):
            yield node
        waiting.extend(groups)


def _lines(node: GraphNode, stacks: Mapping[str, Sequence[str]]) -> tuple[str, ...] | None:
    """Return the functions of the user's in which a call ran and where each was called, outermost first.

    None: it is no call of a function, or no line of the user's is known to have made it.
    """
    if node.call is None or node.kind is GraphKind.MODULE:
        return None
    key = node.call.key
    own = _own(tuple(stacks.get(key) or stacks.get(partner_key(key, FORWARD), ())))
    if not own:
        return None
    return tuple(
        f"{inner.function} ({PurePath(outer.file).name}:{outer.line})" for outer, inner in pairwise(reversed(own))
    )


@lru_cache(maxsize=4096)
def _own(frames: tuple[str, ...]) -> tuple[SourceFrame, ...]:
    found = map(parse_frame, frames)
    return tuple(one for one in found if one is not None and not any(part in one.file for part in _LIBRARIES))


def _num_common(stacks: Sequence[tuple[str, ...]]) -> int:
    """Return how many of their first lines all have in common."""
    if not stacks:
        return 0
    first, last = min(stacks), max(stacks)
    pairs = zip(first, last, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(last)))


def _nest(nested: Sequence[_Nested], direction: str) -> Iterator[GraphNode]:
    for line, members in groupby(nested, key=lambda one: one[0][0] if one[0] else ""):
        if not line:
            yield from (child for _, child in members)
        else:
            within = [(lines[1:], child) for lines, child in members]
            group = GraphNode(GraphKind.MODULE, line, "", direction, None, "", [])
            group.children = list(_nest(within, direction))
            yield group
