"""Which of several dead ranks is the cause."""

import dataclasses
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.agent.hang.crash import crash_verdict, exception_line, memory_hint
from trainermon.agent.hang.evidence import ProcessExit, RankEvidence

PEER = "Traceback (most recent call last):\n  File …\nRuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1234\n"
BUG = 'Traceback (most recent call last):\n  File "train.py", line 3, in main\nValueError: bad batch\n'


def dead(rank, *, error="", signal=None, status=None, step=12):
    how = ProcessExit(signal=signal, status=status)
    return RankEvidence(rank=rank, life="dead", error=error, exit=how, step=step, phase="step")


def blamed(evidence, order):
    return [culprit.rank for culprit in crash_verdict(evidence, order).culprits]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_a_reason_of_its_own_counts_more_than_who_was_seen_first(order):
    ranks = [dead(0, error=PEER, status=1), dead(1, signal=9), dead(2, signal=15)]

    assert blamed(ranks, order) == [1]


def test_exception_counts_more_than_the_losses_that_follow_it():
    ranks = [dead(0, error=PEER, status=1), dead(1, error=BUG, status=1), dead(2, signal=15)]
    hang = crash_verdict(ranks, [0, 2, 1])

    assert hang.text == "rank 1 failed: ValueError: bad batch at step 12 (phase step); ranks 0, 2 ended after that"


def test_same_exception_on_all_ranks_is_everybodys():
    ranks = [dead(rank, error=BUG, status=1) for rank in range(3)]
    hang = crash_verdict(ranks, [2, 0, 1])

    assert [culprit.rank for culprit in hang.culprits] == [0, 1, 2]
    assert hang.text.startswith("ranks 0–2 failed: ValueError: bad batch at step 12")


def test_of_ends_without_a_reason_the_first_one_counts():
    assert blamed([dead(0), dead(1)], [1, 0]) == [1]
    assert blamed([dead(0, error=PEER), dead(1, error=PEER)], [1, 0]) == [1]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("follower", [dead(0, status=1), dead(0, signal=6), dead(0)])
@pytest.mark.parametrize("cause", [dead(1, signal=9), dead(1, signal=11), dead(1, error=BUG, status=1)])
def test_end_that_explains_itself_counts_more_than_one_that_does_not(order, follower, cause):
    """The follower is one whose exception nobody could read, or whose library has aborted it."""
    assert blamed([follower, cause], order) == [1]


def test_rank_that_left_is_to_blame_for_those_that_lost_it():
    def left(status):
        return RankEvidence(rank=1, life="ended", step=11, exit=ProcessExit(status=status))

    followers = [dead(0, error=PEER, status=1), dead(2, error=PEER, status=1)]
    hang = crash_verdict([*followers, left(3)], [0, 2])

    assert hang.text == "rank 1 ended before the others, at step 11, with exit status 3; ranks 0, 2 lost the connection"
    assert blamed([*followers, left(0)], [0, 2]) == [1]
    assert blamed([dead(0, error=BUG, status=1), left(0)], [0]) == [0]
    assert blamed([*followers, dataclasses.replace(left(0), step=13)], [0, 2]) == [0]


def test_nobody_is_to_blame_for_a_stop_from_outside():
    for other in (dead(1, signal=15), dead(1, error=PEER, status=1)):
        hang = crash_verdict([dead(0, signal=15), other], [0, 1])
        assert hang.culprits == ()
        assert hang.text.startswith("ranks 0–1 ended by SIGTERM from outside")
    assert blamed([dead(0, signal=15), dead(1, error=BUG, status=1)], [0, 1]) == [1]


def test_rank_that_lives_is_not_blamed():
    hang = crash_verdict([dead(0, signal=11), RankEvidence(rank=1)], [0])

    assert ([culprit.rank for culprit in hang.culprits], hang.waiting) == ([0], (1,))


def test_exception_line_is_the_exception_itself():
    assert exception_line(BUG) == "ValueError: bad batch"
    assert exception_line("ValueError: two\n  lines\n") == "ValueError: two"
    assert exception_line("") == ""


MESSAGES = st.lists(st.text("abc :", max_size=8), max_size=3).map("\n".join)


def printed(message, note):
    """Return what Python prints of an exception with a note that was raised while another one was handled."""
    error = ValueError(f"first line\n{message}")
    error.__context__ = KeyError("before")
    return "".join(traceback.format_exception(error.with_traceback(traceback_here()))) + note  # as Python prints one


def traceback_here():
    try:
        return 1 / 0
    except ZeroDivisionError as error:
        return error.__traceback__


@given(MESSAGES, st.text("xyz\n", max_size=5))
def test_of_a_message_with_many_lines_the_first_is_told(message, note):
    assert exception_line(printed(message, note)) == "ValueError: first line"


def test_of_a_worker_of_the_loader_its_own_exception_is_told():
    text = (
        "Traceback (most recent call last):\n  File …\nIndexError: Caught IndexError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n  File …\nIndexError: list index out of range\n\n"
    )

    assert exception_line(text) == "IndexError: list index out of range"


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_of_two_exceptions_the_one_that_was_raised_first_is_the_cause(order):
    early, late = BUG, BUG.replace("bad batch", "collective failed")
    ranks = [dead(0, error=late), dead(1, error=early)]

    assert blamed(
        [dataclasses.replace(ranks[0], failed_s=20.0), dataclasses.replace(ranks[1], failed_s=19.5)], order
    ) == [1]
    assert blamed([ranks[0], dataclasses.replace(ranks[1], failed_s=19.5)], order) == [order[0]]


def test_hints_at_a_lack_of_memory():
    assert "killed 2 processes" in memory_hint(dead(0, signal=9), oom_kills=2)
    assert memory_hint(dead(0, signal=9), oom_kills=0) is None
    assert "/dev/shm" in memory_hint(dead(0, signal=7), oom_kills=0)
    assert "ran out of memory" in memory_hint(dead(0, error="torch.OutOfMemoryError: CUDA out of memory"), oom_kills=0)
    assert memory_hint(RankEvidence(rank=0, life="dead"), oom_kills=1) is None
