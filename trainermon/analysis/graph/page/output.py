"""Which data the page of some graphs gets, and where the page goes: into a file, or to a reader."""

from __future__ import annotations

import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.analysis.graph.database.details import details_of_database
from trainermon.analysis.graph.database.schema import SUFFIX
from trainermon.analysis.graph.first import shown_first
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.levels import axes_of
from trainermon.analysis.graph.meetings import RankMeetings, find_meetings
from trainermon.analysis.graph.page.code import PageCode
from trainermon.analysis.graph.page.details import NodeDetails, details_against, details_alone
from trainermon.analysis.graph.page.packing import PackedRank, pack
from trainermon.analysis.graph.page.page import render_page
from trainermon.analysis.graph.page.serving import LOOPBACK, GraphServer
from trainermon.analysis.graph.reading import DumpGraph
from trainermon.analysis.graph.screen import ancestors
from trainermon.core.errors import DumpError
from trainermon.core.private_files import replace_file
from trainermon.dashboards.graph_details import SUFFIX as DETAILS_SUFFIX
from trainermon.dashboards.graph_details import pack_details

BESIDE = "beside"
DETAILS = ("all", "found", BESIDE)
MAX_DETAILED = 20_000
"""Pages of up to so many nodes have the details of all, if nothing else is asked for."""


def write_page(graphs: Sequence[DumpGraph], path: Path, *, golden: str, choice: str | None) -> None:
    """Write the page of `graphs` to the file `path`, with the details that `choice`, one of `DETAILS`, names.

    With "beside" they are in a second file for a server, see `trainermon.dashboards.graph_details`.

    Raises:
        DumpError: The file cannot be written, or a dump has changed since it was read.
    """
    served = choice == BESIDE
    code = PageCode()
    details = (details_of(one).among(_detailed(one, choice, len(graphs))) for one in graphs)
    ranks = [
        _packed(one, found, code, met, served=served)
        for one, found, met in zip(graphs, details, find_meetings(graphs), strict=True)
    ]
    page = _rendered(graphs, pack(ranks, code, golden, served=served, first=_first_place(graphs)), served=served)
    try:
        if served:
            replace_file(path.with_suffix(DETAILS_SUFFIX), pack_details(_all_details(graphs)))
        replace_file(path, page.encode())
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error.strerror}; choose another file with -o") from error


def open_server(graphs: Sequence[DumpGraph], address: str, *, golden: str, in_browser: bool) -> GraphServer:
    """Return a server of the page of `graphs`, which listens at `address`, `HOST:PORT` with either left out or none.

    Raises:
        DumpError: It cannot listen there.
    """
    code = PageCode()
    ranks = [_packed(one, {}, code, met, served=True) for one, met in zip(graphs, find_meetings(graphs), strict=True)]
    page = _rendered(graphs, pack(ranks, code, golden, served=True, first=_first_place(graphs)), served=True)
    host, port = _address(address)
    try:
        server = GraphServer(page, [details_of(one) for one in graphs], host=host, port=port)
    except (OSError, OverflowError) as error:
        raise DumpError(f"cannot listen on {host} port {port} ({error}): choose another with --serve") from error
    if in_browser:
        webbrowser.open(server.url)
    return server


def _address(text: str) -> tuple[str, int]:
    """Return host and port.

    >>> _address(""), _address(":8000"), _address("localhost"), _address("0.0.0.0:80")
    (('127.0.0.1', 0), ('127.0.0.1', 8000), ('localhost', 0), ('0.0.0.0', 80))
    """
    host, _, port = text.rpartition(":")
    return (host or LOOPBACK, int(port)) if port.isdecimal() else (text or LOOPBACK, 0)


def _rendered(graphs: Sequence[DumpGraph], packed: bytes, *, served: bool) -> str:
    shown = graphs[_first_place(graphs)]
    return render_page(f"{shown.tree.nodes[0].name}: {shown.found.sentence}", packed, served=served)


def _first_place(graphs: Sequence[DumpGraph]) -> int:
    shown = shown_first([one for one in graphs if one.level == graphs[0].level])
    return next(place for place, one in enumerate(graphs) if one is shown)


def details_of(graph: DumpGraph) -> NodeDetails:
    """Return what is known of the tensors of a graph, wherever it comes from."""
    if graph.directory.name.endswith(SUFFIX) and graph.step is not None and graph.rank is not None:
        return details_of_database(graph.tree, graph.directory, graph.step, graph.rank)
    if graph.comparison is None:
        return details_alone(graph.tree, graph.directory)
    return details_against(graph.tree, graph.comparison)


def _packed(
    graph: DumpGraph, details: Mapping[str, Any], code: PageCode, met: RankMeetings, *, served: bool
) -> PackedRank:
    shown = None if served else {frame for detail in details.values() for frame in detail["stack"]}
    return PackedRank(
        label=graph.label,
        dump=str(graph.directory),
        tree=graph.tree,
        found=graph.found,
        flow=find_flow(graph.tree),
        details=details,
        lines=code.add(graph.tree, details_of(graph).stacks(), graph.sources(), shown),
        step=graph.step,
        rank=graph.rank,
        axes=", ".join(f"{axis} {place}" for axis, (place, _) in axes_of(graph).items()),
        golden="" if graph.comparison is None else str(graph.comparison.golden),
        level=graph.level,
        meetings=met,
        notes=() if graph.comparison is None else graph.comparison.notes,
    )


def _all_details(graphs: Sequence[DumpGraph]) -> Iterator[bytes | None]:
    for details in map(details_of, graphs):
        for place in range(len(details.tree.nodes)):
            yield details.json_of(place)


def _detailed(graph: DumpGraph, choice: str | None, num_dumps: int) -> list[int]:
    places = range(len(graph.tree.nodes))
    if choice == BESIDE:
        return []
    if choice == "all" or (choice is None and len(places) * num_dumps <= MAX_DETAILED):
        return list(places)
    wrong = {one.node for one in graph.found.findings}
    return sorted(wrong.union(*(ancestors(graph.tree, node) for node in wrong)))
