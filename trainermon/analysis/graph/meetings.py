"""Which collectives of several ranks are one: where the ranks of a step met."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.diagnosis.order import CallEvent, CommunicationCall, communications_of, meetings
from trainermon.analysis.graph.entries import read_entry
from trainermon.analysis.graph.reading import DumpGraph
from trainermon.analysis.graph.tree import GraphKind, NodeSide
from trainermon.dump.files.records import DUMP_FILE, FORWARD, PARTIAL_FILE


class RankMeetings(NamedTuple):
    """The collectives of one rank that others took part in.

    Attributes:
        nodes: int32 [m]: their nodes.
        numbers: int32 [m]: the number of the meeting, the same on all ranks of the step that took part.
    """

    nodes: NDArray[np.int32]
    numbers: NDArray[np.int32]


NO_MEETINGS = RankMeetings(np.zeros(0, np.int32), np.zeros(0, np.int32))


def find_meetings(graphs: Sequence[DumpGraph]) -> list[RankMeetings]:
    """Return the meetings of each of `graphs`, of those that are one rank each. Reads the entries of all collectives.

    Raises:
        DumpError: A dump has changed since it was read.
    """
    steps: defaultdict[int | None, dict[int, int]] = defaultdict(dict)
    for place, graph in enumerate(graphs):
        if not graph.parts and graph.rank is not None and graph.directory.is_dir():
            steps[graph.step][graph.rank] = place
    found = [NO_MEETINGS] * len(graphs)
    for places in steps.values():
        if len(places) > 1:
            calls = {rank: _communications(graphs[place], rank) for rank, place in places.items()}
            for rank, met in _numbered(calls).items():
                found[places[rank]] = met
    return found


def _communications(graph: DumpGraph, rank: int) -> list[CommunicationCall]:
    whole = graph.directory / DUMP_FILE
    path = whole if whole.is_file() else graph.directory / PARTIAL_FILE
    found: list[CommunicationCall] = []
    for place, node in enumerate(graph.tree.nodes):
        if node.kind is not GraphKind.COLLECTIVE or node.direction != FORWARD or node.side is NodeSide.GOLDEN:
            continue
        if node.call is not None and node.call.length:
            entry = read_entry(path, node.call.start, node.call.length)
            found += communications_of(CallEvent(rank, place, node.call.key), entry)
    return found


def _numbered(calls: dict[int, list[CommunicationCall]]) -> dict[int, RankMeetings]:
    ranks: defaultdict[object, set[int]] = defaultdict(set)
    met = meetings(calls)
    for event, meeting in met:
        ranks[meeting].add(event.rank)
    numbers: dict[object, int] = {}
    found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for event, meeting in met:
        if len(ranks[meeting]) > 1:
            found[event.rank].append((event.order, numbers.setdefault(meeting, len(numbers))))
    return {
        rank: RankMeetings(*(np.array(column, np.int32) for column in zip(*pairs, strict=True)))
        for rank, pairs in found.items()
    }
