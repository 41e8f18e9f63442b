"""What ranks that have died, or lost one, were in: told only where it does not fit together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.agent.hang.crash import crash_verdict
from trainermon.agent.hang.evidence import GroupState, PendingCall, ProcessExit, RankEvidence
from trainermon.agent.hang.misfits import misfit_text


def call(elements, sequence=4, op="all_reduce", **more):
    return PendingCall(op=op, sequence=sequence, shapes=((elements,),) if elements else (), **more)


def rank(number, *calls, failed=(), group="world", **more):
    state = GroupState(name=group, ranks=(0, 1, 2), in_flight=calls, failed=tuple(failed))
    return RankEvidence(rank=number, noted=(state,), **more)


@given(st.dictionaries(st.integers(0, 9), st.integers(1, 4), min_size=2), st.booleans())
def test_sizes_are_told_of_exactly_where_they_differ(sizes, has_failed):
    evidence = [
        rank(number, failed=[call(size)]) if has_failed and number % 2 else rank(number, call(size))
        for number, size in sizes.items()
    ]

    said = misfit_text(evidence)

    assert bool(said) == (len(set(sizes.values())) > 1)
    assert all(f"all_reduce of {size} on rank" in said for size in set(sizes.values()) if said)


def test_equal_forms_are_told_of_together():
    evidence = [rank(0, call(8)), rank(1, failed=[call(9)]), rank(2, call(8))]

    assert misfit_text(evidence) == (
        "all_reduce #4 of world was not given the same number of elements on all ranks: "
        "all_reduce of 8 on ranks 0, 2, all_reduce of 9 on rank 1"
    )


def test_other_operations_under_one_number_are_told_of():
    evidence = [rank(0, call(8)), rank(1, call(0, op="barrier"))]

    assert misfit_text(evidence) == (
        "collective 4 of world was not the same on all ranks: all_reduce of 8 on rank 0, barrier on rank 1"
    )


@pytest.mark.parametrize(
    "other",
    [
        rank(1, call(9, sequence=5)),
        rank(1, call(9), group="tp"),
        rank(1, call(9, is_p2p=True)),
        rank(1),
        RankEvidence(rank=1),
    ],
)
def test_what_is_not_the_same_collective_is_not_compared(other):
    assert misfit_text([rank(0, call(8)), other]) == ""


def test_parts_of_unlike_sizes_fit_where_that_is_allowed():
    assert misfit_text([rank(0, call(8, op="all_gather")), rank(1, call(9, op="all_gather"))]) == ""


def test_the_verdict_on_a_rank_that_a_library_has_aborted_says_so():
    dead = {"life": "dead", "step": 3}
    aborted = rank(0, call(4), exit=ProcessExit(signal=6), **dead)
    lost = rank(1, failed=[call(40_000)], error="RuntimeError: Connection reset by peer\n", **dead)

    said = crash_verdict([aborted, lost], [0, 1]).text

    assert said == (
        "rank 0 was killed by SIGABRT at step 3 (phase step); rank 1 ended after that; all_reduce #4 of world was not "
        "given the same number of elements on all ranks: all_reduce of 4 on rank 0, all_reduce of 40000 on rank 1"
    )
