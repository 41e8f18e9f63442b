"""`trainermon graph`: the calls of a dump as a tree, what flows between them, and where it goes wrong."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainermon.analysis.compare.comparison import CompareOptions, Comparison, compare_pair, pairs_of
from trainermon.analysis.compare.merging.places import DumpLocation, PlacePair, find_places
from trainermon.analysis.graph.calls import read_calls
from trainermon.analysis.graph.document import as_document
from trainermon.analysis.graph.findings import GraphFindings, judge_against, judge_alone, worst_within
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.page.details import details_against, details_alone
from trainermon.analysis.graph.page.packing import PackedRank, pack
from trainermon.analysis.graph.page.page import render_page
from trainermon.analysis.graph.screen import TreeScreen, ancestors
from trainermon.analysis.graph.tree import GraphTree, build_tree, number_nodes, read_tree
from trainermon.analysis.graph.union import join_trees
from trainermon.analysis.tensor.screen import printable, table
from trainermon.core.errors import DumpError
from trainermon.core.private_files import replace_file

DIFFERENT = 3
"""With --exit-code; 1 and 2 stand for what could not be done, as in every command."""
DETAILS = ("all", "found")
_DEPTH = 1
_MAX_DETAILED = 20_000
_MAX_DUMPS = 12


class _DumpGraph(NamedTuple):
    """The graph of one dump, and what is wrong with it."""

    label: str
    directory: Path
    tree: GraphTree
    found: GraphFindings
    comparison: Comparison | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon graph`."""
    parser.add_argument("path", type=Path, help="a dump, or a folder of steps, ranks or a run; ours or msprobe's")
    parser.add_argument("golden", type=Path, nargs="?", help="the dump to hold it against, taken to be right")
    parser.add_argument("--step", type=int, help="only this step")
    parser.add_argument("--rank", type=int, help="only this rank")
    parser.add_argument(
        "--depth",
        type=int,
        default=_DEPTH,
        metavar="LEVELS",
        help=f"how many levels of calls to unfold (default: {_DEPTH}); what is wrong is always unfolded",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", help="write one page that needs nothing else")
    parser.add_argument(
        "--details",
        choices=DETAILS,
        help=f"whose tensors are in the page: all, or of findings (default: all up to {_MAX_DETAILED:,} nodes)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the screen, see docs/graph.md")
    parser.add_argument(
        "--exit-code", action="store_true", help=f"end with status {DIFFERENT} if a finding is shown, instead of 0"
    )


def main(args: argparse.Namespace) -> int:
    """Print the graph of one dump, or of the first that has a finding; return 0, or `DIFFERENT` if that was asked for.

    Raises:
        DumpError: There is no dump of that step and rank, or it is damaged.
    """
    graphs = list(_graphs(args))
    if args.json:
        documents = [as_document(one.directory, one.tree, one.found, find_flow(one.tree)) for one in graphs]
        sys.stdout.write(json.dumps(documents, indent=1) + "\n")
    else:
        sys.stdout.write(_screen(graphs, args.depth))
    if args.output is not None:
        _write_page(graphs, args)
    return DIFFERENT if args.exit_code and any(one.found.findings for one in graphs) else 0


def _graphs(args: argparse.Namespace) -> Iterator[_DumpGraph]:
    places: list[tuple[DumpLocation, PlacePair | None]] = []
    if args.golden is None:
        places += [(place, None) for place in find_places(args.path)]
    else:
        places += [(pair.target, pair) for pair in pairs_of(args.path, args.golden, CompareOptions())]
    wanted = [(place, pair) for place, pair in places if _is_wanted(place, args)]
    if not wanted:
        raise DumpError(f"{args.path} has no dump of that step and rank: expected one of {_names(places)}")
    for place, pair in wanted:
        yield _alone(place) if pair is None else _against(pair)


def _alone(place: DumpLocation) -> _DumpGraph:
    tree = read_tree(place.directory)
    return _DumpGraph(_label(place), place.directory, tree, judge_alone(tree, place.directory), None)


def _against(pair: PlacePair) -> _DumpGraph:
    for place in pair:
        if place.parts:
            raise DumpError(
                f"{place.directory} is the whole of {len(place.parts)} ranks, and the graph shows one: "
                "name a dump of one rank on each side, or see `trainermon compare`"
            )
    comparison = compare_pair(pair, CompareOptions())
    root, golden = (build_tree(*read_calls(place.directory)) for place in pair)
    join_trees(root, golden, {one.golden.key: one.target.key for one in comparison.calls if one.golden and one.target})
    tree = number_nodes(root)
    return _DumpGraph(_label(pair.target), pair.target.directory, tree, judge_against(tree, comparison), comparison)


def _shown(graphs: Sequence[_DumpGraph]) -> _DumpGraph:
    return next((one for one in graphs if one.found.findings), graphs[0])


def _write_page(graphs: Sequence[_DumpGraph], args: argparse.Namespace) -> None:
    ranks = [_packed(graph, _detailed(graph, args.details, len(graphs))) for graph in graphs]
    shown = _shown(graphs)
    page = render_page(f"{shown.tree.nodes[0].name}: {shown.found.sentence}", pack(ranks, str(args.golden or "")))
    try:
        replace_file(args.output, page.encode())
    except OSError as error:
        raise DumpError(f"cannot write {args.output}: {error.strerror}; choose another file with -o") from error
    sys.stderr.write(f"wrote {args.output}\n")


def _packed(graph: _DumpGraph, wanted: list[int]) -> PackedRank:
    if graph.comparison is None:
        details = details_alone(graph.tree, graph.directory, wanted)
    else:
        details = details_against(graph.tree, graph.comparison, wanted)
    flow = find_flow(graph.tree)
    return PackedRank(graph.label, str(graph.directory), graph.tree, graph.found, flow, details)


def _detailed(graph: _DumpGraph, choice: str | None, num_dumps: int) -> list[int]:
    places = range(len(graph.tree.nodes))
    if choice == "all" or (choice is None and len(places) * num_dumps <= _MAX_DETAILED):
        return list(places)
    wrong = {one.node for one in graph.found.findings}
    return sorted(wrong.union(*(ancestors(graph.tree, node) for node in wrong)))


def _is_wanted(place: DumpLocation, args: argparse.Namespace) -> bool:
    return args.step in (None, place.step) and args.rank in (None, place.rank)


def _label(place: DumpLocation) -> str:
    return PlacePair(place, place).label or place.directory.name


def _names(places: Sequence[tuple[DumpLocation, object]]) -> str:
    names = [_label(place) for place, _ in places]
    return ", ".join(names[:_MAX_DUMPS]) + (f" and {len(names) - _MAX_DUMPS} more" if len(names) > _MAX_DUMPS else "")


def _screen(graphs: Sequence[_DumpGraph], depth: int) -> str:
    lines = []
    if len(graphs) > 1:
        rows = [(one.label, f"{len(one.tree.nodes):,}", printable(one.found.sentence)) for one in graphs[:_MAX_DUMPS]]
        lines += [*table(("dump", "nodes", "what is wrong"), rows, left=3), ""]
        if len(graphs) > _MAX_DUMPS:
            lines[-1:] = [f"  and {len(graphs) - _MAX_DUMPS} more", ""]
    shown = _shown(graphs)
    is_bold = sys.stdout.isatty()
    sentence = printable(shown.found.sentence)
    lines += [f"\033[1m{sentence}\033[0m" if is_bold else sentence, ""]
    lines.append(f"{printable(shown.tree.nodes[0].name)}, {shown.label}: {len(shown.tree.nodes):,} nodes")
    screen = TreeScreen(
        tree=shown.tree,
        found=shown.found,
        worst=worst_within(shown.tree, shown.found.verdicts),
        depth=depth,
        colour=is_bold,
    )
    return "\n".join(lines) + "\n" + screen.render()
