"""Products too large for float64 as a whole: a sound one passes, wrong ones are found."""

import math

import pytest
import torch
from torch.nn import functional

from trainermon.accuracy import large
from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.judge import Status


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    monkeypatch.setattr(large, "MAX_PRODUCTS", 2**20)


def judged(dtype, alter):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(700, 64).to(dtype), torch.randn(900, 64).to(dtype), torch.randn(900).to(dtype)
    result = functional.linear(x, weight, bias)
    alter(result)
    [found] = large.judge_any_call("linear", OperationCall(functional.linear, [x, weight, bias], {}), result)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_product_passes(dtype):
    found = judged(dtype, lambda result: None)

    assert (found.status, found.reason, found.shape, found.standard) == (Status.PASS, "", (700, 900), "projected")


def plant_nan(result):
    result[300, 7] = math.nan


def lose_the_tail(result):
    result[-60:] = 0


def scale_a_row(result):
    result[123] *= 1.01


def lose_a_tile(result):
    result[128:256, 256:384] = 0


@pytest.mark.parametrize("alter", [plant_nan, lose_the_tail, scale_a_row, lose_a_tile])
def test_a_wrong_product_is_found(alter):
    found = judged(torch.float32, alter)

    assert found.status is Status.ERROR
    assert found.reason.endswith(", projected")
    if alter is plant_nan:
        assert (found.index, found.device_nonfinite) == ((300, 7), 1)


def test_projections_alone_find_a_tile(monkeypatch):
    monkeypatch.setattr(large, "_blocks", lambda given: ())

    assert judged(torch.float32, lambda result: None).status is Status.PASS
    assert judged(torch.float32, lose_a_tile).status is Status.ERROR


def test_a_smaller_product_is_judged_whole():
    x = torch.randn(8, 8)

    [found] = large.judge_any_call("mm", OperationCall(torch.mm, [x, x], {}), x @ x)

    assert (found.status, found.standard) == (Status.PASS, "contraction")
