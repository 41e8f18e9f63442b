"""Who holds the others up: one answer from the evidence of all ranks that is there, of one node or of the whole job.

A rank that waits is never blamed. It waits for the members of a group that have not entered the collective that it is
in; if these wait themselves, in another group, the question goes on to the ranks that they wait for. Whoever is left,
and waits for nobody, is the cause. Where no recorder tells (there is none, or the wait is for a send or receive of
gloo's, which it does not note), the stacks say who is in a communication call, and so waits, and who is not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trainermon.agent.hang.evidence import DEAD, RUNNING, GroupState, PendingCall, RankEvidence, spans
from trainermon.agent.hang.sources import joined_sources
from trainermon.agent.hang.wording import (
    MAX_NAMED,
    call_text,
    called,
    cause_of,
    communicates,
    form_text,
    in_place,
    reasons,
    they,
    where,
)
from trainermon.core.call_notes import SAME_SIZE
from trainermon.core.values import TextEnum

# Operands of these have the same number of elements on every rank.
_SAME_SIZE = SAME_SIZE | {"allreduce_coalesced"}
# Beside others that are silent, a rank that was silent for a smaller share of their time still moves.
_SILENT_SHARE = 0.5


class StandstillKind(TextEnum):
    """The kind of a standstill.

    `not-entered`: the culprits have not entered the collective that others wait in. `mismatch`: the ranks' calls do not
    fit together. `deadlock`: ranks wait for each other. `stuck`: all have entered a collective and none comes out of
    it. `busy`: no collective is known; the culprits are in something else. `elsewhere`: those that have not entered are
    not among the ranks that are known. `dead`: the culprits have ended.
    """

    NOT_ENTERED = "not-entered"
    MISMATCH = "mismatch"
    DEADLOCK = "deadlock"
    STUCK = "stuck"
    BUSY = "busy"
    ELSEWHERE = "elsewhere"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A rank that holds the others up.

    Attributes:
        rank: The rank.
        cause: What keeps it, as a word for programs.
        text: The same as a clause for people.
    """

    rank: int
    cause: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """The collective that a rank is in.

    Attributes:
        rank: The rank.
        group: Purpose of the process group (`dp`).
        op: The operation (`all_reduce`).
        sequence: Its number in the group.
        where: The place in the user's code that called it; "" if not known.
    """

    rank: int
    group: str
    op: str
    sequence: int
    where: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """Which rank holds up a job that stands still, and in what.

    Attributes:
        kind: What kind of standstill.
        culprits: Ranks to blame; empty where that is not known. Never one that only waits.
        waiting: Ranks that wait for others.
        absent: Ranks that are waited for and of which nothing is known.
        group: Purpose of the process group; "" without a collective.
        op: The collective that is waited in.
        sequence: Its number in the group.
        calls: Where ranks disagree, what each is in.
        text: One sentence.
    """

    kind: StandstillKind
    culprits: tuple[Culprit, ...] = ()
    waiting: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    group: str = ""
    op: str = ""
    sequence: int = 0
    calls: tuple[RankCall, ...] = ()
    text: str = ""


