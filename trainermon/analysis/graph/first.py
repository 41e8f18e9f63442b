"""Which of several graphs is shown first: that of the rank where it began, before it reached the others."""

from __future__ import annotations

from collections.abc import Sequence

from trainermon.analysis.graph.levels import axes_of
from trainermon.analysis.graph.reading import DumpGraph
from trainermon.analysis.graph.tree import GraphKind
from trainermon.dump.files.records import BACKWARD


def shown_first(graphs: Sequence[DumpGraph]) -> DumpGraph:
    """Return the graph whose first finding ran first; of none that has one, the first graph.

    A fault reaches other ranks through what they exchange, and these have findings of their own then. Forwards come
    before backwards, and run from the first pipeline stage to the last; on one stage ranks run the same calls.
    """
    wrong = [one for one in graphs if one.found.findings]
    return min(wrong, key=_began) if len(wrong) > 1 else next(iter(wrong), graphs[0])


def _began(graph: DumpGraph) -> tuple[int, int, bool, int, int]:
    parents, node = graph.tree.parents, graph.found.findings[0].node
    section = micro_step = node
    while node > 0:
        kind = graph.tree.nodes[node].kind
        section = node if kind is GraphKind.SECTION else section
        micro_step = node if kind is GraphKind.MICRO_STEP else micro_step
        node = int(parents[node])
    number = sum(int(parent) == 0 for parent in parents[1:micro_step])
    is_backward = graph.tree.nodes[section].direction == BACKWARD
    stage = axes_of(graph).get("pp", (0, 1))[0]
    return graph.step or 0, number, is_backward, -stage if is_backward else stage, graph.found.findings[0].node
