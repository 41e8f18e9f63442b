"""Which calls of which steps are tried."""

from collections import Counter

import pytest
import torch

from trainermon import AccuracyDispatch
from trainermon.dump.online.turns import Turns


@pytest.mark.parametrize("every", [1, 3, 20, 50])
def test_every_call_is_tried_once_in_so_many_steps(every):
    turns, tried, calls = Turns(every=every, budget_ms=0), Counter(), 100
    for _ in range(every):
        turns.begin_step()
        tried.update(call for call in range(calls) if not turns.is_idle and turns.next())

    assert tried == dict.fromkeys(range(calls), 1)


def test_what_a_step_had_no_time_for_is_tried_after_the_idle_steps():
    turns, tried = Turns(every=20, budget_ms=1), []
    for step in range(11):
        turns.begin_step()
        for call in range(8):
            if not turns.is_idle and turns.next():
                tried.append((step, call))
                turns.spend(0.001)

    assert tried == [(0, 1), (10, 4)]


def test_nine_blocks_of_ten_run_without_a_mode(tmp_path):
    dispatch, modes = AccuracyDispatch(sample=100, dump_path=tmp_path), []
    for _ in range(11):
        with dispatch:
            modes.append(torch._C._len_torch_dispatch_stack())

    assert modes == [1, *[0] * 9, 1]
    assert torch._C._len_torch_dispatch_stack() == 0
