"""What happened before what on several ranks: the order of each rank, tied together by matched communication.

A collective ties what each of its ranks did before it to what all of them do after it; a broadcast only what its root
did, a receive only what the sender did. Knows nothing of values: which calls are bad is given.

Source: Lamport, "Time, clocks, and the ordering of events in a distributed system" (1978).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainermon.dump.files.reader import RawDump
from trainermon.dump.files.records import EXTRA

_FROM_ONE = {"broadcast": "src", "scatter": "src", "broadcast_object_list": "src"}
_TO_ONE = {"reduce": "dst", "gather": "dst"}
_FILLS = frozenset(
    [
        *("recv", "irecv", "broadcast", "scatter", "gather", "all_gather", "all_gather_into_tensor"),
        *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    ]
)
_SENDS = frozenset(("send", "isend"))
_RECEIVES = frozenset(("recv", "irecv"))
_KEY = re.compile(r"Distributed\.(\w+)\.\d+\.forward$")


class CallEvent(NamedTuple):
    """One dumped call and when it ran.

    Attributes:
        rank: The rank.
        order: Its position in the sequence of that rank.
        key: Its name in the dump, `Module.h.0.Linear.forward.2`.
    """

    rank: int
    order: int
    key: str


class CommunicationCall(NamedTuple):
    """A dumped collective or point-to-point call.

    Attributes:
        event: The call, and when it ran.
        operation: `all_reduce`, `send` …
        group: The global ranks that take part; empty: all.
        peer: The root of a collective, or the other side of a send; None: there is none.
    """

    event: CallEvent
    operation: str
    group: tuple[int, ...]
    peer: int | None


def communications(raw: RawDump, rank: int) -> list[CommunicationCall]:
    """Return the collectives and point-to-point calls of a rank's dump, in order."""
    found: list[CommunicationCall] = []
    for position, (key, value) in enumerate(raw.data.items()):
        match = _KEY.search(key)
        if match and isinstance(value, dict):
            order = value.get(EXTRA, {}).get("order", position)
            found += communications_of(CallEvent(rank, order, key), value)
    return sorted(found, key=lambda one: one.event.order)


def communications_of(event: CallEvent, value: Mapping[str, Any]) -> Iterator[CommunicationCall]:
    """Yield what the call of `event`, whose entry in the dump is `value`, sends or receives; of a batch several."""
    match = _KEY.search(event.key)
    if match:
        yield from _of_call(event, match[1], value)


def meetings(calls: Mapping[int, Sequence[CommunicationCall]]) -> list[tuple[CallEvent, Hashable]]:
    """Return each communication with what it has in common with those of other ranks that belong to it.

    `calls` has the communications of every rank, in order: the nth of one kind between the same ranks are one.
    """
    everyone = tuple(sorted(calls))
    numbers: Counter[Hashable] = Counter()
    found: list[tuple[CallEvent, Hashable]] = []
    for rank in everyone:
        for call in calls[rank]:
            meeting = _meeting(call, everyone)
            if meeting is not None:
                found.append((call.event, (meeting, numbers[rank, meeting])))
                numbers[rank, meeting] += 1
    return found


def earliest(bad: Iterable[CallEvent], calls: Mapping[int, Sequence[CommunicationCall]]) -> tuple[CallEvent, ...]:
    """Return those of `bad` that none of the others can have caused, in the order of their ranks.

    `calls` has the communications of every rank; without any, ranks are not tied and each keeps its first bad call, as
    it does where the calls contradict one another (ranks called collectives in different orders).
    """
    graph = _EventGraph(calls)
    events = sorted(set(bad))
    for event in events:
        graph.add(event)
    tainted = graph.reached_from(events)
    first = [event for event in events if event not in tainted]
    return tuple(first or sorted({event.rank: event for event in reversed(events)}.values()))


def receives(key: str) -> bool:
    """Return whether a call fills tensors that it is given: what stood in them before means nothing."""
    match = _KEY.search(key)
    return match is not None and match[1] in _FILLS


