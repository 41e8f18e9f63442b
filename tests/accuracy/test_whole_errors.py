"""Errors of a gradient as a whole: truth is the fault that was planted, and sums computed in bfloat16 by hand."""

import pytest
import torch
from torch.nn import functional

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import family_of
from trainermon.accuracy.judge import Status, judge_gradient
from trainermon.accuracy.products import BackwardCall, GradientSum, VectorProduct, gradients_on

UNIT = 2.0**-8
ROWS = 64


def backward_of(name, function, tensors, gradient):
    wanted = [number for number, one in enumerate(tensors) if one.is_floating_point()]
    call = OperationCall(function, tensors, {})
    return BackwardCall(call, [gradient.to(torch.bfloat16)], family_of(name), wanted)


def linear(seed=0):
    torch.manual_seed(seed)
    tensors = [torch.randn(ROWS, 48).bfloat16(), torch.randn(32, 48).bfloat16(), torch.randn(32).bfloat16()]
    return backward_of("linear", functional.linear, tensors, torch.randn(ROWS, 32))


def judged(given, backward, number):
    total = GradientSum([(VectorProduct(backward), number)], given)
    return judge_gradient(given, total, backward.coarsest)


@pytest.mark.parametrize("number", range(3))
def test_a_gradient_a_tenth_too_large_is_no_rounding_of_16_bits(number):
    backward = linear()
    sound = gradients_on(backward, "cpu")[number]

    assert judged(sound, backward, number).status is Status.PASS
    assert judged(sound * 1.1, backward, number).status is Status.ERROR
    coarse = sound * (1 + 8 * UNIT * torch.randn(sound.shape)).bfloat16()
    assert judged(coarse, backward, number).status is Status.WARNING


def test_errors_that_are_large_together_are_an_error_where_each_might_be_rounding():
    backward = linear()
    sound = gradients_on(backward, "cpu")[1]
    allowed = VectorProduct(backward).allowed(1, UNIT)
    signs = 2 * torch.randint(0, 2, sound.shape) - 1

    found = judged((sound + 0.5 * signs * allowed).bfloat16(), backward, 1)
    assert (found.status, found.worst > 1) == (Status.ERROR, True)


def test_a_sum_of_one_sign_in_16_bits_may_lose_its_last_terms():
    """4 096 ones, added one by one in bfloat16, come to 256: half a roundoff of that is left out."""
    torch.manual_seed(0)
    tensors = [torch.randn(4096, 32).bfloat16(), torch.randn(32).bfloat16()]
    backward = backward_of("add", torch.add, tensors, torch.ones(4096, 32))
    total = torch.zeros(32, dtype=torch.bfloat16)
    for _ in range(4096):
        total += 1

    assert float(total[0]) == 256
    assert VectorProduct(backward).is_swamped(1, UNIT)
    few = [torch.randn(16, 32).bfloat16(), torch.randn(32).bfloat16()]
    assert not VectorProduct(backward_of("add", torch.add, few, torch.ones(16, 32))).is_swamped(1, UNIT)


@pytest.mark.parametrize("wrong", [0, 1])
def test_of_two_terms_the_one_is_named_that_is_scaled(wrong):
    products = [VectorProduct(linear(seed)) for seed in (0, 1)]
    parts = [product.results[0] for product in products]
    total = GradientSum([(product, 0) for product in products], products[0].backward.call.tensors[0])

    assert total.culprit(parts[0] + parts[1] + 0.1 * parts[wrong]) == wrong
    assert total.culprit(parts[0] + parts[1] + torch.randn(parts[0].shape)) is None
    assert total.culprit((parts[0] + parts[1]) * 1.1) is None
