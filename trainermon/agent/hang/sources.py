"""How far each rank has come in its process groups: its flight recorder and its own notes, joined.

The recorder sees what C++ calls too, but some versions of torch have none for gloo, and it does not note gloo's sends
and receives. A rank's own notes (`monitor.call_notes`) see only what Python calls. Each source numbers collectives in
its own way, so all ranks of a group are judged by the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from trainermon.agent.hang.evidence import RUNNING, GroupState, PendingCall, RankEvidence
from trainermon.agent.hang.recorder import RankGroups
from trainermon.core.call_notes import RECV, SEND, CallNote, check_sum, parse_notes

GroupKey = tuple[str, tuple[int, ...]]


def read_notes(pid: int, about: RankGroups) -> bytes:
    """Read the notes of collectives that the rank in process `pid` keeps in shared memory, as bytes.

    Empty where it keeps none, or this process may not read them.
    """
    try:
        return Path(f"/proc/{pid}/fd/{about.calls}").read_bytes() if pid and about.calls >= 0 else b""
    except OSError:
        return b""


def noted_groups(content: bytes, about: RankGroups, rank: int) -> tuple[GroupState, ...] | None:
    """Return how far `rank` has come in each process group by the notes `content` that it keeps of its calls.

    None where there are none.
    """
    notes = parse_notes(content)
    if notes is None:
        return None
    by_group = {note.group: note for note in notes}
    return tuple(
        _state(name, ranks, by_group.get(check_sum(torch_name)), rank)
        for torch_name, (name, ranks) in about.groups.items()
    )


def _state(name: str, ranks: tuple[int, ...], note: CallNote | None, rank: int) -> GroupState:
    if note is None:
        return GroupState(name=name, ranks=ranks)
    calls = (_call(note, ranks.index(rank) if rank in ranks else -1),) if note.operation else ()
    in_flight, failed = ((), calls) if note.failed else (calls, ())
    return GroupState(name=name, ranks=ranks, entered=note.collectives, in_flight=in_flight, failed=failed)


def _call(note: CallNote, own: int) -> PendingCall:
    if note.operation in (SEND, RECV):
        arrow = "->" if note.operation == SEND else "<-"  # as NCCL's recorder writes it
        op = f"{note.operation} {own}{arrow}{note.peer}" if note.peer >= 0 else note.operation
        return PendingCall(op=op, sequence=note.number, is_p2p=True)
    shapes = ((note.elements,),) if note.elements else ()
    return PendingCall(op=note.operation, sequence=note.number, shapes=shapes)


def joined_sources(evidence: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Return the evidence with one source for each rank's groups, flight recorder or own notes: the better one."""
    moving = [one for one in evidence if one.life == RUNNING and not one.is_stopped]
    recorded = {_key(state) for one in moving for state in one.groups or () if state.entered or state.in_flight}
    if any(one.groups is None for one in moving) and all(one.noted is not None for one in moving):
        recorded = set()  # the notes tell of all ranks, the recorders do not
    return [_joined(one, recorded) for one in evidence]


def _joined(one: RankEvidence, recorded: Collection[GroupKey]) -> RankEvidence:
    """Take the groups in `recorded` from the recorder, the others from the notes; sends and receives from both."""
    if one.noted is None or (one.groups is None and recorded):
        return one
    noted = {_key(state): state for state in one.noted}
    by_recorder = {_key(state): state for state in one.groups or ()}
    states = []
    for key in {**noted, **by_recorder}:
        state = _better(key, noted, by_recorder if key in recorded else {}) or by_recorder[key]
        states.append(_with_p2p(state, noted.get(key)))
    return dataclasses.replace(one, groups=tuple(states))


def _better(
    key: GroupKey, noted: Mapping[GroupKey, GroupState], by_recorder: Mapping[GroupKey, GroupState]
) -> GroupState | None:
    return by_recorder.get(key) or noted.get(key)


def _with_p2p(state: GroupState, noted: GroupState | None) -> GroupState:
    if noted is None or state is noted or any(call.is_p2p for call in state.in_flight):
        return state
    calls = tuple(call for call in noted.in_flight if call.is_p2p)
    return dataclasses.replace(state, in_flight=state.in_flight + calls) if calls else state


def _key(state: GroupState) -> GroupKey:
    return state.name, state.ranks
