"""Whose count of a group's collectives is believed: the recorder's, the rank's own, or neither."""

import dataclasses
from typing import Any

import pytest

from trainermon.agent.hang.evidence import GroupState, PendingCall, RankEvidence, StackFrame, ThreadStack
from trainermon.agent.hang.recorder import RankGroups
from trainermon.agent.hang.sources import joined_sources, noted_groups
from trainermon.agent.hang.verdict import StandstillKind, verdict
from trainermon.core.call_notes import (
    MARK,
    NOTES_BYTES,
    as_failed,
    call_offset,
    check_sum,
    note_offset,
    pack_begun,
    pack_call,
)  # fmt: skip

ABOUT = RankGroups(groups={"0": ("world", (4, 5, 6)), "7": ("dp", (4, 6))})
TRAIN = StackFrame(function="train", file="/job/train.py", line=31)
BACKWARD = (
    StackFrame(function="_engine_run_backward", file="/env/site-packages/torch/autograd/graph.py", line=8),
    TRAIN,
)


def content(*notes):
    written = bytearray(NOTES_BYTES)
    written[: len(MARK)] = MARK
    for place, (name, collectives, call) in enumerate(notes):
        begun = pack_begun(check_sum(name), collectives=collectives, p2p=3)
        written[note_offset(place) : call_offset(place) + len(call)] = begun + call
    return bytes(written)


def state(entered, *calls, name="world"):
    return GroupState(name=name, ranks=(0, 1), entered=entered, in_flight=calls)


def rank(number, recorded=None, noted=None, *, frames=(TRAIN,), **options):
    stacks = (ThreadStack(thread="MainThread", is_main=True, frames=frames),)
    known: dict[str, Any] = {"silent_s": 60.0, "process_state": "S", "world_size": 2, "stacks": stacks}
    return RankEvidence(rank=number, groups=recorded, noted=noted, **(known | options))


def wait(sequence, op="all_reduce", **options):
    return PendingCall(op=op, sequence=sequence, **options)


def blamed(evidence):
    return [culprit.rank for culprit in verdict(evidence).culprits]


def test_notes_are_named_like_the_recorders():
    received = content(("7", 12, pack_call("recv", 3, peer=1)), ("0", 5, pack_call("all_reduce", 5, elements=8)))

    assert noted_groups(received, ABOUT, 4) == (
        GroupState(
            name="world",
            ranks=(4, 5, 6),
            entered=5,
            in_flight=(PendingCall(op="all_reduce", sequence=5, shapes=((8,),)),),
        ),
        GroupState(
            name="dp", ranks=(4, 6), entered=12, in_flight=(PendingCall(op="recv 0<-1", sequence=3, is_p2p=True),)
        ),
    )
    failed = content(("0", 5, as_failed(pack_call("all_reduce", 5, elements=8))))
    (call,) = noted_groups(received, ABOUT, 4)[0].in_flight
    assert noted_groups(failed, ABOUT, 4)[0] == GroupState(name="world", ranks=(4, 5, 6), entered=5, failed=(call,))
    assert noted_groups(content(), ABOUT, 4)[0] == GroupState(name="world", ranks=(4, 5, 6))


@pytest.mark.parametrize("found", [b"", bytes(NOTES_BYTES), content()[:1000]])
def test_what_holds_no_notes_tells_nothing(found):
    assert noted_groups(found, ABOUT, 4) is None


def test_without_a_recorder_the_notes_tell_who_has_not_entered():
    evidence = [rank(0, None, (state(5, wait(5)),)), rank(1, None, (state(4),))]

    hang = verdict(evidence)

    assert (hang.kind, hang.op, hang.sequence, blamed(evidence)) == (StandstillKind.NOT_ENTERED, "all_reduce", 5, [1])


def test_recorder_that_tells_of_no_collective_leaves_it_to_the_notes():
    """As an NCCL recorder does in a process that only uses gloo."""
    evidence = [rank(0, (state(0),), (state(5, wait(5)),)), rank(1, (state(0),), (state(4),))]

    assert blamed(evidence) == [1]


def test_recorder_counts_where_it_tells_of_a_group_as_it_sees_what_cpp_calls():
    evidence = [rank(0, (state(9, wait(9)),), (state(2),)), rank(1, (state(8),), (state(2),))]

    assert verdict(evidence).sequence == 9
    assert blamed(evidence) == [1]


def test_numbers_of_two_sources_are_never_compared():
    evidence = [rank(0, (state(9, wait(9)),), (state(5, wait(5)),)), rank(1, None, (state(4),))]

    assert verdict(evidence).sequence == 5
    assert blamed(evidence) == [1]
    unnoted = [evidence[0], dataclasses.replace(evidence[1], noted=None)]
    assert joined_sources(unnoted)[0].groups == evidence[0].groups


def test_send_or_receive_is_known_from_the_notes_alone():
    """Gloo's recorder does not note them."""
    receives = wait(1, "recv 1<-0", is_p2p=True)
    evidence = [rank(0, (state(4),), (state(4),)), rank(1, (state(4),), (state(4, receives),))]

    hang = verdict(evidence)

    assert blamed(evidence) == [0]
    assert hang.text.startswith("rank 0 has not met recv 1<-0 #1 of world, in which rank 1 waits")


def test_two_that_receive_from_each_other_wait_for_each_other():
    evidence = [
        rank(number, None, (state(0, wait(1, f"recv {number}<-{1 - number}", is_p2p=True)),)) for number in (0, 1)
    ]

    assert (verdict(evidence).kind, blamed(evidence)) == (StandstillKind.DEADLOCK, [])


@pytest.mark.parametrize("noted", [None, (state(0),)])
def test_rank_that_sleeps_in_a_backward_waits_for_the_one_that_does_something_else(noted):
    """DDP's reducer is C++: neither the notes nor Python's stack show it."""
    evidence = [rank(0, None, noted, frames=BACKWARD), rank(1, None, noted, process_state="R")]

    assert blamed(evidence) == [1]
    assert verdict(evidence).text.endswith("rank 0 waits in backward")


def test_rank_that_computes_in_a_backward_is_blamed_for_it():
    busy = StackFrame(function="backward", file="/job/function.py", line=3)
    for culprit in (
        rank(0, None, frames=BACKWARD, process_state="R"),
        rank(0, None, frames=(busy, *BACKWARD), process_state="S"),
    ):
        assert blamed([culprit, rank(1, None, frames=BACKWARD)]) == [0]
