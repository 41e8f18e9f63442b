"""The graph of one dump on a terminal: what is alike folded, what is wrong unfolded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.graph.findings import GraphFindings, NodeVerdict
from trainermon.analysis.graph.folding import fold_children
from trainermon.analysis.graph.overflow import OverflowLevel
from trainermon.analysis.graph.tree import GraphKind, GraphTree, NodeSide
from trainermon.core.terminal.escapes import printable

MAX_LINES = 60
_MARKS = {NodeVerdict.UNMATCHED: "+", NodeVerdict.WARNING: "!", NodeVerdict.ERROR: "x", NodeVerdict.BLAMED: "▲"}
_COLOURS = {NodeVerdict.UNMATCHED: "36", NodeVerdict.WARNING: "33", NodeVerdict.ERROR: "31", NodeVerdict.BLAMED: "1;31"}
_GROUPS = (GraphKind.MODEL, GraphKind.MICRO_STEP, GraphKind.SECTION)
_number = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeScreen:
    """What of a tree is shown on a terminal.

    Attributes:
        tree: The tree.
        found: What is wrong with it.
        worst: uint8 [n]: the worst verdict within each node.
        depth: How many levels of calls below a direction are unfolded. What a finding is in always is.
        colour: Whether verdicts are coloured by escape codes.
        levels: uint8 [n]: the worst `OverflowLevel` within each node; None: levels are not shown.
    """

    tree: GraphTree
    found: GraphFindings
    worst: NDArray[np.uint8]
    depth: int
    colour: bool = False
    levels: NDArray[np.uint8] | None = None

    def render(self) -> str:
        """Return the tree as text, at most `MAX_LINES` lines."""
        wrong = {one.node: one.message for one in self.found.findings}
        shown = {self._kind_of_place(node): node for node in reversed(list(wrong))}.values()
        opened = {opened for node in shown for opened in (*ancestors(self.tree, node), node)}
        lines = list(self._below(0, 0, -2, opened, wrong))
        if len(lines) > MAX_LINES:
            lines = [*lines[:MAX_LINES], f"  … and {len(lines) - MAX_LINES:,} lines more: fewer with --depth"]
        return "".join(f"{line}\n" for line in lines)

    def _kind_of_place(self, node: int) -> str:
        """Return what findings of all micro steps at one place have in common: the first of them is unfolded."""
        return " ".join(self.tree.nodes[at].name for at in (*ancestors(self.tree, node), node)[2:])

    def _below(self, place: int, indent: int, level: int, opened: set[int], wrong: dict[int, str]) -> Iterator[str]:
        for fold in fold_children(self.tree, place, opened | wrong.keys(), self.worst):
            if len(fold.members) > 1 and len(fold.first) > 1:
                yield f"{'  ' * indent}  {len(fold.members)} times:"
            deeper = indent + (len(fold.members) > 1 and len(fold.first) > 1)
            for at, node in enumerate(fold.first):
                yield self._line([member[at] for member in fold.members], deeper, wrong.get(node, ""))
                is_group = self.tree.nodes[node].kind in _GROUPS
                if node in opened or is_group or level + 1 < self.depth:
                    yield from self._below(node, deeper + 1, level + 1, opened, wrong)

    def _line(self, alike: list[int], indent: int, message: str) -> str:
        verdict = NodeVerdict(max(int(self.worst[one]) for one in alike))
        times = f"  ×{len(alike)}" if len(alike) > 1 else ""
        said = f"  {message}" if message else ""
        level = 0 if self.levels is None else max(int(self.levels[one]) for one in alike)
        times += f"  {OverflowLevel(level).name.lower()}" if level else ""
        mark = "-" if self.tree.nodes[alike[0]].side is NodeSide.GOLDEN else _MARKS.get(verdict, " ")
        text = printable(f"{'  ' * indent}{mark} {self._name(alike)}{times}{said}")
        return f"\033[{_COLOURS[verdict]}m{text}\033[0m" if self.colour and verdict in _COLOURS else text

    def _name(self, alike: list[int]) -> str:
        first, last = self.tree.nodes[alike[0]], self.tree.nodes[alike[-1]]
        is_module = first.kind is GraphKind.MODULE and first.class_name
        return spanned(first.name, last.name) + (f" {first.class_name}" if is_module else "")


def spanned(first: str, last: str) -> str:
    """Return the name of several: `layers.0` and `layers.11` are `layers.0–11`.

    >>> spanned("layers.0.mlp", "layers.11.mlp"), spanned("linear", "linear")
    ('layers.0–11.mlp', 'linear')
    """
    ends = iter(_number.findall(last))
    return _number.sub(lambda found: _range(found[0], next(ends, found[0])), first)


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first}–{last}"


def path_of(tree: GraphTree, place: int) -> str:
    """Return the way to a node from its micro step on, as `micro step 0 > forward > layers.2 > n1 > weight`."""
    return " > ".join(tree.nodes[at].name for at in (*ancestors(tree, place), place) if at)


def ancestors(tree: GraphTree, place: int) -> list[int]:
    """Return what a node is in, outermost first."""
    found = []
    while (place := int(tree.parents[place])) >= 0:
        found.append(place)
    return found[::-1]
