"""Which data the page of some graphs gets, and where the page goes: into a file, or to a reader."""

from __future__ import annotations

import webbrowser
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.graph.database.details import details_of_database
from trainermon.analysis.graph.database.schema import SUFFIX
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.levels import axes_of
from trainermon.analysis.graph.meetings import RankMeetings
from trainermon.analysis.graph.page.code import PageCode
from trainermon.analysis.graph.page.details import NodeDetails, details_against, details_alone, details_of_rows
from trainermon.analysis.graph.page.packing import DrawnRank, PackedPage, PackedRank, pack, pack_rank
from trainermon.analysis.graph.page.page import render_page
from trainermon.analysis.graph.page.serving import LOOPBACK, DetailsOf, GraphServer
from trainermon.analysis.graph.reading import DumpGraph
from trainermon.analysis.graph.screen import ancestors
from trainermon.core.errors import DumpError
from trainermon.core.private_files import replace_file
from trainermon.dashboards.graph_details import DETAILS_SUFFIX, PIECES_SUFFIX, join_parts, pack_detail
from trainermon.dashboards.graph_notes import NO_NOTES, GraphNotes

FOUND, BESIDE = "found", "beside"
DETAILS = ("all", FOUND, BESIDE)
MAX_DETAILED = 20_000
"""Pages of up to so many nodes have the details of all, if nothing else is asked for."""


class DrawnGraphs(NamedTuple):
    """What a page shows.

    Attributes:
        title: The page's title.
        ranks: The graphs.
        meetings: The collectives of each that others took part in.
        first: The place of the graph that is shown first.
        golden: The folder that they were held against; "": none.
        notes: What a person has added.
        path: Where the dumps are, in whose folder a server keeps notes; None: nowhere.
    """

    title: str
    ranks: Sequence[PackedRank]
    meetings: Sequence[RankMeetings]
    first: int = 0
    golden: str = ""
    notes: GraphNotes = NO_NOTES
    path: Path | None = None

    def pack(self, *, served: bool, keeps_notes: bool = False) -> PackedPage:
        """Return the page's data; where it is `served`, it asks for what it has not, and sends notes to be kept."""
        return pack(
            self.ranks,
            self.meetings,
            self.golden,
            served=served,
            first=self.first,
            notes=self.notes,
            keeps_notes=keeps_notes,
        )


def write_page(graphs: DrawnGraphs, path: Path, details: Iterable[bytes] | None = None) -> None:
    """Write the page of `graphs` to the file `path`.

    With `details`, those of all nodes in order, it is for a server, which keeps notes, too: details, and the pieces of
    the page's data, are in files of their own, see `trainermon.dashboards.graph_details`.

    Raises:
        DumpError: The file cannot be written.
    """
    served = details is not None
    packed = graphs.pack(served=served, keeps_notes=served)
    try:
        if details is not None:
            replace_file(path.with_suffix(DETAILS_SUFFIX), join_parts(details))
            replace_file(path.with_suffix(PIECES_SUFFIX), join_parts(packed.pieces))
        replace_file(path, render_page(graphs.title, packed, served=served).encode())
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error.strerror}; choose another file with -o") from error


def open_server(
    graphs: DrawnGraphs, details: DetailsOf, address: str, *, in_browser: bool, place: str = ""
) -> GraphServer:
    """Return a server of the page of `graphs`, which listens at `address`, `HOST:PORT` with either left out or none.

    `details` returns those of one of them when it is asked for; `place` is the part of an address that leads to a
    node.

    Raises:
        DumpError: It cannot listen there.
    """
    host, port = _address(address)
    packed = graphs.pack(served=True, keeps_notes=graphs.path is not None)
    try:
        server = GraphServer(
            render_page(graphs.title, packed, served=True),
            packed.pieces,
            [one.num_nodes for one in graphs.ranks],
            details,
            graphs.path,
            host=host,
            port=port,
        )
    except (OSError, OverflowError) as error:
        raise DumpError(f"cannot listen on {host} port {port} ({error}): choose another with --serve") from error
    server.place = place
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


def details_of(graph: DumpGraph) -> NodeDetails:
    """Return what is known of the tensors of a graph, wherever it comes from."""
    if graph.directory.name.endswith(SUFFIX) and graph.step is not None and graph.rank is not None:
        return details_of_database(graph.tree, graph.directory, graph.step, graph.rank)
    if graph.whole is not None:
        return details_of_rows(graph.tree, graph.whole)
    if graph.comparison is None:
        return details_alone(graph.tree, graph.directory)
    return details_against(graph.tree, graph.comparison)


def draw_rank(
    graph: DumpGraph,
    choice: str | None,
    num_dumps: int,
    *,
    served: bool,
    overlays: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
) -> PackedRank:
    """Return what the page of `num_dumps` dumps has of one of them, with the details that `choice` names.

    `choice` is one of `DETAILS`, or None; where the page is `served`, all lines of code are in it.

    Raises:
        DumpError: The dump has changed since it was read.
    """
    all_details, code = details_of(graph), PageCode()
    details = all_details.among(_detailed(graph, choice, num_dumps))
    shown = None if served else {frame for detail in details.values() for frame in detail["stack"]}
    return pack_rank(
        DrawnRank(
            label=graph.label,
            dump=str(graph.directory),
            tree=graph.tree,
            found=graph.found,
            flow=find_flow(graph.tree),
            details=details,
            lines=code.add(graph.tree, all_details.stacks(), graph.sources(), shown),
            code=code,
            step=graph.step,
            rank=graph.rank,
            axes=", ".join(f"{axis} {place}" for axis, (place, _) in axes_of(graph).items()),
            golden="" if graph.comparison is None else str(graph.comparison.golden),
            level=graph.level,
            notes=graph.notes,
            overlays=overlays,
        )
    )


def all_details(graph: DumpGraph) -> list[bytes]:
    """Return the details of all nodes of a graph, as the file beside the page has them.

    Raises:
        DumpError: The dump has changed since it was read.
    """
    details = details_of(graph)
    return [pack_detail(details.json_of(place)) for place in range(len(graph.tree.nodes))]


def _detailed(graph: DumpGraph, choice: str | None, num_dumps: int) -> list[int]:
    places = range(len(graph.tree.nodes))
    if choice == BESIDE:
        return []
    if choice == "all" or (choice is None and len(places) * num_dumps <= MAX_DETAILED):
        return list(places)
    wrong = {one.node for one in graph.found.findings}
    return sorted(wrong.union(*(ancestors(graph.tree, node) for node in wrong)))
