"""`trainermon graph`: the calls of a dump as a tree, what flows between them, and where it goes wrong."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.compare.command import add_options, read_options
from trainermon.analysis.compare.comparison import collector_off
from trainermon.analysis.graph.database.schema import SUFFIX
from trainermon.analysis.graph.database.writing import write_database
from trainermon.analysis.graph.document import as_document
from trainermon.analysis.graph.findings import worst_within
from trainermon.analysis.graph.first import shown_first
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.levels import LEVELS, read_levels
from trainermon.analysis.graph.markdown import as_markdown
from trainermon.analysis.graph.overflow import overflow_levels, overflow_sentence
from trainermon.analysis.graph.page.output import (
    DETAILS,
    MAX_DETAILED,
    details_of,
    open_server,
    write_page,
)
from trainermon.analysis.graph.page.serving import LOOPBACK, GraphServer, serve
from trainermon.analysis.graph.reading import MAX_NAMED, DumpGraph
from trainermon.analysis.graph.screen import TreeScreen
from trainermon.analysis.tensor.screen import printable, table
from trainermon.core.errors import DumpError
from trainermon.core.private_files import replace_file
from trainermon.core.terminal.manners import has_colour, note
from trainermon.core.terminal.progress import ProgressBar

DIFFERENT = 3
"""With --exit-code; 1 and 2 stand for what could not be done, as in every command."""
NESTS = ("stack",)
_PAGE = ".html"
_ENDINGS = (_PAGE, ".md", SUFFIX)
_REFUSED = (".pdf", ".png", ".svg", ".json", ".txt", ".csv", ".htm", ".xlsx", ".db")
_DEPTH = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon graph`."""
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        help="a dump, or a folder of steps, ranks or a run, ours or msprobe's; or a .vis.db",
    )
    parser.add_argument("golden", type=Path, nargs="?", help="the dump to hold it against, taken to be right")
    for short, word, name in (("-tp", "--target_path", "path"), ("-gp", "--golden_path", "golden")):
        parser.add_argument(short, word, type=Path, metavar="DUMP", help=f"msprobe's: the same as `{name}`")
    parser.add_argument(
        "--nest",
        choices=NESTS,
        help="put calls that no module is known for, as in dumps of level L1, into the functions that made them",
    )
    parser.add_argument("--step", type=int, help="only this step")
    parser.add_argument("--rank", type=int, help="only this rank")
    parser.add_argument(
        "--level",
        choices=LEVELS,
        help="compare each rank, tensor parallel ranks put together, or the whole model (default: each; where both "
        "sides share the model differently, the whole; a page has all)",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=_DEPTH,
        metavar="LEVELS",
        help=f"how many levels of calls to unfold (default: {_DEPTH}); what is wrong is always unfolded",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write one page (.html), a text for an issue (.md), or msprobe's plugin's file (.vis.db); into a folder "
        "the last of these, named as msprobe does",
    )
    parser.add_argument(
        "--details",
        choices=DETAILS,
        help=f"whose tensors are in the page: all, or of findings (default: all up to "
        f"{MAX_DETAILED:,} nodes); beside: all, in FILE.details, for a server",
    )
    parser.add_argument(
        "--serve",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help=f"serve the page until Ctrl-C, to whoever has its address (default: {LOOPBACK}, a free port)",
    )
    parser.add_argument("--open", action="store_true", help="serve the page, and open it in the browser")
    parser.add_argument(
        "--overflow",
        "-oc",
        "--overflow_check",
        action="store_true",
        help="tell where values stop being finite, or grow at once, by msprobe's levels",
    )
    add_options(parser)
    for word in ("-tensor_log", "-progress_log"):
        parser.add_argument(word, action="store_true", help="msprobe's, without effect")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the screen, see docs/graph.md")
    parser.add_argument(
        "--exit-code", action="store_true", help=f"end with status {DIFFERENT} if a finding is shown, instead of 0"
    )


def main(args: argparse.Namespace) -> int:
    """Print the graph of one dump, or of the first that has a finding; return 0, or `DIFFERENT` if that was asked for.

    Raises:
        DumpError: There is no dump of that step and rank, or it is damaged.
    """
    args.path, args.golden = args.path or args.target_path, args.golden or args.golden_path
    if args.path is None:
        raise DumpError("nothing to draw was named: expected a dump, or a folder of dumps")
    if args.output is not None and not args.output.name.endswith(_ENDINGS):
        args.output = _named_as_msprobe(args.output, "build" if args.golden is None else "compare")
    with collector_off():  # until the graphs are gone: to look at them once takes as long as a tenth of reading them
        has_finding, server = _run(args)
    if server is not None:
        serve(server)
    return DIFFERENT if args.exit_code and has_finding else 0


