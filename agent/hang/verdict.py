"""Who holds the others up: one answer from the evidence of all ranks that is there, of one node or of the whole job.

A rank that waits is never blamed. It waits for the members of a group that have not entered the collective that it is
in; if these wait themselves, in another group, the question goes on to the ranks that they wait for. Who is left, and
waits for nobody, is the cause. Without a flight recorder (or for gloo's sends and receives, which no recorder notes)
the stacks tell who is in a communication call and who is not.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping, Sequence

from trainermon.agent.hang.evidence import (
    DEAD,
    ENDED,
    Call,
    Frame,
    GroupState,
    RankEvidence,
    innermost_own,
    spans,
)

# Operands of these have the same number of elements on every rank.
_SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce", "allreduce_coalesced"})
_COMMUNICATION = ("/torch/distributed/", "/deepspeed/comm/")
# Beside others that are silent, a rank that was silent for a smaller share of their time still moves.
_SILENT_SHARE = 0.5
# What a rank does, by what its main thread's stack leads through.
_ACTIVITIES = (
    ("/torch/utils/data/", "data-loader", "waits for its data loader"),
    ("/torch/distributed/checkpoint/", "checkpoint", "is busy with a checkpoint"),
    ("/torch/serialization.py", "checkpoint", "is busy with a checkpoint"),
    ("/torch/_inductor/", "compilation", "is compiling"),
    ("/torch/_dynamo/", "compilation", "is compiling"),
)


class Kind(str, enum.Enum):
    """What kind of standstill it is."""

    NOT_ENTERED = "not-entered"
    MISMATCH = "mismatch"
    DEADLOCK = "deadlock"
    STUCK = "stuck"
    BUSY = "busy"
    ELSEWHERE = "elsewhere"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A rank that holds the others up, and what it is doing instead."""

    rank: int
    cause: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """The collective that a rank is in, and where in the user's code it was called, "" if not known."""

    rank: int
    group: str
    op: str
    sequence: int
    where: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The answer.

    Attributes:
        kind: `not-entered`: culprits have not entered the collective; `mismatch`: the ranks' calls do not fit;
            `deadlock`: ranks wait for each other in different groups; `stuck`: all have entered and none comes out;
            `busy`: no collective is known, the culprits are in something else; `elsewhere`: those that have not entered
            are not among the ranks that are known; `unknown`.
        culprits: Ranks to blame; empty where that is not known. Never one that only waits.
        waiting: Ranks that wait for others.
        absent: Ranks that the others wait for and of which nothing is known.
        group: Purpose of the process group; "" without a collective.
        op: The collective that is waited in.
        sequence: Its number in the group.
        calls: Where ranks disagree, what each is in.
        text: One sentence.
    """

    kind: Kind
    culprits: tuple[Culprit, ...] = ()
    waiting: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    group: str = ""
    op: str = ""
    sequence: int = 0
    calls: tuple[RankCall, ...] = ()
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Wait:
    """One rank's wait for others: in which call, for whom."""

    rank: int
    group: GroupState
    call: Call
    targets: frozenset[int]


def verdict(evidence: Sequence[RankEvidence]) -> Hang:
    """Return who holds the others up, from whatever ranks are known. Pure; the order of `evidence` does not matter."""
    known = {one.rank: one for one in evidence}
    waits = [wait for one in known.values() for wait in _waits(one, known)]
    edges = _edges(waits)
    lacking = set().union(*edges.values()) if edges else set()
    if lacking:
        return _judge_lacking(known, waits, edges, lacking)
    in_flight = [wait for wait in waits if not wait.call.is_p2p]
    blocked = {rank for rank, one in known.items() if one.is_stopped or one.life == DEAD}
    if in_flight and not blocked:
        return _judge_entered(known, in_flight)
    return _judge_stacks(known, {wait.rank for wait in waits})


def _waits(one: RankEvidence, known: Mapping[int, RankEvidence]) -> Iterable[_Wait]:
    for group in one.groups or ():
        collective = next((call for call in group.in_flight if not call.is_p2p), None)
        if collective is not None:
            members = group.ranks or tuple(_sharing(group.name, known))
            late = (rank for rank in members if rank != one.rank and not _has_entered(known, rank, group, collective))
            yield _Wait(one.rank, group, collective, frozenset(late))
        for call in group.in_flight:
            peer = call.peer
            if peer is not None and peer < len(group.ranks):
                target = group.ranks[peer]
                met = _meets(known.get(target), group, one.rank)
                yield _Wait(one.rank, group, call, frozenset() if met else frozenset({target}))


