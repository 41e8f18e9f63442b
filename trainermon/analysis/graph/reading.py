"""Reads the dumps that a person names as graphs: one by one, or each against its partner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainermon.analysis.compare.comparison import CompareOptions, Comparison, compare_pair, pairs_of
from trainermon.analysis.compare.merging.merge import read_sides
from trainermon.analysis.compare.merging.places import DumpLocation, PlacePair, find_places
from trainermon.analysis.graph.calls import read_calls
from trainermon.analysis.graph.database.reading import read_database
from trainermon.analysis.graph.database.schema import SUFFIX
from trainermon.analysis.graph.findings import GraphFindings, judge_against, judge_alone
from trainermon.analysis.graph.merged import calls_of_rows
from trainermon.analysis.graph.nesting import nest_by_stack
from trainermon.analysis.graph.tree import GraphNode, GraphTree, build_tree, number_nodes
from trainermon.analysis.graph.union import join_trees
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import read_stacks
from trainermon.dump.files.sources import Sources, read_sources

WHOLE_MODEL = "model"
"""What the root is called where several ranks are one: none of them tells the class of the whole."""
MAX_NAMED = 12
"""How many dumps are named one by one where there may be many."""


class DumpGraph(NamedTuple):
    """The graph of one dump, or of ranks that share a model, and what is wrong with it.

    Attributes:
        label: Step and rank.
        directory: The folder of the dump, or that of all ranks; the file where it comes from a `.vis.db`.
        tree: Its tree.
        found: What is wrong.
        comparison: What it was compared with; None: it is judged alone.
        step: None: not known.
        rank: Likewise; of several ranks which whole it is.
        parts: The folders of the dumps that it was put together from; none: it is one.
        level: How far ranks were put together, see `levels.py`.
    """

    label: str
    directory: Path
    tree: GraphTree
    found: GraphFindings
    comparison: Comparison | None
    step: int | None = None
    rank: int | None = None
    parts: tuple[Path, ...] = ()
    level: str = "each"

    def stacks(self) -> Mapping[str, Sequence[str]]:
        """Return the lines that made each call of the target, by its key, innermost first; reads a dump's stack.json.

        Raises:
            DumpError: It is damaged.
        """
        return read_stacks(self.directory) if self.comparison is None else self.comparison.stacks

    def sources(self) -> Iterator[Sources]:
        """Yield what each of its dumps has kept of the source code.

        Raises:
            DumpError: One is damaged.
        """
        for directory in self.parts or (self.directory,):
            if directory.is_dir():
                yield read_sources(directory)


def read_graphs(  # noqa: PLR0913  # which dumps, and how they are held against each other and shown
    path: Path,
    golden: Path | None = None,
    *,
    step: int | None = None,
    rank: int | None = None,
    options: CompareOptions | None = None,
    by_stack: bool = False,
) -> Iterator[DumpGraph]:
    """Yield the graph of each dump below `path`, held against its partner below `golden` if that is given.

    Only of `step` and `rank`, where they are given. `options` say how dumps are compared. With `by_stack` the calls
    that no module is known for are in the functions of the script that made them.

    `path` may be a `.vis.db` file of msprobe's.

    Raises:
        DumpError: There is no dump of that step and rank, or one is damaged.
    """
    if path.name.endswith(SUFFIX):
        if golden is not None:
            raise DumpError(f"{path} is a graph already, and is not compared: name two dumps, or the file alone")
        for graph in read_database(path, step=step, rank=rank):
            yield DumpGraph(graph.label, path, graph.tree, graph.found, None, graph.step, graph.rank)
        return
    options = options or CompareOptions()
    places: list[tuple[DumpLocation, PlacePair | None]] = []
    if golden is None:
        places += [(place, None) for place in find_places(path)]
    else:
        places += [(pair.target, pair) for pair in pairs_of(path, golden, options)]
    wanted = [(place, pair) for place, pair in places if _is_wanted(place, step, rank)]
    if not wanted:
        raise DumpError(f"{path} has no dump of that step and rank: expected one of {_names(places)}")
    for place, pair in wanted:
        yield _alone(place, by_stack=by_stack) if pair is None else _against(pair, options, by_stack=by_stack)


def _alone(place: DumpLocation, *, by_stack: bool) -> DumpGraph:
    root = build_tree(*read_calls(place.directory))
    if by_stack:
        nest_by_stack(root, read_stacks(place.directory))
    tree = number_nodes(root)
    return DumpGraph(
        _label(place), place.directory, tree, judge_alone(tree, place.directory), None, place.step, place.rank
    )


def _against(pair: PlacePair, options: CompareOptions, *, by_stack: bool) -> DumpGraph:
    comparison = compare_pair(pair, options)
    root, golden = _trees(pair)
    join_trees(root, golden, _partners(comparison))
    if by_stack:
        nest_by_stack(root, comparison.stacks)
    tree = number_nodes(root)
    found, ours = judge_against(tree, comparison), pair.target
    parts = tuple(part.directory for part in ours.parts)
    return DumpGraph(_label(ours), ours.directory, tree, found, comparison, ours.step, ours.rank, parts)


def _trees(pair: PlacePair) -> tuple[GraphNode, GraphNode]:
    """Return the trees of both sides; where ranks of a side share a model, that of the whole."""
    if not any(place.parts for place in pair):
        ours, theirs = (build_tree(*read_calls(place.directory)) for place in pair)
        return ours, theirs
    target, golden, _ = read_sides(pair.target, pair.golden)
    ours, theirs = (build_tree(calls_of_rows(rows), WHOLE_MODEL) for rows in (target, golden))
    return ours, theirs


def _partners(comparison: Comparison) -> dict[str, tuple[str, ...]]:
    """Return the keys of the target's calls that each golden call is held against, by its key."""
    return {
        theirs: comparison.members_of(one.target.key)
        for one in comparison.calls
        if one.golden and one.target
        for theirs in comparison.members_of(one.golden.key)
    }


def _is_wanted(place: DumpLocation, step: int | None, rank: int | None) -> bool:
    return step in (None, place.step) and rank in (None, place.rank)


def _label(place: DumpLocation) -> str:
    return PlacePair(place, place).label or place.directory.name


def _names(places: Sequence[tuple[DumpLocation, object]]) -> str:
    names = [_label(place) for place, _ in places]
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
