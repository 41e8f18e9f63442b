"""Who is named for a standstill, from evidence that a simulated job leaves, or that is written down by hand."""

import dataclasses
import json
import time
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainermon.agent.hang.evidence import (
    ChildProcess,
    GroupState,
    PendingCall,
    ProcessExit,
    RankAnswer,
    RankEvidence,
    StackFrame,
    ThreadStack,
    parse_evidence,
)
from trainermon.agent.hang.verdict import StandstillKind, verdict
from trainermon.core.errors import ConfigError
from trainermon.core.values import as_plain

LIBRARY = "/env/lib/python3.11/site-packages"
IN_RECV = StackFrame(function="recv", file=f"{LIBRARY}/torch/distributed/distributed_c10d.py", line=2799)
IN_TRAIN = StackFrame(function="train", file="/job/train.py", line=31)


def stack(*frames):
    return (ThreadStack(thread="MainThread", is_main=True, frames=frames),)


def group(name="world", ranks=(0, 1), entered=0, *calls):
    return GroupState(name=name, ranks=ranks, entered=entered, in_flight=calls)


def call(op="all_reduce", sequence=5, **options):
    return PendingCall(op=op, sequence=sequence, **options)


def rank(number, *groups, frames=(), **options):
    known: dict[str, Any] = {"silent_s": 60.0, "process_state": "S", "stacks": stack(*frames) if frames else ()}
    return RankEvidence(rank=number, groups=groups, **(known | options))


def blamed(hang):
    return [culprit.rank for culprit in hang.culprits]


# ------------------------------------------------------------------ a job in small


@st.composite
def standstills(draw):
    """Run a job of collectives that each end when all members are in, until some ranks have stopped for good."""
    size = draw(st.integers(2, 6))
    subsets = st.sets(st.integers(0, size - 1), min_size=2).map(sorted).map(tuple)
    groups = draw(st.lists(subsets, min_size=1, max_size=4, unique=True))
    program = draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=12))
    stuck = {
        draw(st.integers(0, size - 1)): draw(st.integers(0, len(program) - 1)) for _ in range(draw(st.integers(1, 2)))
    }
    position = dict.fromkeys(range(size), 0)  # how many calls of the program a rank has behind it, or is in

    def upcoming(number):
        own = (index for index in range(position[number], len(program)) if number in groups[program[index]])
        return next(own, len(program))

    def arrives(number, index):
        return upcoming(number) >= index and not (number in stuck and upcoming(number) == index >= stuck[number])

    moved = True
    while moved:
        moved = False
        for number in range(size):
            index = upcoming(number)
            if index < len(program) and all(arrives(member, index) for member in groups[program[index]]):
                for member in groups[program[index]]:
                    position[member] = max(position[member], index + 1)
                moved = True
    ranks = []
    for number in range(size):
        index = upcoming(number)
        waits = index < len(program) and not (number in stuck and index >= stuck[number])
        states = []
        for which, members in enumerate(groups):
            if number in members:
                entered = program[: index + waits].count(which)
                in_flight = (call(sequence=entered),) if waits and program[index] == which else ()
                states.append(group(f"g{which}", members, entered, *in_flight))
        ranks.append(rank(number, *states, silent_s=0.0 if index == len(program) else 60.0))
    waiting = [one.rank for one in ranks if any(state.in_flight for state in one.groups)]
    return ranks, set(stuck) - set(waiting), waiting


@given(standstills())
def test_of_a_job_that_stands_still_ranks_that_stopped_are_named_and_none_that_waits(standstill):
    ranks, stopped, waiting = standstill
    assume(waiting)

    hang = verdict(ranks)

    assert hang.kind is StandstillKind.NOT_ENTERED
    assert set(blamed(hang)) <= stopped
    assert blamed(hang)
    assert list(hang.waiting) == waiting
    assert (hang.op, hang.absent) == ("all_reduce", ())


@given(standstills(), st.randoms())
def test_order_of_the_evidence_does_not_matter(standstill, random):
    ranks, _, waiting = standstill
    assume(waiting)
    shuffled = random.sample(ranks, len(ranks))

    assert verdict(shuffled) == verdict(ranks)


