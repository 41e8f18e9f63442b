"""Results in 16 bits as a whole, long sums of mixed sign, and what is below the smallest number of a type."""

import pytest
import torch
from torch.nn import functional

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import UNDERFLOW, Status, judge_call, judge_gradient
from trainermon.accuracy.products import BackwardCall, GradientSum, VectorProduct

HALVES = (torch.bfloat16, torch.float16)


def verdict(name, function, args, result):
    [found] = judge_call(name, OperationCall(function, args, {}), result)
    return found


@pytest.mark.parametrize("function", [torch.sum, torch.mean, torch.nansum])
@pytest.mark.parametrize("lost", [1024, 8192, 131_072])
def test_a_long_sum_of_mixed_signs_that_lost_its_tail_is_wrong(function, lost):
    torch.manual_seed(1)
    x = torch.randn(1 << 20)
    short = x.clone()
    short[-lost:] = 0

    assert verdict(function.__name__, function, [x], function(x)).status is Status.PASS
    assert verdict(function.__name__, function, [x], function(short)).status is Status.ERROR


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [1 << 10, 1 << 16, 1 << 20])
@pytest.mark.parametrize("blocks", [1, 32, 1024])
def test_sums_in_float32_in_any_parts_are_right(seed, number, blocks):
    torch.manual_seed(seed)
    x = torch.randn(number) * torch.rand(1) + torch.rand(1) - 0.5
    total = torch.zeros(())
    for block in x.view(blocks, -1):
        total = total + block.cumsum(0, dtype=torch.float32)[-1] if blocks > 32 else total + block.sum()
    ordered = x.sort().values

    assert verdict("sum", torch.sum, [x], total).status is Status.PASS
    assert verdict("sum", torch.sum, [ordered], ordered.sum()).status is Status.PASS


@pytest.mark.parametrize("dtype", HALVES)
def test_a_norm_that_is_off_everywhere_is_wrong(dtype):
    torch.manual_seed(0)
    x = torch.randn(64, 768).to(dtype)
    sound = functional.layer_norm(x, (768,))
    small = (x * 0.02).to(dtype)
    wide = small.double()
    outside = (wide - wide.mean(-1, keepdim=True)) / (wide.std(-1, correction=0, keepdim=True) + 1e-5)
    by = 1.02 if dtype is torch.bfloat16 else 1.004

    assert (
        verdict("layer_norm", functional.layer_norm, [x, (768,)], (sound.double() * by).to(dtype)).status
        is Status.ERROR
    )
    assert verdict("layer_norm", functional.layer_norm, [small, (768,)], outside.to(dtype)).status is Status.ERROR
    assert verdict("layer_norm", functional.layer_norm, [x, (768,)], sound).status is Status.PASS


@pytest.mark.parametrize("dtype", HALVES)
def test_a_long_product_that_lost_terms_is_wrong(dtype):
    torch.manual_seed(0)
    rows, weight = torch.randn(16, 8192).to(dtype), torch.randn(24, 8192).to(dtype)
    lost = (rows[:, :-64].double() @ weight[:, :-64].double().T).to(dtype)
    in_parts = sum(
        (one.double() @ other.double().T).to(dtype)
        for one, other in zip(rows.chunk(16, 1), weight.chunk(16, 1), strict=True)
    )

    assert verdict("linear", functional.linear, [rows, weight], lost).status is Status.ERROR
    assert verdict("linear", functional.linear, [rows, weight], in_parts).status in (Status.PASS, Status.WARNING)


def gradient_of(scale, change=lambda one: one, num_rows=32):
    torch.manual_seed(0)
    rows, weight = (torch.randn(num_rows, 48) * 0.1).half(), torch.randn(24, 48).half()
    given = (torch.randn(num_rows, 24) * scale).half()
    backward = BackwardCall(OperationCall(functional.linear, [rows, weight], {}), [given], Family.CONTRACTION, [1])
    made = change((given.double().T @ rows.double()).half().float())
    return judge_gradient(made, GradientSum([(VectorProduct(backward), 1)], made), backward.coarsest)


@pytest.mark.parametrize("scale", [1e-6, 1e-5])
def test_what_is_lost_below_the_smallest_number_of_float16_has_its_own_word(scale):
    found = gradient_of(scale, num_rows=1)

    assert (found.status, found.reason) == (Status.WARNING, UNDERFLOW)


@pytest.mark.parametrize("scale", [1e-2, 1.0])
@pytest.mark.parametrize("change", [lambda one: one * 1.1, lambda one: one.roll(1), lambda one: one * 0])
def test_wrong_gradients_of_float16_are_still_found(scale, change):
    assert gradient_of(scale).status in (Status.PASS, Status.WARNING)
    assert gradient_of(scale, change).status is Status.ERROR


def test_a_tiny_gradient_that_is_far_off_is_no_loss_of_small_numbers():
    assert gradient_of(1e-5, lambda one: one * 8).status is Status.ERROR


@pytest.mark.parametrize(
    ("scale", "reason"), [(1e-7, UNDERFLOW), (1e-6, UNDERFLOW), (4e-6, UNDERFLOW), (1e-3, "coarse"), (1e-1, "coarse")]
)
@pytest.mark.parametrize("place", [0, 1], ids=["input", "weight"])
def test_a_gradient_of_a_convolution_in_float16_is_lost_below_the_smallest_number_or_coarse(scale, reason, place):
    """A sum in float16 is rounded at each number: below the least normal one by the same step, whatever its size."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 4, 6, 6).half(), torch.randn(8, 4, 3, 3).mul(0.1).half()
    given = (torch.randn(1, 8, 4, 4) * scale).half()
    call = OperationCall(functional.conv2d, [x, weight], {})
    backward = BackwardCall(call, [given], Family.CONTRACTION, [place])
    made = torch.zeros_like((x, weight)[place])
    for row in range(4):  # of the result, one after the other
        part = torch.zeros_like(given)
        part[..., row, :] = given[..., row, :]
        one, other = (tensor.double().requires_grad_() for tensor in (x, weight))
        grads = torch.autograd.grad(functional.conv2d(one, other), [one, other], part.double())
        made = made + grads[place].half()

    found = judge_gradient(
        made.float(), GradientSum([(VectorProduct(backward), place)], made.float()), backward.coarsest
    )

    assert (found.status, found.reason) == (Status.WARNING, reason)