def _sharing(name: str, known: Mapping[int, RankEvidence]) -> Iterable[int]:
    return (rank for rank, one in known.items() if any(group.name == name for group in one.groups or ()))


def _same_group(one: RankEvidence | None, group: GroupState) -> GroupState | None:
    found = (other for other in (one.groups or () if one else ()) if other.name == group.name)
    return next((other for other in found if other.ranks == group.ranks), None)


def _has_entered(known: Mapping[int, RankEvidence], rank: int, group: GroupState, call: Call) -> bool:
    """Whether `rank` is in the collective or past it; where its recorder is silent, its stack may tell."""
    one = known.get(rank)
    if one is None or one.is_stopped or one.life != "running":
        return False
    if one.groups is None:
        return _communicates(one)
    same = _same_group(one, group)
    return same is not None and same.entered >= call.sequence


def _meets(peer: RankEvidence | None, group: GroupState, rank: int) -> bool:
    """Whether the rank at the other end is in a send or receive with `rank`."""
    if peer is not None and peer.life == "running" and peer.groups is None and not peer.is_stopped:
        return _communicates(peer)
    same = _same_group(peer, group)
    calls = same.in_flight if same else ()
    return any(call.peer is not None and group.ranks[call.peer] == rank for call in calls)


def _edges(waits: Sequence[_Wait]) -> dict[int, frozenset[int]]:
    """Return, by rank that waits for others, whom it waits for."""
    edges: dict[int, frozenset[int]] = {}
    for wait in waits:
        if wait.targets:
            edges[wait.rank] = edges.get(wait.rank, frozenset()) | wait.targets
    return edges


def _judge_lacking(
    known: Mapping[int, RankEvidence], waits: Sequence[_Wait], edges: Mapping[int, frozenset[int]], lacking: set[int]
) -> Hang:
    absent = tuple(sorted(rank for rank in lacking if not _tells(known.get(rank))))
    roots = {rank for rank in lacking.difference(absent) if rank not in edges or _cannot_move(known[rank])}
    if not roots and not absent:
        cycle = lacking & edges.keys()
        # One of a circle may be in it only by a collective that it began and did not wait for.
        roots = {rank for rank in cycle if known[rank].main_frames and not _communicates(known[rank])}
        if not roots or roots == cycle:
            return _deadlock(known, waits, cycle)
    wait = _first_wait(waits, roots or set(absent))
    waiting = tuple(sorted(edges.keys() - roots))
    culprits = tuple(culprit_of(known[rank]) for rank in sorted(roots))
    place = _place(wait)
    if all(_cannot_move(known[rank]) for rank in roots) and roots:
        kind, text = Kind.NOT_ENTERED, f"{_reasons(culprits)}; {_subject(waiting)} in {place}"
    elif culprits:
        blamed = f"{spans(roots)} {_have(roots)} not {'met' if wait.call.is_p2p else 'entered'} {place}"
        kind, text = Kind.NOT_ENTERED, f"{blamed}, in which {_subject(waiting)}: {_reasons(culprits, short=True)}"
    else:
        kind = Kind.ELSEWHERE
        text = f"{_subject(waiting)} in {place} for {spans(absent)}, of which nothing is known here"
    return Hang(
        kind=kind,
        culprits=culprits,
        waiting=waiting,
        absent=absent,
        group=wait.group.name,
        op=wait.call.op,
        sequence=wait.call.sequence,
        text=text,
    )


def _deadlock(known: Mapping[int, RankEvidence], waits: Sequence[_Wait], cycle: set[int]) -> Hang:
    calls = tuple(_rank_call(known, wait) for wait in _first_per_rank(waits, cycle))
    said = "; ".join(f"rank {call.rank} is in {_call_text(call)}" for call in calls[:8])
    return Hang(
        kind=Kind.DEADLOCK,
        waiting=tuple(sorted(cycle)),
        group=calls[0].group,
        op=calls[0].op,
        sequence=calls[0].sequence,
        calls=calls,
        text=f"{spans(cycle)} wait for each other in different collectives: {said}",
    )