@given(standstills())
def test_evidence_of_one_node_never_blames_a_rank_that_waits(standstill):
    ranks, stopped, waiting = standstill
    assume(waiting)
    hang = verdict(ranks[::2])

    assert set(blamed(hang)) <= stopped
    assert not set(blamed(hang)) & set(waiting)


# ------------------------------------------------------------------ single cases


def test_rank_that_has_not_entered_is_named_with_what_it_does_and_where():
    hang = verdict(
        [
            rank(0, group("dp", (0, 1), 812, call(sequence=812)), frames=(IN_RECV, IN_TRAIN)),
            rank(1, group("dp", (0, 1), 811), frames=(IN_TRAIN,), process_state="R"),
        ]
    )

    assert hang.text == (
        "rank 1 has not entered all_reduce #812 of dp, in which rank 0 waits: it is busy in train (/job/train.py:31)"
    )
    assert (hang.kind, hang.group, hang.op, hang.sequence) == (StandstillKind.NOT_ENTERED, "dp", "all_reduce", 812)


def test_the_question_goes_on_to_the_rank_that_is_waited_for_in_another_group():
    """Rank 0 waits for 1 in tp, 1 for 2 in dp: 2 is the cause, though 0 shares no group with it."""
    hang = verdict(
        [
            rank(0, group("tp", (0, 1), 9, call(sequence=9))),
            rank(1, group("tp", (0, 1), 8), group("dp", (1, 2), 4, call("all_gather", 4))),
            rank(2, group("dp", (1, 2), 3), frames=(IN_TRAIN,)),
        ]
    )

    assert (blamed(hang), hang.waiting) == ([2], (0, 1))
    assert (hang.group, hang.op, hang.sequence) == ("dp", "all_gather", 4)


def test_stopped_rank_is_the_cause_even_if_it_had_entered():
    """No thread of a stopped process answers, so its recorder is silent."""
    waiting = [rank(number, group("world", (0, 1, 2), 5, call())) for number in (0, 2)]
    hang = verdict([*waiting, rank_without_groups(1, process_state="T")])

    assert [(culprit.rank, culprit.cause) for culprit in hang.culprits] == [(1, "stopped")]
    assert hang.text == ("rank 1 is stopped (SIGSTOP or a debugger); ranks 0, 2 wait in all_reduce #5 of world")


def rank_without_groups(number, **options):
    return dataclasses.replace(rank(number, **options), groups=None)


def test_missing_ranks_of_another_node_are_not_blamed_but_told():
    hang = verdict([rank(number, group("world", (0, 1, 2, 3), 5, call())) for number in (0, 1)])

    assert (hang.kind, hang.culprits, hang.absent) == (StandstillKind.ELSEWHERE, (), (2, 3))
    assert hang.text == "ranks 0–1 wait in all_reduce #5 of world for ranks 2–3, of which nothing is known here"


def test_rank_that_tells_nothing_is_not_blamed():
    hang = verdict([rank(0, group("world", (0, 1), 5, call())), rank_without_groups(1)])

    assert (hang.kind, hang.culprits, hang.absent) == (StandstillKind.ELSEWHERE, (), (1,))


def test_without_a_recorder_a_rank_whose_stack_is_in_a_collective_waits():
    hang = verdict(
        [
            rank(0, group("world", (0, 1, 2), 5, call())),
            rank_without_groups(1, frames=(IN_RECV, IN_TRAIN)),
            rank_without_groups(2, frames=(IN_TRAIN,)),
        ]
    )

    assert (blamed(hang), hang.waiting) == ([2], (0, 1))


def test_receives_that_no_recorder_notes_are_seen_on_the_stacks():
    """A pipeline over gloo: 3 is in the all-reduce already, 2 and 1 in receives, 0 computes."""
    world = (0, 1, 2, 3)
    hang = verdict(
        [
            rank(0, group("world", world, 4), frames=(IN_TRAIN,), process_state="R"),
            rank(1, group("world", world, 4), frames=(IN_RECV, IN_TRAIN)),
            rank(2, group("world", world, 4), frames=(IN_RECV, IN_TRAIN)),
            rank(3, group("world", world, 5, call())),
        ]
    )

    assert (hang.kind, blamed(hang), hang.waiting) == (StandstillKind.NOT_ENTERED, [0], (1, 2, 3))


