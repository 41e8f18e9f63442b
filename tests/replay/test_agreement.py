"""All ranks get the same answer, whenever they ask, whether they ask at all, and whatever they have to say."""

import random
import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore

from trainermon.replay.agreement import ReplayAgreement, ReplayAnswer

STEPS = ((4, 4),)


def ask(num_ranks, asking, *, wait_s=900.0, store=None):
    """Let each of `asking` (rank, kept, reason, delay) ask from a thread of its own; return the answers."""
    store = store or HashStore()
    answers = {}

    def run(rank, kept, reason, delay_s):
        time.sleep(delay_s)
        agreement = ReplayAgreement(store, rank=rank, num_ranks=num_ranks, wait_s=wait_s)
        answers[rank] = agreement.reach("step", kept=kept, reason=reason)

    threads = [threading.Thread(target=run, args=each) for each in asking]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=900)
    return answers


def test_all_replay_what_every_one_of_them_has_kept():
    kept = [((4, 4), (4, 3)), ((4, 2), (4, 4)), ((4, 4), (4, 4))]

    answers = ask(3, [(rank, of_rank, "", 0) for rank, of_rank in enumerate(kept)])

    assert set(answers.values()) == {ReplayAnswer(2)}


def test_one_reason_against_is_everybodys():
    answers = ask(3, [(0, STEPS, "", 0), (1, STEPS, "no room", 0), (2, STEPS, "", 0)])

    assert set(answers.values()) == {ReplayAnswer(0, "rank 1: no room")}


def test_a_rank_that_never_asks_makes_the_others_stop_waiting():
    answers = ask(3, [(0, STEPS, "", 0), (2, STEPS, "", 0)], wait_s=3.0)

    assert set(answers.values()) == {ReplayAnswer(0, "1 of 3 ranks did not ask for it within 3 s")}


def test_a_rank_that_asks_too_late_gets_the_answer_that_was_given():
    store = HashStore()
    early = ask(2, [(0, STEPS, "", 0)], wait_s=0.05, store=store)

    late = ask(2, [(1, STEPS, "", 0)], wait_s=0.05, store=store)

    assert early[0] == late[1]
    assert not late[1].micro_steps


def test_ranks_whose_steps_had_different_lengths_do_not_replay():
    answers = ask(2, [(0, ((4, 4),), "", 0), (1, ((5, 5),), "", 0)])

    assert len(set(answers.values())) == 1
    assert "micro steps" in answers[0].reason


@pytest.mark.parametrize("seed", range(20))
def test_nobody_ever_differs(seed):
    drawn = random.Random(seed)
    asking = [(rank, ((4, drawn.randint(1, 4)),), "", drawn.uniform(0, 0.04)) for rank in range(6)]

    answers = ask(6, asking, wait_s=0.03)

    assert len(set(answers.values())) == 1


def test_without_a_store_the_answer_is_no():
    class Gone:
        def compare_set(self, *_):
            raise RuntimeError("connection reset")

    answer = ReplayAgreement(Gone(), rank=0, num_ranks=2, wait_s=1).reach("step", kept=STEPS)

    assert answer == ReplayAnswer(0, "the ranks could not agree: connection reset")
