"""Which collectives of several ranks are one: where the ranks of a step met."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainermon.analysis.diagnosis.order import CallEvent, CommunicationCall, communications_of, meetings
from trainermon.analysis.graph.entries import read_entries_at
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


class RankCollectives(NamedTuple):
    """The collectives of one rank.

    Attributes:
        step: Its step.
        rank: The rank; None: not known, or several that were put together.
        calls: Its collectives and point-to-point calls, each at its node.
    """

    step: int | None
    rank: int | None
    calls: tuple[CommunicationCall, ...]


NO_CALLS = RankCollectives(None, None, ())


def collectives_of(graph: DumpGraph) -> RankCollectives:
    """Return the collectives of a graph. Reads their entries.

    Raises:
        DumpError: The dump has changed since it was read.
    """
    if graph.parts or graph.rank is None or not graph.directory.is_dir():
        return RankCollectives(graph.step, None, ())
    return RankCollectives(graph.step, graph.rank, tuple(_communications(graph, graph.rank)))


def find_meetings(ranks: Sequence[RankCollectives]) -> list[RankMeetings]:
    """Return the meetings of each of `ranks`: those of a step meet one another."""
    steps: defaultdict[int | None, dict[int, int]] = defaultdict(dict)
    for place, one in enumerate(ranks):
        if one.rank is not None:
            steps[one.step][one.rank] = place
    found = [NO_MEETINGS] * len(ranks)
    for places in steps.values():
        if len(places) > 1:
            calls = {rank: list(ranks[place].calls) for rank, place in places.items()}
            for rank, met in _numbered(calls).items():
                found[places[rank]] = met
    return found


def _communications(graph: DumpGraph, rank: int) -> Iterator[CommunicationCall]:
    whole = graph.directory / DUMP_FILE
    path = whole if whole.is_file() else graph.directory / PARTIAL_FILE
    calls = [
        (place, node.call)
        for place, node in enumerate(graph.tree.nodes)
        if node.kind is GraphKind.COLLECTIVE and node.direction == FORWARD and node.side is not NodeSide.GOLDEN
        if node.call is not None and node.call.length
    ]
    entries = read_entries_at(path, [(call.start, call.length) for _, call in calls]) if calls else ()
    for (place, call), entry in zip(calls, entries, strict=True):
        yield from communications_of(CallEvent(rank, place, call.key), entry)


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