class _WaitingGroup:
    """What all ranks say of one process group, gathered once, as a job may have thousands of them.

    `states` is by rank, in the order of the evidence.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self.states: dict[int, GroupState] = {}
        self._progress: dict[int, float] = {}
        self._late: dict[int, frozenset[int]] = {}

    def late(self, known: Known, sequence: int) -> frozenset[int]:
        """Return the members that have not entered a collective, as far as is known."""
        if sequence not in self._late:
            if not self._progress:
                members = self.ranks or self.states
                self._progress = {rank: _progress(known.get(rank), self.states.get(rank)) for rank in members}
            late = (rank for rank, entered in self._progress.items() if entered < sequence)
            self._late[sequence] = frozenset(late)
        return self._late[sequence]


@dataclasses.dataclass(frozen=True, slots=True)
class _WaitingRank:
    """One rank in a call, and the ranks that keep it from ending."""

    rank: int
    group: _WaitingGroup
    call: PendingCall
    targets: frozenset[int]

    @property
    def place(self) -> str:
        return call_text(self.call, self.group.name)


Known = Mapping[int, RankEvidence]


def verdict(evidence: Sequence[RankEvidence]) -> HangVerdict:
    """Find which rank holds the others up, from the evidence on whatever ranks are known. The order does not matter.

    The cost grows with the sum of the sizes of the ranks' groups: 0.25 s for 4096 ranks in one group.
    """
    known = {one.rank: one for one in joined_sources(evidence)}
    waits = list(_waits(known))
    edges: dict[int, frozenset[int]] = {}
    for wait in waits:
        edges[wait.rank] = edges[wait.rank] | wait.targets if wait.rank in edges else wait.targets
    lacking = frozenset().union(*set(edges.values()))
    if lacking:
        return _judge_lacking(known, waits, edges, lacking)
    collectives = [wait for wait in waits if not wait.call.is_p2p]
    if collectives and not any(one.is_stopped or one.life == DEAD for one in known.values()):
        return _judge_entered(known, collectives)
    return _judge_stacks(known, set(edges))


# ---------------------------------------------------------------------- who waits for whom


def _waits(known: Known) -> Iterator[_WaitingRank]:
    for rank, state, group in _gathered(known):
        collective = next((call for call in state.in_flight if not call.is_p2p), None)
        if collective is not None:
            late = group.late(known, collective.sequence)
            yield _WaitingRank(rank, group, collective, late - {rank} if rank in late else late)
        for call in state.in_flight:
            peer = call.peer
            if peer is not None and peer < len(group.ranks):
                target = group.ranks[peer]
                met = _meets(known.get(target), group, rank, call)
                yield _WaitingRank(rank, group, call, frozenset() if met else frozenset({target}))


def _gathered(known: Known) -> list[tuple[int, GroupState, _WaitingGroup]]:
    """Return every rank's view of each of its groups, with what all ranks say of that group."""
    groups: dict[tuple[str, tuple[int, ...]], _WaitingGroup] = {}
    found = []
    for rank, one in known.items():
        for state in one.groups or ():
            group = groups.setdefault((state.name, state.ranks), _WaitingGroup(state.name, state.ranks))
            group.states.setdefault(rank, state)
            found.append((rank, state, group))
    return found


def _progress(one: RankEvidence | None, state: GroupState | None) -> float:
    """Return the last collective that a rank has entered; where its recorder is silent, its stack may tell."""
    if one is None or not _can_move(one):
        return -math.inf
    if one.groups is None:
        return math.inf if communicates(one) else -math.inf
    return -math.inf if state is None else state.entered


def _meets(peer: RankEvidence | None, group: _WaitingGroup, rank: int, call: PendingCall) -> bool:
    """Whether the rank at the other end receives what `rank` sends in `call`, or the other way round."""
    if peer is None:
        return False
    if peer.groups is None and _can_move(peer):
        return communicates(peer)
    same = group.states.get(peer.rank)
    others = (other for other in (same.in_flight if same else ()) if other.is_p2p and other.op[:4] != call.op[:4])
    return any(other.peer is not None and group.ranks[other.peer] == rank for other in others)


def _can_move(one: RankEvidence) -> bool:
    return one.life == RUNNING and not one.is_stopped


def _is_free(one: RankEvidence, edges: Mapping[int, object]) -> bool:
    """Whether a rank is known to wait for nobody: it cannot move, or is in no call, neither noted nor on its stack."""
    if not _can_move(one):
        return True
    told = one.groups is not None or bool(one.main_frames)
    return told and one.rank not in edges and not communicates(one)


# ---------------------------------------------------------------------- the judgements