def _of_call(event: CallEvent, operation: str, value: Mapping[str, Any]) -> Iterator[CommunicationCall]:
    args = value.get("input_args", value.get("input")) or []
    named = value.get("input_kwargs") or {}
    if operation == "batch_isend_irecv":
        yield from _of_batch(event, args, named)
        return
    group = next((tuple(ranks) for form in (*args, *named.values()) if (ranks := _ranks(form))), ())
    side = _FROM_ONE.get(operation) or _TO_ONE.get(operation)
    if operation in _SENDS | _RECEIVES:
        side = "dst" if operation in _SENDS else "src"
    yield CommunicationCall(event, operation, group, _peer(side, args, named, group) if side else None)


def _of_batch(event: CallEvent, args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[CommunicationCall]:
    operations = named.get("p2p_op_list", args[0] if args else None)
    for form in operations if isinstance(operations, list) else ():
        if isinstance(form, dict) and "op" in form:
            peer = form.get("peer")
            yield CommunicationCall(event, str(form["op"]), (), peer if isinstance(peer, int) else None)


def _ranks(form: Any) -> Sequence[int] | None:
    is_group = isinstance(form, dict) and form.get("type") == "torch.ProcessGroup"
    return form.get("group_ranks") if is_group else None


def _peer(side: str, args: Sequence[Any], named: Mapping[str, Any], group: tuple[int, ...]) -> int | None:
    """Return the global rank of a root or partner: by name, else the first whole number among the arguments."""
    inner = _number(named.get(f"group_{side}"))
    if inner is not None and inner < len(group):
        return group[inner]
    known = _number(named.get(side))
    if known is not None:
        return known
    return next((number for form in args if (number := _number(form)) is not None), None)


def _number(form: Any) -> int | None:
    return form.get("value") if isinstance(form, dict) and form.get("type") == "int" else None


class _EventGraph:
    """Events and what follows from what. A communication is two nodes: what it sends, and what it has received."""

    def __init__(self, calls: Mapping[int, Sequence[CommunicationCall]]) -> None:
        self._events: dict[int, set[CallEvent]] = defaultdict(set)
        self._edges: dict[Hashable, set[Hashable]] = defaultdict(set)
        everyone = tuple(sorted(calls))
        numbers: Counter[Hashable] = Counter()
        for rank in everyone:
            for call in calls[rank]:
                self._events[rank].add(call.event)
                self._tie(call, everyone, numbers)

    def add(self, event: CallEvent) -> None:
        """Take in a call that may or may not communicate."""
        self._events[event.rank].add(event)

    def reached_from(self, bad: Iterable[CallEvent]) -> set[CallEvent]:
        """Return every event that one of `bad` came before."""
        for events in self._events.values():
            ordered = sorted(events)
            for event in ordered:
                self._edges[event, "sends"].add((event, "has"))
            for before, after in itertools.pairwise(ordered):
                self._edges[before, "has"].add((after, "sends"))
        queue: deque[Hashable] = deque((event, "has") for event in bad)
        seen: set[Hashable] = set()
        while queue:
            for node in self._edges[queue.popleft()]:
                if node not in seen:
                    seen.add(node)
                    queue.append(node)
        return {event for events in self._events.values() for event in events if (event, "has") in seen}

    def _tie(self, call: CommunicationCall, everyone: tuple[int, ...], numbers: Counter[Hashable]) -> None:
        meeting = _meeting(call, everyone)
        if meeting is None:
            return
        numbered = call.event.rank, meeting
        hub = meeting, numbers[numbered]
        numbers[numbered] += 1
        rank, root = call.event.rank, call.peer
        is_receiver = call.operation in _RECEIVES or (call.operation in _FROM_ONE and rank != root)
        is_sender = call.operation in _SENDS or (call.operation in _TO_ONE and rank != root)
        if not is_receiver:
            self._edges[call.event, "sends"].add(hub)
        if not is_sender:
            self._edges[hub].add((call.event, "has"))


def _meeting(call: CommunicationCall, everyone: tuple[int, ...]) -> Hashable:
    """Return what all sides of a communication have in common; None if they cannot be told."""
    rank = call.event.rank
    if call.operation in _SENDS | _RECEIVES:
        if call.peer is None:
            return None
        return ("p2p", rank, call.peer) if call.operation in _SENDS else ("p2p", call.peer, rank)
    covers_all = set(everyone) <= set(call.group)
    return call.operation, () if covers_all else call.group