def _judge_entered(known: Mapping[int, RankEvidence], waits: Sequence[_Wait]) -> Hang:
    """All members have entered what is waited in: their calls do not fit, or what carries them does not move."""
    first = min(waits, key=lambda wait: (wait.call.sequence, wait.group.name, wait.rank))
    same = [wait for wait in waits if wait.group.name == first.group.name and wait.group.ranks == first.group.ranks]
    calls = tuple(_rank_call(known, wait) for wait in _first_per_rank(same, {wait.rank for wait in same}))
    forms: dict[object, list[int]] = {}
    for wait in same:
        forms.setdefault(_form(wait.call), []).append(wait.rank)
    waiting = tuple(sorted({wait.rank for wait in same}))
    if len(forms) > 1:
        return _mismatch(same, forms, calls)
    text = f"{spans(waiting)} have all entered {_place(first)}, and none comes out of it: look at the network"
    return Hang(
        kind=Kind.STUCK,
        waiting=waiting,
        group=first.group.name,
        op=first.call.op,
        sequence=first.call.sequence,
        calls=calls,
        text=text,
    )


def _mismatch(
    waits: Sequence[_Wait],
    forms: Mapping[object, list[int]],
    calls: tuple[RankCall, ...],
) -> Hang:
    by_size = sorted(forms.values(), key=lambda ranks: (len(ranks), ranks))
    odd = [rank for ranks in by_size[:-1] for rank in ranks] if 2 * len(by_size[-1]) > len(waits) else []
    shapes = {wait.rank: wait.call for wait in waits}
    said = "; ".join(
        f"{spans(ranks)} {'is' if len(ranks) == 1 else 'are'} in {_form_text(shapes[ranks[0]])}"
        f"{_at(next(call.where for call in calls if call.rank == ranks[0]))}"
        for ranks in sorted(forms.values())
    )
    first = waits[0]
    return Hang(
        kind=Kind.MISMATCH,
        culprits=tuple(
            Culprit(rank=rank, cause="mismatch", text=f"is in {_form_text(shapes[rank])}") for rank in sorted(odd)
        ),
        waiting=tuple(sorted({wait.rank for wait in waits} - set(odd))),
        group=first.group.name,
        op="/".join(sorted({wait.call.op for wait in waits})),
        sequence=first.call.sequence,
        calls=calls,
        text=f"the ranks of {first.group.name} call different collectives as #{first.call.sequence}: {said}",
    )


def _judge_stacks(known: Mapping[int, RankEvidence], in_flight: set[int]) -> Hang:
    """No collective tells who is missing: whoever is not in a communication call is."""
    alive = {rank: one for rank, one in known.items() if one.life == "running"}
    waiting = {rank for rank, one in alive.items() if not one.is_stopped and (rank in in_flight or _communicates(one))}
    blocked = {rank for rank, one in known.items() if one.is_stopped or one.life == DEAD}
    longest_s = max((one.silent_s for one in alive.values()), default=0.0)
    seen = {
        rank
        for rank, one in alive.items()
        if rank not in waiting and one.silent_s >= _SILENT_SHARE * longest_s and (one.main_frames or one.process_state)
    }
    blamed = blocked or seen
    if not blamed:
        text = f"{spans(waiting)} wait for each other" if waiting else "nothing tells what the ranks are doing"
        where = sorted({_where(known[rank]) for rank in waiting} - {""})
        return Hang(kind=Kind.UNKNOWN, waiting=tuple(sorted(waiting)), text="; ".join([text, *where[:4]]))
    culprits = tuple(culprit_of(known[rank]) for rank in sorted(blamed))
    text = f"{spans(blamed)} {'stands' if len(blamed) == 1 else 'stand'} still: {_reasons(culprits, short=True)}"
    if waiting:
        text += f"; {_subject(tuple(sorted(waiting)))}{_in_calls(known, waiting)}"
    return Hang(kind=Kind.BUSY, culprits=culprits, waiting=tuple(sorted(waiting)), text=text)


def culprit_of(one: RankEvidence) -> Culprit:
    """Return what a rank does that does not wait for others."""
    cause, text = _cause(one)
    return Culprit(rank=one.rank, cause=cause, text=text)