def _judge_lacking(
    known: Known, waits: Sequence[_WaitingRank], edges: Mapping[int, frozenset[int]], lacking: frozenset[int]
) -> HangVerdict:
    """Some members of a group have not entered what others are in."""
    blamed = {rank for rank in lacking & known.keys() if _is_free(known[rank], edges)}
    absent = {rank for rank in lacking if rank not in known or not _is_told(known[rank])}
    if not blamed and not absent:  # those that lack wait themselves, in sends and receives or in a circle
        blamed = {rank for rank in _silent(known) if _is_free(known[rank], edges)} or _astray(known, edges)
        if not blamed:
            return _deadlock(known, waits)
    place_ranks = blamed & lacking or absent or lacking
    wait = min(
        (wait for wait in waits if not wait.targets.isdisjoint(place_ranks)),
        key=lambda wait: (wait.call.is_p2p, wait.call.sequence, -len(wait.targets), wait.rank),
    )
    culprits = _culprits(known, blamed)
    waiting = tuple(sorted(rank for rank in _waiting(known, edges) if rank not in blamed))
    return HangVerdict(
        kind=StandstillKind.NOT_ENTERED if culprits else StandstillKind.ELSEWHERE,
        culprits=culprits,
        waiting=waiting,
        absent=tuple(sorted(absent)),
        group=wait.group.name,
        op=wait.call.op,
        sequence=wait.call.sequence,
        text=_lacking_text(known, wait, culprits, sorted(absent)),
    )


def _lacking_text(known: Known, wait: _WaitingRank, culprits: Sequence[Culprit], absent: Sequence[int]) -> str:
    inside = [rank for rank, state in wait.group.states.items() if wait.call in state.in_flight]
    if not culprits:
        return f"{they(inside, 'waits')} in {wait.place} for {spans(absent)}, of which nothing is known here"
    blamed = [culprit.rank for culprit in culprits]
    clauses = [(culprit.rank, culprit.text) for culprit in culprits]
    if not set(blamed) & wait.targets or not any(_can_move(known[rank]) for rank in blamed):
        return f"{reasons(clauses, named=False)}; {they(inside, 'waits')} in {wait.place}"
    entered = "met" if wait.call.is_p2p else "entered"
    return (
        f"{they(blamed, 'has')} not {entered} {wait.place}, in which {they(inside, 'waits')}: "
        f"{reasons(clauses, named=True)}"
    )


def _astray(known: Known, edges: Mapping[int, frozenset[int]]) -> set[int]:
    """Return those of a circle that are in it only by a collective that they began and do not wait for."""
    found = {rank for rank in edges if known[rank].main_frames and not communicates(known[rank])}
    return found if found != set(edges) else set()


def _deadlock(known: Known, waits: Sequence[_WaitingRank]) -> HangVerdict:
    first: dict[int, _WaitingRank] = {}
    for wait in sorted(waits, key=lambda wait: (not wait.targets, wait.call.sequence)):
        first.setdefault(wait.rank, wait)
    calls = tuple(_rank_call(known, first[rank]) for rank in sorted(first))
    waiting = sorted(_waiting(known, first))
    said = [
        f"rank {call.rank} is in {call.op} #{call.sequence} of {call.group}{in_place(call.where)}" for call in calls
    ]
    said += [f"rank {rank} is{_in_function(known, [rank])}" for rank in waiting if rank not in first]
    return HangVerdict(
        kind=StandstillKind.DEADLOCK,
        waiting=tuple(waiting),
        group=calls[0].group,
        op=calls[0].op,
        sequence=calls[0].sequence,
        calls=calls,
        text=f"{they(waiting, 'waits')} for each other: {'; '.join(said[:MAX_NAMED])}",
    )


def _judge_entered(known: Known, waits: Sequence[_WaitingRank]) -> HangVerdict:
    """All members have entered what is waited in: their calls do not fit, or what carries them out does not move."""
    first = min(waits, key=lambda wait: (wait.call.sequence, wait.group.name, wait.rank))
    same = sorted((wait for wait in waits if wait.group is first.group), key=lambda wait: wait.rank)
    forms: dict[object, list[_WaitingRank]] = {}
    for wait in same:
        forms.setdefault(_form(wait.call), []).append(wait)
    by_size = sorted(forms.values(), key=len)
    odd = [wait for of_form in by_size[:-1] for wait in of_form] if 2 * len(by_size[-1]) > len(same) else []
    has_begun = any(wait.call.state == "started" for wait in same)
    late = [wait for wait in same if has_begun and wait.call.state == "scheduled"]
    if len(forms) > 1:
        kind, text = StandstillKind.MISMATCH, _mismatch_text(known, first, list(forms.values()))
        culprits = [Culprit(rank=w.rank, cause="mismatch", text=f"is in {form_text(w.call)}") for w in odd]
    else:
        kind = StandstillKind.STUCK
        text = f"{they([wait.rank for wait in same], 'has')} all entered {first.place}, and none comes out of it"
        culprits = [Culprit(rank=w.rank, cause="device", text="has a device that has not begun it") for w in late]
        clauses = [(culprit.rank, culprit.text) for culprit in culprits]
        text += f": {reasons(clauses, named=False)}" if culprits else ": look at the network and at its library"
    blamed = {culprit.rank for culprit in culprits}
    return HangVerdict(
        kind=kind,
        culprits=tuple(sorted(culprits, key=lambda culprit: culprit.rank)),
        waiting=tuple(wait.rank for wait in same if wait.rank not in blamed),
        group=first.group.name,
        op="/".join(sorted({wait.call.op for wait in same})),
        sequence=first.call.sequence,
        calls=tuple(_rank_call(known, wait) for wait in same),
        text=text,
    )


