"""Reads the dumps that a person names as graphs: one by one, or each against its partner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trainermon.analysis.compare.comparison import CompareOptions, Comparison, compare_pair, pairs_of
from trainermon.analysis.compare.items import DumpRows
from trainermon.analysis.compare.merging.merge import read_sides, read_whole
from trainermon.analysis.compare.merging.places import DumpLocation, LonePlace, PlacePair, find_places, hollow_places
from trainermon.analysis.compare.merging.splits import find_wholes
from trainermon.analysis.graph.alike import AlikeTrees
from trainermon.analysis.graph.calls import read_calls
from trainermon.analysis.graph.database.reading import database_places, read_database
from trainermon.analysis.graph.database.schema import SUFFIX
from trainermon.analysis.graph.findings import GraphFindings, judge_against, judge_alone
from trainermon.analysis.graph.merged import calls_of_rows
from trainermon.analysis.graph.nesting import nest_by_stack
from trainermon.analysis.graph.tree import GraphNode, GraphTree, build_tree, number_nodes
from trainermon.analysis.graph.union import join_trees
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import gap_notes, read_stacks
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
        pair: Where both sides come from; None: it is judged alone.
        whole: The rows of ranks that were put together without another side; None: none were.
        remarks: What a reader should know of how that was done.
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
    pair: PlacePair | None = None
    whole: DumpRows | None = None
    remarks: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of how dumps were brought together."""
        return (*(self.comparison.notes if self.comparison is not None else ()), *self.remarks)

    def stacks(self) -> Mapping[str, Sequence[str]]:
        """Return the lines that made each call of the target, by its key, innermost first; reads a dump's stack.json.

        Raises:
            DumpError: It is damaged.
        """
        if self.whole is not None:
            return self.whole.stacks
        return read_stacks(self.directory) if self.comparison is None else self.comparison.stacks

    def sources(self) -> Iterator[Sources]:
        """Yield what each of its dumps has kept of the source code.

        Raises:
            DumpError: One is damaged.
        """
        for directory in self.parts or (self.directory,):
            if directory.is_dir():
                yield read_sources(directory)


class GraphPlace(NamedTuple):
    """Where one graph comes from; a worker process can be told.

    Attributes:
        target: The dump, or the ranks that share a model; of a `.vis.db` its file, and which graph of it.
        golden: What it is held against; None: nothing.
        level: How far ranks are put together, see `levels.py`.
    """

    target: DumpLocation
    golden: DumpLocation | None = None
    level: str = "each"

    @property
    def label(self) -> str:
        """Step and rank as text, as far as they are known; else the folder's name."""
        return _label(self.target)

    def folders(self) -> list[Path]:
        """Return all folders, or the file, that it is read from."""
        return [*self.target.folders, *(() if self.golden is None else self.golden.folders)]


def find_graphs(
    path: Path,
    golden: Path | None = None,
    *,
    step: int | None = None,
    rank: int | None = None,
    options: CompareOptions | None = None,
) -> list[GraphPlace]:
    """Return where the graphs of the dumps below `path` come from, each with its partner below `golden` if given.

    Only of `step` and `rank`, where they are given. `options` say which dumps are compared. `path` may be a `.vis.db`
    file of msprobe's.

    Raises:
        DumpError: There is no dump of that step and rank, or what there is cannot be compared.
    """
    if path.name.endswith(SUFFIX):
        if golden is not None:
            raise DumpError(f"{path} is a graph already, and is not compared: name two dumps, or the file alone")
        return [GraphPlace(DumpLocation(path, *place)) for place in database_places(path, step=step, rank=rank)]
    options = options or CompareOptions()
    if golden is None:
        places = [GraphPlace(place) for place in find_wholes(path, sizes=options.target_sizes, merged=options.merged)]
    else:
        places = [GraphPlace(*pair) for pair in pairs_of(path, golden, options).pairs]
    wanted = [one for one in places if _is_wanted(one.target, step, rank)]
    if not wanted:
        raise DumpError(f"{path} has no dump of that step and rank: expected one of {_names(places)}")
    return wanted


def lone_graphs(
    path: Path,
    golden: Path | None = None,
    *,
    step: int | None = None,
    rank: int | None = None,
    options: CompareOptions | None = None,
) -> list[LonePlace]:
    """Return what `find_graphs` leaves out of the same arguments: dumps of one side alone, ranks without a dump.

    Raises:
        DumpError: As `find_graphs`.
    """
    if path.name.endswith(SUFFIX):
        return []
    if golden is None:
        lone = hollow_places(path, {(place.step, place.rank) for place in find_places(path)})
    else:
        lone = pairs_of(path, golden, options or CompareOptions()).lone
    return [one for one in lone if _is_wanted(one.place, step, rank)]