def _run(args: argparse.Namespace) -> tuple[bool, GraphServer | None]:
    """Read the graphs and print them; return whether one has a finding, and the server that is asked for."""
    how = {"step": args.step, "rank": args.rank, "by_stack": args.nest == NESTS[0]}
    is_served = args.serve is not None or args.open
    for_page = is_served or (args.output is not None and args.output.name.endswith(_PAGE))
    with ProgressBar("reading dumps"):
        graphs = read_levels(args.path, args.golden, args.level, options=read_options(args), how=how, for_page=for_page)
    _show(graphs, args)
    server = None
    if is_served:
        sys.stdout.flush()
        server = open_server(graphs, args.serve or "", golden=str(args.golden or ""), in_browser=args.open)
    return any(one.found.findings for one in graphs), server


def _named_as_msprobe(folder: Path, kind: str) -> Path:
    """Return the name of a new file for msprobe's plugin in `folder`, which is made."""
    if folder.suffix.lower() in _REFUSED and not folder.is_dir():
        raise DumpError(
            f"{folder} cannot be written: expected a name that ends in {', '.join(_ENDINGS)}, or a folder; "
            "choose another with -o"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DumpError(
            f"{folder} cannot be made ({error.strerror}): expected a folder, or {', '.join(_ENDINGS)}"
        ) from error
    return folder / f"{kind}_{time.strftime('%Y%m%d%H%M%S')}{SUFFIX}"


def _show(graphs: Sequence[DumpGraph], args: argparse.Namespace) -> None:
    if args.json:
        documents = [
            as_document(one.directory, one.tree, one.found, find_flow(one.tree), overflow=args.overflow)
            for one in _told(graphs)
        ]
        sys.stdout.write(json.dumps(documents, indent=1) + "\n")
    else:
        sys.stdout.write(_screen(_told(graphs), args.depth, overflow=args.overflow))
    if args.output is not None:
        with ProgressBar(f"writing {args.output}"):
            _write(graphs, args)
        note(f"wrote {args.output}")


def _told(graphs: Sequence[DumpGraph]) -> list[DumpGraph]:
    """Return the graphs of the first level: what a page has beside them says the same once more."""
    return [one for one in graphs if one.level == graphs[0].level]


def _write(graphs: Sequence[DumpGraph], args: argparse.Namespace) -> None:
    if args.output.name.endswith(SUFFIX):
        write_database(args.output, graphs, overflow=args.overflow)
    elif args.output.suffix == ".md":
        _write_markdown(graphs, args)
    else:
        write_page(graphs, args.output, golden=str(args.golden or ""), choice=args.details)


def _write_markdown(graphs: Sequence[DumpGraph], args: argparse.Namespace) -> None:
    shown = shown_first(graphs)
    text = as_markdown(shown, details_of(shown), _tree(shown, args.depth), golden=str(args.golden or ""))
    try:
        replace_file(args.output, text.encode())
    except OSError as error:
        raise DumpError(f"cannot write {args.output}: {error.strerror}; choose another file with -o") from error


def _screen(graphs: Sequence[DumpGraph], depth: int, *, overflow: bool) -> str:
    lines = []
    if len(graphs) > 1:
        rows = [
            (printable(one.label), f"{len(one.tree.nodes):,}", printable(one.found.sentence))
            for one in graphs[:MAX_NAMED]
        ]
        lines += [*table(("dump", "nodes", "what is wrong"), rows, left=3), ""]
        if len(graphs) > MAX_NAMED:
            lines[-1:] = [f"  and {len(graphs) - MAX_NAMED} more", ""]
    shown = shown_first(graphs)
    is_bold = has_colour()
    sentence = printable(shown.found.sentence)
    lines += [f"\033[1m{sentence}\033[0m" if is_bold else sentence, ""]
    levels = overflow_levels(shown.tree) if overflow else None
    if levels is not None:
        lines[-1:] = [overflow_sentence(shown.tree, levels), ""]
    lines.append(f"{printable(shown.tree.nodes[0].name)}, {printable(shown.label)}: {len(shown.tree.nodes):,} nodes")
    notes = [f"note: {printable(note)}\n" for note in shown.comparison.notes] if shown.comparison else []
    return "\n".join(lines) + "\n" + _tree(shown, depth, colour=is_bold, levels=levels) + "".join(notes)


def _tree(graph: DumpGraph, depth: int, *, colour: bool = False, levels: NDArray[np.uint8] | None = None) -> str:
    return TreeScreen(
        tree=graph.tree,
        found=graph.found,
        worst=worst_within(graph.tree, graph.found.verdicts),
        depth=depth,
        colour=colour,
        levels=None if levels is None else worst_within(graph.tree, levels),
    ).render()
