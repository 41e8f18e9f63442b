"""How far ranks that share a model are put together: each alone, tensor parallel ones as one, or the whole model.

And which of several graphs is shown first: that of the rank where it began, before it reached the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainermon.analysis.compare.answer.summary import began_of
from trainermon.analysis.compare.comparison import CompareOptions, pairs_of
from trainermon.analysis.compare.merging.beginnings import Beginning, axes_at
from trainermon.analysis.graph.alike import AlikeTrees
from trainermon.analysis.graph.reading import DumpGraph, GraphPlace, find_graphs, read_graph
from trainermon.analysis.graph.tree import GraphKind
from trainermon.dump.files.records import BACKWARD

EACH, TP, MODEL = "each", "tp", "model"
LEVELS: Mapping[str, tuple[str, ...]] = {EACH: (), TP: ("tp",), MODEL: ("tp", "pp")}
"""The axes along which each level puts ranks together. Replicas stay apart: they have data of their own."""
MAX_NODES = 200_000
"""A page has all levels, if none was asked for, up to so many nodes: each level costs a comparison."""
_WORDS = {TP: "tp merged", MODEL: "whole model"}
_APART = {"cp": "context", "ep": "expert"}


def find_levels(  # noqa: PLR0913  # which dumps, and how far they are put together
    path: Path,
    golden: Path | None,
    level: str | None = None,
    *,
    options: CompareOptions,
    step: int | None = None,
    rank: int | None = None,
) -> list[GraphPlace]:
    """Return where the graphs of the dumps below `path` come from at `level`, one of `LEVELS`; None: each rank.

    Raises:
        DumpError: As `find_graphs`.
    """
    first = EACH if level is None else level
    chosen = dataclasses.replace(options, merged=LEVELS[first])
    places = find_graphs(path, golden, step=step, rank=rank, options=chosen)
    return [place._replace(level=first) for place in places]


def further_levels(
    path: Path, golden: Path, *, options: CompareOptions, step: int | None = None
) -> Iterator[GraphPlace]:
    """Yield where the graphs of the levels come from that put together other ranks than where each is alone.

    Raises:
        DumpError: As `find_graphs`.
    """
    for level in _other_levels(path, golden, options):
        yield from find_levels(path, golden, level, options=options, step=step)


def read_at_level(
    place: GraphPlace, *, options: CompareOptions, by_stack: bool = False, alike: AlikeTrees | None = None
) -> DumpGraph:
    """Return the graph that comes from `place`, with its ranks put together as its level says; else as `read_graph`.

    Raises:
        DumpError: A dump is damaged.
    """
    options = dataclasses.replace(options, merged=LEVELS[place.level])
    graph = read_graph(place, options=options, by_stack=by_stack, alike=alike)
    return _named(graph, place.level) if graph.parts and place.level != EACH else graph


def axes_of(graph: DumpGraph) -> dict[str, tuple[int, int]]:
    """Return where the ranks of a graph stand, and how many places there are, along the axes on which all stand alike.

    Axes with one place are left out.
    """
    return axes_at(*(graph.parts or (graph.directory,)))


def _named(graph: DumpGraph, level: str) -> DumpGraph:
    step = [] if graph.step is None else [f"step{graph.step}"]
    label = " ".join([*step, _WORDS[level], *([] if graph.rank is None else [str(graph.rank)])])
    remarks = graph.remarks
    if apart := [
        f"{_APART[axis]} parallel ({axis} {place})" for axis, (place, _) in axes_of(graph).items() if axis in _APART
    ]:
        remarks += (f"ranks that are {' and '.join(apart)} are not put together: this is one of their places",)
    return graph._replace(label=label, level=level, remarks=remarks)


def _other_levels(path: Path, golden: Path, options: CompareOptions) -> list[str]:
    """Return the levels that put together other ranks than those before them; of two that do the same, the further."""
    found: dict[tuple[tuple[Path, ...], ...], str] = {}
    for level, axes in LEVELS.items():
        pairs = pairs_of(path, golden, dataclasses.replace(options, merged=axes)).pairs
        parts = tuple(tuple(part.directory for part in pair.target.parts) for pair in pairs)
        if any(parts) and found.get(parts) != EACH:
            found[parts] = level
    return [level for level in found.values() if level != EACH]


def began(graph: DumpGraph) -> Beginning | None:
    """Return when the first finding of a graph ran; None: it has none."""
    if not graph.found.findings:
        return None
    if graph.comparison is not None:
        return began_of(graph.comparison)
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