def test_receives_of_nccl_lead_along_the_pipeline():
    pp = (4, 5, 6)
    hang = verdict(
        [
            rank(4, group("pp", pp, 0), frames=(IN_TRAIN,)),
            rank(5, group("pp", pp, 0, call("recv 1<-0", 7, is_p2p=True))),
            rank(6, group("pp", pp, 0, call("recv 2<-1", 7, is_p2p=True))),
        ]
    )

    assert (blamed(hang), hang.waiting, hang.op) == ([4], (5, 6), "recv 1<-0")
    assert hang.text.startswith("rank 4 has not met recv 1<-0 #7 of pp, in which rank 5 waits")


def test_only_receives_and_one_rank_elsewhere():
    hang = verdict([rank(0, group(), frames=(IN_RECV, IN_TRAIN)), rank(1, group(), frames=(IN_TRAIN,))])

    assert (hang.kind, blamed(hang), hang.waiting) == (StandstillKind.BUSY, [1], (0,))
    assert hang.text == "rank 1 is blocked in train (/job/train.py:31); rank 0 waits in recv"


def test_all_in_receives_and_nobody_to_blame():
    hang = verdict([rank(number, group(), frames=(IN_RECV, IN_TRAIN)) for number in (0, 1)])

    assert (hang.kind, hang.culprits, hang.waiting) == (StandstillKind.UNKNOWN, (), (0, 1))


def test_odd_one_of_three_calls_is_named():
    world = (0, 1, 2)
    calls = ("all_reduce", "all_gather", "all_reduce")
    hang = verdict([rank(number, group("world", world, 5, call(op))) for number, op in enumerate(calls)])

    assert (hang.kind, blamed(hang), hang.waiting) == (StandstillKind.MISMATCH, [1], (0, 2))


def test_of_two_different_calls_neither_is_named_but_both_are_told():
    hang = verdict([rank(0, group("world", (0, 1), 5, call())), rank(1, group("world", (0, 1), 5, call("broadcast")))])

    assert (hang.kind, hang.culprits, hang.waiting) == (StandstillKind.MISMATCH, (), (0, 1))
    assert [(one.rank, one.op) for one in hang.calls] == [(0, "all_reduce"), (1, "broadcast")]


def test_sums_of_different_size_do_not_fit_but_gathered_pieces_may():
    def job(op):
        shapes = (((10,),), ((20,),))
        return verdict([rank(n, group("world", (0, 1), 5, call(op, shapes=shapes[n]))) for n in (0, 1)])

    assert job("all_reduce").kind is StandstillKind.MISMATCH
    assert "rank 0 is in all_reduce of 10; rank 1 is in all_reduce of 20" in job("all_reduce").text
    assert job("all_gather").kind is StandstillKind.STUCK


def test_collective_that_all_have_entered_is_the_networks_affair():
    hang = verdict([rank(number, group("world", (0, 1), 5, call())) for number in (0, 1)])

    assert (hang.kind, hang.culprits, hang.waiting) == (StandstillKind.STUCK, (), (0, 1))
    assert hang.text == (
        "ranks 0–1 have all entered all_reduce #5 of world, and none comes out of it: "
        "look at the network and at its library"
    )


def test_device_that_has_not_begun_what_the_others_have_is_named():
    states = ("started", "scheduled", "started")
    world = (0, 1, 2)
    hang = verdict([rank(n, group("world", world, 5, call(state=states[n]))) for n in world])

    assert (hang.kind, blamed(hang), hang.culprits[0].cause) == (StandstillKind.STUCK, [1], "device")


def test_groups_entered_in_different_order_are_a_deadlock_without_a_culprit():
    a, b = ("a", (0, 1)), ("b", (0, 1))
    hang = verdict(
        [
            rank(0, group(*a, 5, call(sequence=5)), group(*b, 2)),
            rank(1, group(*a, 4), group(*b, 3, call("broadcast", 3))),
        ]
    )

    assert (hang.kind, hang.culprits, hang.waiting) == (StandstillKind.DEADLOCK, (), (0, 1))
    assert hang.text == (
        "ranks 0–1 wait for each other: rank 0 is in all_reduce #5 of a; rank 1 is in broadcast #3 of b"
    )