def _is_wanted(place: DumpLocation, step: int | None, rank: int | None) -> bool:
    return step in (None, place.step) and rank in (None, place.rank)


def read_graph(
    place: GraphPlace,
    *,
    options: CompareOptions | None = None,
    by_stack: bool = False,
    alike: AlikeTrees | None = None,
) -> DumpGraph:
    """Return the graph that comes from `place`.

    `options` say how dumps are compared. With `by_stack` the calls that no module is known for are in the functions of
    the script that made them. `alike` has what the dumps that were read before may have in common with this one.

    Raises:
        DumpError: A dump is damaged.
    """
    target = place.target
    if target.directory.name.endswith(SUFFIX):
        graph = read_database(target.directory, step=target.step or 0, rank=target.rank or 0)
        return DumpGraph(graph.label, target.directory, graph.tree, graph.found, None, graph.step, graph.rank)
    if place.golden is None:
        return _whole(target, by_stack=by_stack) if target.parts else _alone(target, by_stack=by_stack, alike=alike)
    return _against(PlacePair(target, place.golden), options or CompareOptions(), by_stack=by_stack)


def read_graphs(
    path: Path,
    golden: Path | None = None,
    *,
    options: CompareOptions | None = None,
    by_stack: bool = False,
    damaged: list[LonePlace] | None = None,
    **which: int | None,
) -> Iterator[DumpGraph]:
    """Yield the graphs that `find_graphs` finds, each as `read_graph` reads it; `which`: their `step`, their `rank`.

    With `damaged`, of several dumps those that are so, or whose stacks are, are put there with the reason.

    Raises:
        DumpError: There is no dump of that step and rank, or one is damaged; with `damaged`, the only one or all.
    """
    places = find_graphs(path, golden, options=options, **which)
    read = partial(read_graph, options=options, by_stack=by_stack)
    if damaged is None:
        yield from map(read, places)
        return
    for place in places:
        if (graph := _read_or_note(read, place, damaged, len(places))) is not None:
            yield graph


def _read_or_note(
    read: Callable[[GraphPlace], DumpGraph], place: GraphPlace, damaged: list[LonePlace], num_places: int
) -> DumpGraph | None:
    try:
        graph = read(place)
        graph.stacks()
    except DumpError as error:
        if len(damaged) + 1 == num_places:
            raise
        damaged.append(LonePlace(place.target, str(place.target.directory), "", str(error)))
        return None
    return graph


def _alone(place: DumpLocation, *, by_stack: bool, alike: AlikeTrees | None) -> DumpGraph:
    calls, root_class = read_calls(place.directory)
    if alike is not None and not by_stack:
        tree = alike.tree_of(calls, root_class)
    else:
        root = build_tree(calls, root_class)
        if by_stack:
            nest_by_stack(root, read_stacks(place.directory))
        tree = number_nodes(root)
    found = judge_alone(tree, place.directory)
    graph = DumpGraph(_label(place), place.directory, tree, found, None, place.step, place.rank)
    return graph._replace(remarks=gap_notes(place.directory))


def _whole(place: DumpLocation, *, by_stack: bool) -> DumpGraph:
    rows, notes = read_whole(place)
    root = build_tree(calls_of_rows(rows), WHOLE_MODEL)
    if by_stack:
        nest_by_stack(root, rows.stacks)
    tree, parts = number_nodes(root), tuple(part.directory for part in place.parts)
    found = judge_alone(tree, *parts)
    graph = DumpGraph(_label(place), place.directory, tree, found, None, place.step, place.rank, parts=parts)
    return graph._replace(whole=rows, remarks=(*gap_notes(*parts), *notes))


def _against(pair: PlacePair, options: CompareOptions, *, by_stack: bool) -> DumpGraph:
    comparison = compare_pair(pair, options)
    root, golden = _trees(pair)
    join_trees(root, golden, _partners(comparison))
    if by_stack:
        nest_by_stack(root, comparison.stacks)
    tree = number_nodes(root)
    found, ours = judge_against(tree, comparison), pair.target
    parts = tuple(part.directory for part in ours.parts)
    return DumpGraph(
        _label(ours), ours.directory, tree, found, comparison, ours.step, ours.rank, parts=parts, pair=pair
    )


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


def _label(place: DumpLocation) -> str:
    return place.label or place.directory.name


def _names(places: Sequence[GraphPlace]) -> str:
    names = [place.label for place in places]
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
