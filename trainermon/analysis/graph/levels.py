"""How far ranks that share a model are put together: each alone, tensor parallel ones as one, or the whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from trainermon.analysis.compare.comparison import CompareOptions, pairs_of
from trainermon.analysis.compare.merging.splits import layout_at
from trainermon.analysis.graph.reading import DumpGraph, read_graphs
from trainermon.core.errors import DumpError

EACH, TP, MODEL = "each", "tp", "model"
LEVELS: Mapping[str, tuple[str, ...]] = {EACH: (), TP: ("tp",), MODEL: ("tp", "pp")}
"""The axes along which each level puts ranks together. Replicas stay apart: they have data of their own."""
MAX_NODES = 200_000
"""A page has all levels, if none was asked for, up to so many nodes: each level costs a comparison."""
_WORDS = {TP: "tp merged", MODEL: "whole model"}
_APART = {"cp": "context", "ep": "expert"}


def read_levels(  # noqa: PLR0913  # which dumps, how far they are put together, and what for
    path: Path,
    golden: Path | None,
    level: str | None,
    *,
    options: CompareOptions,
    how: Mapping[str, int | bool | None],
    for_page: bool = False,
) -> list[DumpGraph]:
    """Return the graphs of the dumps below `path` at `level`, one of `LEVELS`; None: each rank.

    With None and `for_page` the other levels are read too, behind it, where they put other ranks together. `how` is the
    rest of what `read_graphs` takes.

    Raises:
        DumpError: As `read_graphs`; or ranks are to be put together where nothing is compared.
    """
    if golden is None:
        if level not in (None, EACH):
            raise DumpError(f"--level {level} puts ranks together to compare them: name the golden dump, too")
        return list(read_graphs(path, None, options=options, **how))  # type: ignore[arg-type]
    first = EACH if level is None else level
    graphs = list(_read(path, golden, first, options, how))
    if (
        level is None
        and for_page
        and how.get("rank") is None
        and sum(len(one.tree.nodes) for one in graphs) <= MAX_NODES
    ):
        for other in _other_levels(path, golden, options):
            graphs += _read(path, golden, other, options, how)
    return graphs


def axes_of(graph: DumpGraph) -> dict[str, tuple[int, int]]:
    """Return where the ranks of a graph stand, and how many places there are, along the axes on which all stand alike.

    Axes with one place are left out.
    """
    layouts = [layout_at(part) for part in graph.parts or (graph.directory,) if part.is_dir()]
    return {
        axis: place
        for axis, place in (layouts[0].axes.items() if layouts else ())
        if place[1] > 1 and all(one.axes.get(axis) == place for one in layouts)
    }


def _read(
    path: Path, golden: Path, level: str, options: CompareOptions, how: Mapping[str, int | bool | None]
) -> list[DumpGraph]:
    chosen = dataclasses.replace(options, merged=LEVELS[level])
    graphs = read_graphs(path, golden, options=chosen, **how)  # type: ignore[arg-type]
    return [_named(graph, level) if graph.parts and level != EACH else graph for graph in graphs]


def _named(graph: DumpGraph, level: str) -> DumpGraph:
    assert graph.comparison is not None
    step = [] if graph.step is None else [f"step{graph.step}"]
    label = " ".join([*step, _WORDS[level], *([] if graph.rank is None else [str(graph.rank)])])
    notes = list(graph.comparison.notes)
    if apart := [
        f"{_APART[axis]} parallel ({axis} {place})" for axis, (place, _) in axes_of(graph).items() if axis in _APART
    ]:
        notes.append(f"ranks that are {' and '.join(apart)} are not put together: this is one of their places")
    comparison = dataclasses.replace(graph.comparison, notes=tuple(notes))
    return graph._replace(label=label, level=level, comparison=comparison)


def _other_levels(path: Path, golden: Path, options: CompareOptions) -> list[str]:
    """Return the levels that put together other ranks than those before them; of two that do the same, the further."""
    found: dict[tuple[tuple[Path, ...], ...], str] = {}
    for level, axes in LEVELS.items():
        pairs = pairs_of(path, golden, dataclasses.replace(options, merged=axes))
        parts = tuple(tuple(part.directory for part in pair.target.parts) for pair in pairs)
        if any(parts) and found.get(parts) != EACH:
            found[parts] = level
    return [level for level in found.values() if level != EACH]
