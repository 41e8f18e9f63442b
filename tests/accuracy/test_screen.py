"""A quick look accepts sound results without a judge, and no result that the judge finds wrong."""

import math

import pytest
import torch

from tests.accuracy.test_judge import CALLS, FLOATS, healthy
from trainermon.accuracy.judge import Status, judge_call
from trainermon.accuracy.screen import QuickReference


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", sorted(set(CALLS) - {"exp"}))
def test_a_sound_result_is_accepted(name, dtype):
    call, result = healthy(name, dtype)

    assert QuickReference(name, call, result).accepts(result)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_what_the_judge_finds_wrong_is_not_accepted(name, dtype):
    call, result = healthy(name, dtype)
    at = int(result.abs().argmax())
    faults = [result * (1 + 2.0**-power) for power in range(2, 24)]
    for value in (math.nan, math.inf, float(result.view(-1)[at]) * 1.1):
        faults.append(result.clone())
        faults[-1].view(-1)[at] = value
    quick = QuickReference(name, call, result)

    for fault in faults:
        [judgement] = judge_call(name, call, fault)
        assert judgement.status is not Status.ERROR or not quick.accepts(fault)


def test_infinities_of_a_mask_are_accepted():
    scores, mask = torch.randn(8, 8), torch.full((8, 8), -math.inf).triu(1)
    call, _ = healthy("add", torch.float32)
    call = call._replace(args=(scores, mask))

    assert QuickReference("add", call, scores + mask).accepts(scores + mask)
    assert not QuickReference("add", call, scores + mask).accepts(scores)