def test_in_a_circle_whoever_is_not_in_a_call_by_its_stack_is_named():
    """Rank 1 has begun a broadcast asynchronously and went on to something else."""
    a, b = ("a", (0, 1)), ("b", (0, 1))
    hang = verdict(
        [
            rank(0, group(*a, 5, call(sequence=5)), group(*b, 2), frames=(IN_RECV, IN_TRAIN)),
            rank(1, group(*a, 4), group(*b, 3, call("broadcast", 3)), frames=(IN_TRAIN,)),
        ]
    )

    assert (blamed(hang), hang.waiting) == ([1], (0,))


def test_ended_and_dead_ranks_are_named_as_such():
    waits = rank(0, group("world", (0, 1), 5, call()))
    ended = verdict([waits, rank(1, life="ended", phase="closed")])
    dead = verdict([waits, rank(1, life="dead", exit=ProcessExit(signal=9))])

    assert ended.text == "rank 1 has ended its training; rank 0 waits in all_reduce #5 of world"
    assert dead.text == "rank 1 was killed by SIGKILL; rank 0 waits in all_reduce #5 of world"


def test_single_rank_that_stands_still_is_told_what_it_does():
    frames = (StackFrame(function="get", file="/env/lib/python3.11/queue.py", line=1), IN_TRAIN)
    loader = StackFrame(function="_next_data", file=f"{LIBRARY}/torch/utils/data/dataloader.py", line=9)

    assert verdict([rank(0, frames=frames)]).text == "rank 0 is blocked in train (/job/train.py:31)"
    hang = verdict([rank(0, frames=(frames[0], loader, IN_TRAIN))])
    assert hang.text == "rank 0 waits for its data loader in train (/job/train.py:31)"


def test_rank_that_still_gives_signs_is_not_named_beside_silent_ones():
    hang = verdict([rank(0, frames=(IN_TRAIN,)), rank(1, frames=(IN_TRAIN,), silent_s=1.0)])

    assert blamed(hang) == [0]


def test_nothing_known_is_said():
    assert verdict([]).kind is StandstillKind.UNKNOWN
    assert verdict([rank_without_groups(0, process_state="")]).text == "nothing tells what the ranks are doing"


# ------------------------------------------------------------------ between agents


def test_evidence_survives_the_way_to_another_agent():
    full = rank(
        3,
        group("dp", (1, 3), 7, call("recv 0<-1", 7, is_p2p=True, shapes=((2, 3),))),
        frames=(IN_RECV, IN_TRAIN),
        exit=ProcessExit(status=3),
        children=(ChildProcess(pid=9, name="pt_data_worker", state="S", stacks=stack(IN_TRAIN)),),
        rungs=(RankAnswer(name="py-spy", said="5 threads", answered=True),),
        error="Traceback …",
    )

    assert parse_evidence(json.loads(json.dumps(as_plain(full)))) == full
    assert parse_evidence(as_plain(rank_without_groups(0))) == rank_without_groups(0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rank": "3"}, "rank: found '3'"),
        ({"surprise": 1}, "surprise: unknown key"),
        ({"groups": 5}, "groups: found 5"),
    ],
)
def test_foreign_evidence_that_is_none_is_refused(change, told):
    with pytest.raises(ConfigError, match=told):
        parse_evidence(as_plain(rank(0)) | change)


def test_the_cost_of_a_verdict_does_not_grow_with_the_square_of_the_ranks():
    num_ranks = 1024
    world = tuple(range(num_ranks))
    evidence = [rank(number, group("world", world, 5, call())) for number in world if number != 5]
    evidence.append(rank(5, group("world", world, 4)))

    began_s = time.process_time()
    hang = verdict(evidence)

    assert (hang.kind, blamed(hang), len(hang.waiting)) == (StandstillKind.NOT_ENTERED, [5], num_ranks - 1)
    assert time.process_time() - began_s < 1.5  # 0.02 s; where every rank asks every other, 12 s