def _cause(one: RankEvidence) -> tuple[str, str]:
    if one.life == DEAD:
        return "dead", one.exit.text if one.exit else "has died"
    if one.life == ENDED:
        return "ended", "has ended its training"
    if one.is_stopped:
        return "stopped", "is stopped (SIGSTOP or a debugger)"
    at = _at(_where(one))
    if one.process_state == "D":
        return "uninterruptible", f"is in a system call that cannot be interrupted ({one.wchan or 'unknown'}){at}"
    files = [frame.file for frame in one.main_frames]
    known = (entry for entry in _ACTIVITIES if any(entry[0] in file for file in files))
    state = "busy" if one.process_state == "R" else "blocked"
    _, cause, text = next(known, ("", "running" if files else "unknown", f"is {state}"))
    return cause, text + (at or f" in phase {one.phase}, its stack is not known")


def _tells(one: RankEvidence | None) -> bool:
    """Whether enough is known of a rank to say that it does not wait."""
    return one is not None and (_cannot_move(one) or one.groups is not None or bool(one.main_frames))


def _cannot_move(one: RankEvidence) -> bool:
    return one.is_stopped or one.life != "running"


def _communicates(one: RankEvidence) -> bool:
    """Whether the innermost frames of the main thread are those of a communication library."""
    return any(part in frame.file for frame in one.main_frames[:2] for part in _COMMUNICATION)


def _first_wait(waits: Sequence[_Wait], targets: set[int]) -> _Wait:
    """Return the earliest wait for one of `targets`, collectives before sends and receives."""
    meant = [wait for wait in waits if wait.targets & targets]
    return min(meant, key=lambda wait: (wait.call.is_p2p, wait.call.sequence, -len(wait.targets), wait.rank))


def _first_per_rank(waits: Sequence[_Wait], ranks: set[int]) -> list[_Wait]:
    first: dict[int, _Wait] = {}
    for wait in sorted(waits, key=lambda wait: (not wait.targets, wait.call.sequence)):
        if wait.rank in ranks:
            first.setdefault(wait.rank, wait)
    return [first[rank] for rank in sorted(first)]


def _form(call: Call) -> object:
    sizes = tuple(_elements(shape) for shape in call.shapes) if call.op in _SAME_SIZE else ()
    return call.op, sizes


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _form_text(call: Call) -> str:
    shapes = ", ".join("×".join(map(str, shape)) or "scalar" for shape in call.shapes[:3])
    return f"{call.op} of {shapes}" if shapes else call.op


def _rank_call(known: Mapping[int, RankEvidence], wait: _Wait) -> RankCall:
    where = _where(known[wait.rank])
    return RankCall(rank=wait.rank, group=wait.group.name, op=wait.call.op, sequence=wait.call.sequence, where=where)


def _call_text(call: RankCall) -> str:
    return f"{call.op} #{call.sequence} of {call.group}{_at(call.where)}"


def _place(wait: _Wait) -> str:
    return f"{wait.call.op} #{wait.call.sequence} of {wait.group.name}"


def _subject(waiting: tuple[int, ...]) -> str:
    return f"{spans(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"


def _have(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _reasons(culprits: Sequence[Culprit], *, short: bool = False) -> str:
    """Return what the culprits do; `short`: the ranks have been named just before."""
    if len({culprit.text for culprit in culprits}) == 1:
        named = spans(culprit.rank for culprit in culprits)
        return f"{('it' if len(culprits) == 1 else 'each') if short else named} {culprits[0].text}"
    return "; ".join(f"rank {culprit.rank} {culprit.text}" for culprit in culprits[:8])


def _in_calls(known: Mapping[int, RankEvidence], ranks: Iterable[int]) -> str:
    functions = {_called(known[rank].main_frames) for rank in ranks} - {""}
    return f" in {' and '.join(sorted(functions))}" if functions else ""


def _called(frames: Sequence[Frame]) -> str:
    """Return the communication function that was called: the outermost frame of the innermost run of such frames."""
    name = ""
    for frame in frames:
        if not any(part in frame.file for part in _COMMUNICATION):
            break
        if not frame.function.endswith("wrapper"):
            name = frame.function
    return name


def _where(one: RankEvidence) -> str:
    frame = innermost_own(one.main_frames)
    return f"{frame.function} ({frame.file}:{frame.line})" if frame else ""


def _at(where: str) -> str:
    return f" in {where}" if where else ""
