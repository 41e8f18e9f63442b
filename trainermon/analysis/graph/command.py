"""`trainermon graph`: the calls of a dump as a tree, what flows between them, and where it goes wrong."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from trainermon.analysis.compare.answer.summary import placed
from trainermon.analysis.compare.command import add_options, read_options
from trainermon.analysis.compare.comparison import CompareOptions, collector_off
from trainermon.analysis.compare.mappings import write_matches
from trainermon.analysis.compare.merging.beginnings import Beginning, first_of
from trainermon.analysis.compare.merging.places import LonePlace
from trainermon.analysis.graph.chosen import MAX_NEAR
from trainermon.analysis.graph.database.schema import SUFFIX
from trainermon.analysis.graph.database.writing import write_database
from trainermon.analysis.graph.index import open_index
from trainermon.analysis.graph.levels import LEVELS, MAX_NODES, find_levels, further_levels
from trainermon.analysis.graph.meetings import NO_CALLS, find_meetings
from trainermon.analysis.graph.page.details import NodeDetails
from trainermon.analysis.graph.page.output import (
    BESIDE,
    DETAILS,
    MAX_DETAILED,
    DrawnGraphs,
    details_of,
    open_server,
    write_page,
)
from trainermon.analysis.graph.page.overlay import read_overlay
from trainermon.analysis.graph.page.serving import LOOPBACK, DetailsOf, GraphServer, serve
from trainermon.analysis.graph.reading import MAX_NAMED, DumpGraph, GraphPlace, lone_graphs
from trainermon.analysis.graph.report import GraphReport, ReportMaker, without_graph
from trainermon.analysis.graph.workers import report_on
from trainermon.analysis.tensor.screen import table
from trainermon.core.errors import DumpError
from trainermon.core.private_files import replace_file
from trainermon.core.terminal.escapes import printable
from trainermon.core.terminal.manners import has_colour, note
from trainermon.core.terminal.progress import ProgressBar, counted
from trainermon.core.terminal.statuses import add_exit_code, exit_status
from trainermon.dashboards.graph_notes import notes_file, read_notes

NESTS = ("stack",)
_PAGE = ".html"
_MATCHES = ".yaml"
_ENDINGS = (_PAGE, ".md", _MATCHES, SUFFIX)
_REFUSED = (".pdf", ".png", ".svg", ".json", ".txt", ".csv", ".htm", ".xlsx", ".db")
_DEPTH = 1
_MAX_OPEN = 2
"""So many graphs of many that are served stay in memory."""


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
        help="show each rank, tensor parallel ranks put together, or the whole model (default: each; where both sides "
        "share the model differently, the whole; a page of a comparison has all)",
    )
    parser.add_argument(
        "--node",
        metavar="KEY",
        help="tell all of this call instead of the tree: its key in the dump, or its path as the tree has it; the page "
        "that is served opens there",
    )
    parser.add_argument(
        "--overlay",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="lay your own numbers over the nodes, to colour the page by: json or csv, by a call's key, a module's "
        "path or a parameter's name; may be repeated",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=_DEPTH,
        metavar="LEVELS",
        help=f"how many levels of calls to unfold (default: {_DEPTH}); what is wrong is always unfolded",
    )
    _add_output(parser)
    add_options(parser)
    for word in ("-tensor_log", "-progress_log"):
        parser.add_argument(word, action="store_true", help="msprobe's, without effect")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the screen, see docs/graph.md")
    add_exit_code(parser, "a finding is shown", "not all could be judged")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write one page (.html), a text for an issue (.md), what was matched by hand as rules for --match (.yaml) "
        "or msprobe's plugin's file (.vis.db); into a folder the last of these, named as msprobe does",
    )
    parser.add_argument(
        "--details",
        choices=DETAILS,
        help=f"whose tensors are in the page: all, or of findings (default: all up to "
        f"{MAX_DETAILED:,} nodes); beside: all, in FILE.details, and what the page shows in FILE.pieces, for a server",
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
    parser.add_argument(
        "--jobs", type=_positive, metavar="N", help="read at most N dumps at a time (default: one for each core)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="where to keep what was read, so that it need not be read again (default: ~/.cache/trainermon/graph)",
    )
    parser.add_argument("--no-cache", action="store_true", help="read the dumps anew, and keep nothing")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of processes: expected 1 or more")
    return number


def main(args: argparse.Namespace) -> int:
    """Print the graph of one dump, or of the first that has a finding; return the exit status.

    Raises:
        DumpError: There is no dump of that step and rank, or it is damaged.
    """
    args.path, args.golden = args.path or args.target_path, args.golden or args.golden_path
    if args.path is None:
        raise DumpError("nothing to draw was named: expected a dump, or a folder of dumps")
    if args.output is not None and not args.output.name.endswith(_ENDINGS):
        args.output = _named_as_msprobe(args.output, "build" if args.golden is None else "compare")
    if args.output is not None and args.output.suffix == _MATCHES and not read_notes(args.path).matches:
        raise DumpError(
            f"{notes_file(args.path)} has no modules that were matched by hand: open the page with --serve, select "
            "them there, and press m"
        )
    reports, server = _run(args)
    if server is not None:
        serve(server)
    return exit_status(args, found=any(one.found for one in reports), whole=all(one.whole for one in reports))


def _run(args: argparse.Namespace) -> tuple[list[GraphReport], GraphServer | None]:
    """Read the graphs and print them; return what there is of them, and the server that is asked for."""
    options = read_options(args, args.path)
    places = find_levels(args.path, args.golden, args.level, options=options, step=args.step, rank=args.rank)
    maker = _maker(args, options, len(places))
    opened = None
    with ProgressBar("reading dumps"):
        if args.output is not None and args.output.name.endswith(SUFFIX):
            reports = _write_database(args, places, maker)
        elif _is_served(args) and len(places) == 1:
            with collector_off():
                graph = maker.read(places[0])
                reports, opened = [maker.report(graph)], details_of(graph)
        else:
            index = None if args.no_cache or args.details == BESIDE else open_index(args.cache)
            reports = list(report_on(places, maker, jobs=args.jobs, index=index))
            if maker.page and _has_all_levels(args, reports):
                further = _further_places(args, options)
                places += further
                reports += report_on(further, maker, jobs=args.jobs, index=index)
    places = _with_graphs(places, reports)
    lone = lone_graphs(args.path, args.golden, step=args.step, rank=args.rank, options=options)
    reports += [_lone_report(one, places[0].level) for one in lone]
    _show(reports, args)
    server = None
    if _is_served(args):
        sys.stdout.flush()
        details = _details(maker, places, opened)
        place = _place_in_page(args, reports)
        server = open_server(_drawn(args, reports), details, args.serve or "", in_browser=args.open, place=place)
    return reports, server


def _with_graphs(places: Sequence[GraphPlace], reports: Sequence[GraphReport]) -> list[GraphPlace]:
    """Return the places of dumps that could be read.

    Raises:
        DumpError: There is none.
    """
    if not any(one.num_nodes for one in reports):
        raise DumpError(f"none of {len(reports):,} dumps could be read. {reports[0].label}: {reports[0].sentence}")
    return [place for place, one in zip(places, reports, strict=True) if one.num_nodes]


def _further_places(args: argparse.Namespace, options: CompareOptions) -> list[GraphPlace]:
    """Return where the graphs of ranks come from that are put together; none, with a note, where they cannot be."""
    try:
        return list(further_levels(args.path, args.golden, options=options, step=args.step))
    except DumpError as error:
        note(f"the page has each rank by itself alone: {error}")
        return []


def _lone_report(lone: LonePlace, level: str) -> GraphReport:
    why = f"Not compared: {lone.why}." if lone.target or lone.golden else f"{lone.why}."
    return without_graph(lone.place.label, level, why)


def _place_in_page(args: argparse.Namespace, reports: Sequence[GraphReport]) -> str:
    """Return the part of the address that leads to the node that was asked for; "": none was."""
    if args.node is None:
        return ""
    shown = _shown(_told(reports))
    return f"#{urlencode({'of': shown.label, 'node': shown.chosen})}"


def _maker(args: argparse.Namespace, options: CompareOptions, num_dumps: int) -> ReportMaker:
    is_page = args.output is not None and args.output.suffix == _PAGE
    return ReportMaker(
        options=options,
        by_stack=args.nest == NESTS[0],
        depth=args.depth,
        colour=has_colour(),
        overflow=args.overflow,
        golden=str(args.golden or ""),
        num_dumps=num_dumps,
        document=args.json,
        markdown=args.output is not None and args.output.suffix == ".md",
        page=is_page or _is_served(args),
        details=args.details,
        served=args.details == BESIDE or not is_page,
        node=args.node,
        overlays=tuple(map(read_overlay, args.overlay)),
    )


def _is_served(args: argparse.Namespace) -> bool:
    return args.serve is not None or args.open


def _has_all_levels(args: argparse.Namespace, reports: Sequence[GraphReport]) -> bool:
    """Return whether a page has ranks put together, too: each level costs a comparison."""
    is_open = args.golden is not None and args.level is None and args.rank is None
    return is_open and sum(one.num_nodes for one in reports) <= MAX_NODES


def _drawn(args: argparse.Namespace, reports: Sequence[GraphReport]) -> DrawnGraphs:
    said, shown = _said(_told(reports)), _shown(_told(reports))
    reports = [one for one in reports if one.num_nodes]
    ranks = [one.rank for one in reports if one.rank is not None]
    meetings = find_meetings([one.collectives or NO_CALLS for one in reports])
    title = shown.title if said is shown else f"{shown.model}: {placed(said.label, said.sentence)}"
    first, notes = reports.index(shown), read_notes(args.path)
    return DrawnGraphs(title, ranks, meetings, first, str(args.golden or ""), notes, args.path)


def _details(maker: ReportMaker, places: Sequence[GraphPlace], opened: NodeDetails | None) -> DetailsOf:
    """Return what knows the tensors of each graph: `opened` those of a single one; else a dump is read once more.

    Those asked for last stay.
    """

    @lru_cache(maxsize=_MAX_OPEN)
    def details(rank: int) -> NodeDetails:
        if opened is not None:
            return opened
        with collector_off():
            return details_of(maker.read(places[rank]))

    return details


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


def _write_database(args: argparse.Namespace, places: Sequence[GraphPlace], maker: ReportMaker) -> list[GraphReport]:
    """Write msprobe's plugin's file, graph by graph; return the reports of all."""
    reports = []

    def noted() -> Iterator[DumpGraph]:
        for place in counted(places, len(places), "dumps"):
            try:
                graph = maker.read(place)
            except DumpError as error:
                if len(places) == 1:
                    raise
                reports.append(without_graph(place.label, place.level, f"Not judged: {error}."))
                continue
            reports.append(maker.report(graph))
            yield graph

    with collector_off():
        write_database(args.output, noted(), overflow=args.overflow)
    return reports


def _show(reports: Sequence[GraphReport], args: argparse.Namespace) -> None:
    told = _told(reports)
    if args.node is not None and all(one.chosen is None for one in told):
        raise DumpError(f"no graph has a node {args.node!r}; {_near(told)}")
    if args.json:
        sys.stdout.write(json.dumps(_documents(told), indent=1) + "\n")
    else:
        sys.stdout.write(_screen(told))
    if args.output is not None:
        _write(reports, args)
        note(f"wrote {args.output}")


def _near(reports: Sequence[GraphReport]) -> str:
    """Return, of graphs that have no node of the name that was asked for, what they have instead."""
    near = list(dict.fromkeys(name for one in reports for name in one.near))[:MAX_NEAR]
    of = f"of {max(one.num_nodes for one in reports):,} nodes"
    if not near:
        return f"{of} none is called alike; --depth 9, without --node, shows them"
    return f"{of} the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}"


def _told(reports: Sequence[GraphReport]) -> list[GraphReport]:
    """Return the graphs of the first level: what a page has beside them says the same once more."""
    return [one for one in reports if one.level == reports[0].level]


def _write(reports: Sequence[GraphReport], args: argparse.Namespace) -> None:
    """Write what `-o` asks for, but for a database, which is written while graphs are read."""
    if args.output.suffix == _PAGE:
        details = chain.from_iterable(one.details or () for one in reports) if args.details == BESIDE else None
        write_page(_drawn(args, reports), args.output, details)
        return
    try:
        if args.output.suffix == ".md":
            replace_file(args.output, (_shown(_told(reports)).markdown or "").encode())
        elif args.output.suffix == _MATCHES:
            write_matches(args.output, read_notes(args.path).matches)
    except OSError as error:
        raise DumpError(f"cannot write {args.output}: {error.strerror}; choose another file with -o") from error


def _shown(reports: Sequence[GraphReport]) -> GraphReport:
    """Return the graph that is told in full: the first with a finding, of those that have the node asked for."""
    graphs = [one for one in reports if one.num_nodes]
    known = [one for one in graphs if one.chosen is not None] or graphs
    return known[first_of([one.began for one in known], [one.whole and not one.found for one in known])]


def _answer(reports: Sequence[GraphReport]) -> str:
    """Return the sentence on all graphs: that of the one in which it began, of several with its step and rank."""
    said = _said(reports)
    return placed(said.label, said.sentence) if len(reports) > 1 else said.sentence


def _said(reports: Sequence[GraphReport]) -> GraphReport:
    """Return the report whose sentence is the answer: that of the graph shown, unless only what has no graph is odd."""
    shown = _shown(reports)
    lone = [one for one in reports if not one.num_nodes]
    return lone[0] if lone and shown.whole and not shown.found else shown


def _documents(reports: Sequence[GraphReport]) -> list[dict[str, Any]]:
    """Return the documents of all graphs, that in which it began before the others; each has the answer on all."""
    first, answer = _shown(reports), _answer(reports)
    ranked = [first, *(one for one in reports if one is not first)]
    return [{"answer": answer, "label": one.label, "first": one is first, **(one.document or {})} for one in ranked]


def _screen(reports: Sequence[GraphReport]) -> str:
    """Return the answer, which graphs have something to say where there are several, and the tree of the first."""
    shown, sentence = _shown(reports), printable(_answer(reports))
    lines = [f"\033[1m{sentence}\033[0m" if has_colour() else sentence]
    if len(reports) > 1:
        lines += ["", *_overview(reports)]
    return "\n".join((*lines, shown.screen, ""))


def _overview(reports: Sequence[GraphReport]) -> list[str]:
    """Return a table of the graphs, in the order in which something began; those that say the same share a row."""
    groups: defaultdict[tuple[Beginning | None, str], list[GraphReport]] = defaultdict(list)
    for one in reports:
        groups[one.began, one.sentence].append(one)
    calm = Beginning(0, 0, False, 0, 0)  # noqa: FBT003
    ranked = sorted(groups.values(), key=lambda group: (group[0].began is None, group[0].began or calm))
    rows = [
        (
            printable(group[0].label) + (f" and {len(group) - 1} more" if len(group) > 1 else ""),
            f"{group[0].num_nodes:,}",
            printable(group[0].sentence),
        )
        for group in ranked[:MAX_NAMED]
    ]
    more = [f"  and {len(ranked) - MAX_NAMED} more"] if len(ranked) > MAX_NAMED else []
    return [*table(("dump", "nodes", "what is wrong"), rows, left=3), *more]