def _mismatch_text(known: Known, first: _WaitingRank, forms: Sequence[Sequence[_WaitingRank]]) -> str:
    said = []
    for waits in forms:
        ranks = [wait.rank for wait in waits]
        said.append(f"{they(ranks, 'is')} in {form_text(waits[0].call)}{in_place(where(known[ranks[0]]))}")
    return f"the ranks of {first.group.name} call different collectives as #{first.call.sequence}: {'; '.join(said)}"


def _judge_stacks(known: Known, in_flight: set[int]) -> HangVerdict:
    """No collective tells who is missing: whoever is in no communication call is."""
    inside = _waiting(known, in_flight)
    waiting = sorted(inside)
    blamed = {rank for rank, one in known.items() if one.is_stopped or one.life == DEAD}
    blamed = blamed or {rank for rank in _silent(known) - inside if _is_told(known[rank])}
    if not blamed:
        text = "nothing tells what the ranks are doing"
        if waiting:
            text = f"{they(waiting, 'waits')}{_in_function(known, waiting)}, and nothing tells for whom"
        return HangVerdict(kind=StandstillKind.UNKNOWN, waiting=tuple(waiting), text=text)
    culprits = _culprits(known, blamed)
    text = reasons(((culprit.rank, culprit.text) for culprit in culprits), named=False)
    if waiting:
        text += f"; {they(waiting, 'waits')}{_in_function(known, waiting)}"
    return HangVerdict(kind=StandstillKind.BUSY, culprits=culprits, waiting=tuple(waiting), text=text)


# ---------------------------------------------------------------------- parts of them


def _waiting(known: Known, edges: Iterable[int]) -> set[int]:
    """Return the ranks that are in a call, as their recorder or their stack tells."""
    inside = set(edges)
    return {rank for rank, one in known.items() if _can_move(one) and (rank in inside or communicates(one))}


def _silent(known: Known) -> set[int]:
    """Return the living ranks that give no sign, leaving out those that still do while others do not."""
    alive = [one for one in known.values() if one.life == RUNNING]
    longest_s = max((one.silent_s for one in alive), default=0.0)
    return {one.rank for one in alive if 0 < one.silent_s >= _SILENT_SHARE * longest_s}


def _is_told(one: RankEvidence) -> bool:
    """Whether anything but its heartbeat is known of a rank."""
    return not _can_move(one) or one.groups is not None or bool(one.main_frames)


def _culprits(known: Known, ranks: Iterable[int]) -> tuple[Culprit, ...]:
    causes = {rank: cause_of(known[rank]) for rank in sorted(ranks)}
    return tuple(Culprit(rank=rank, cause=cause, text=text) for rank, (cause, text) in causes.items())


def _form(call: PendingCall) -> object:
    sizes = tuple(_elements(shape) for shape in call.shapes) if call.op in _SAME_SIZE else ()
    return call.op, sizes


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _rank_call(known: Known, wait: _WaitingRank) -> RankCall:
    group, call = wait.group.name, wait.call
    return RankCall(rank=wait.rank, group=group, op=call.op, sequence=call.sequence, where=where(known[wait.rank]))


def _in_function(known: Known, ranks: Iterable[int]) -> str:
    functions = sorted({called(known[rank].main_frames) for rank in ranks} - {""})
    return f" in {' and '.join(functions)}" if functions else ""
