"""`trainermon graph`: the calls of a dump as a tree, what flows between them, and where it goes wrong."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trainermon.analysis.compare.comparison import collector_off
from trainermon.analysis.graph.document import as_document
from trainermon.analysis.graph.findings import worst_within
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.page.details import details_against, details_alone
from trainermon.analysis.graph.page.packing import PackedRank, pack
from trainermon.analysis.graph.page.page import render_page
from trainermon.analysis.graph.reading import MAX_NAMED, DumpGraph, read_graphs
from trainermon.analysis.graph.screen import TreeScreen, ancestors
from trainermon.analysis.tensor.screen import printable, table
from trainermon.core.errors import DumpError
from trainermon.core.private_files import replace_file

DIFFERENT = 3
"""With --exit-code; 1 and 2 stand for what could not be done, as in every command."""
DETAILS = ("all", "found")
_DEPTH = 1
_MAX_DETAILED = 20_000


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
    with collector_off():
        return _show(args)


def _show(args: argparse.Namespace) -> int:
    graphs = list(read_graphs(args.path, args.golden, step=args.step, rank=args.rank))
    if args.json:
        documents = [as_document(one.directory, one.tree, one.found, find_flow(one.tree)) for one in graphs]
        sys.stdout.write(json.dumps(documents, indent=1) + "\n")
    else:
        sys.stdout.write(_screen(graphs, args.depth))
    if args.output is not None:
        _write_page(graphs, args)
    return DIFFERENT if args.exit_code and any(one.found.findings for one in graphs) else 0


def _shown(graphs: Sequence[DumpGraph]) -> DumpGraph:
    return next((one for one in graphs if one.found.findings), graphs[0])


def _write_page(graphs: Sequence[DumpGraph], args: argparse.Namespace) -> None:
    ranks = [_packed(graph, _detailed(graph, args.details, len(graphs))) for graph in graphs]
    shown = _shown(graphs)
    page = render_page(f"{shown.tree.nodes[0].name}: {shown.found.sentence}", pack(ranks, str(args.golden or "")))
    try:
        replace_file(args.output, page.encode())
    except OSError as error:
        raise DumpError(f"cannot write {args.output}: {error.strerror}; choose another file with -o") from error
    sys.stderr.write(f"wrote {args.output}\n")


def _packed(graph: DumpGraph, wanted: list[int]) -> PackedRank:
    if graph.comparison is None:
        details = details_alone(graph.tree, graph.directory, wanted)
    else:
        details = details_against(graph.tree, graph.comparison, wanted)
    flow = find_flow(graph.tree)
    return PackedRank(graph.label, str(graph.directory), graph.tree, graph.found, flow, details)


def _detailed(graph: DumpGraph, choice: str | None, num_dumps: int) -> list[int]:
    places = range(len(graph.tree.nodes))
    if choice == "all" or (choice is None and len(places) * num_dumps <= _MAX_DETAILED):
        return list(places)
    wrong = {one.node for one in graph.found.findings}
    return sorted(wrong.union(*(ancestors(graph.tree, node) for node in wrong)))


def _screen(graphs: Sequence[DumpGraph], depth: int) -> str:
    lines = []
    if len(graphs) > 1:
        rows = [(one.label, f"{len(one.tree.nodes):,}", printable(one.found.sentence)) for one in graphs[:MAX_NAMED]]
        lines += [*table(("dump", "nodes", "what is wrong"), rows, left=3), ""]
        if len(graphs) > MAX_NAMED:
            lines[-1:] = [f"  and {len(graphs) - MAX_NAMED} more", ""]
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
