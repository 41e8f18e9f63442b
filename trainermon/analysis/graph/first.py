"""Which of several graphs is shown first: that of the rank where it began, before it reached the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainermon.analysis.graph.levels import axes_of
from trainermon.analysis.graph.reading import DumpGraph
from trainermon.analysis.graph.tree import GraphKind
from trainermon.dump.files.records import BACKWARD


class Beginning(NamedTuple):
    """When the first finding of a graph ran; sorts as they ran.

    Attributes:
        step: Its step; 0: not known.
        micro_step: Its place among the micro steps.
        is_backward: Whether it ran in the backward.
        stage: Its pipeline stage; negative in a backward, which runs the other way round.
        node: Its node.
    """

    step: int
    micro_step: int
    is_backward: bool
    stage: int
    node: int


def first_of(beginnings: Sequence[Beginning | None]) -> int:
    """Return the place of the graph whose first finding ran first; of none that has one (None), the first graph.

    A fault reaches other ranks through what they exchange, and these have findings of their own then. Forwards come
    before backwards, and run from the first pipeline stage to the last; on one stage ranks run the same calls.
    """
    wrong = [(beginning, place) for place, beginning in enumerate(beginnings) if beginning is not None]
    return min(wrong)[1] if wrong else 0


def began(graph: DumpGraph) -> Beginning | None:
    """Return when the first finding of a graph ran; None: it has none."""
    if not graph.found.findings:
        return None
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
    return Beginning(
        graph.step or 0, number, is_backward, -stage if is_backward else stage, graph.found.findings[0].node
    )
