"""The lines of code behind the nodes of a page's graphs, and the code around them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.graph.tree import GraphTree, NodeSide
from trainermon.analysis.source.excerpts import excerpt
from trainermon.dump.files.reader import stack_of
from trainermon.dump.files.sources import NO_SOURCES, Sources, is_library, parse_frame

NO_LINE = -1


class PageCode:
    """Takes up what is known of the code behind graph after graph.

    Attributes:
        lines: The innermost lines of the user's own code, `/a/model.py:118`, by their text: the number of each.
        excerpts: By a frame's text on one line: the number of the first line that was kept around it, its own, and the
            lines.
    """

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.excerpts: dict[str, Any] = {}

    def add(
        self,
        tree: GraphTree,
        stacks: Mapping[str, Sequence[str]],
        sources: Iterable[Sources],
        shown: Collection[str] | None,
    ) -> NDArray[np.int32]:
        """Return int32 [n]: which of `lines` made the call of each node; `NO_LINE` where that is not known.

        `stacks` are the frames by a call's key, `sources` what the dumps have kept of their code. Of the frames `shown`
        (None: of all) the code around them is taken up too, if it is kept, or its file on this machine still fits.
        """
        kept = (*sources, NO_SOURCES)
        for frame in {frame for stack in set(map(tuple, stacks.values())) for frame in stack}:
            text = " ".join(frame.split())
            if text not in self.excerpts and (shown is None or text in shown):
                parts = (excerpt(frame, one) for one in kept)
                part = next((part for part in parts if part is not None and part.context), None)
                if part is not None:
                    self.excerpts[text] = [part.context[0][0], part.line, [line for _, line in part.context]]
        return self._lines_of(tree, stacks)

    def _lines_of(self, tree: GraphTree, stacks: Mapping[str, Sequence[str]]) -> NDArray[np.int32]:
        known: dict[tuple[str, ...], int] = {(): NO_LINE}
        found = np.full(len(tree.nodes), NO_LINE, np.int32)
        for at, node in enumerate(tree.nodes):
            if node.call is not None and node.side is not NodeSide.GOLDEN:
                stack = stack_of(stacks, node.call.key)
                if stack not in known:
                    line = _own_line(stack)
                    known[stack] = NO_LINE if line is None else self.lines.setdefault(line, len(self.lines))
                found[at] = known[stack]
        return found


def _own_line(stack: Iterable[str]) -> str | None:
    frames = [frame for frame in map(parse_frame, stack) if frame is not None]
    found = next((frame for frame in frames if not is_library(frame.file)), frames[0] if frames else None)
    return found and f"{found.file}:{found.line}"
