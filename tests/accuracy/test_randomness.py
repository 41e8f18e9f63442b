"""Random calls: sound ones are let pass, and draws from elsewhere, or kept elements off by a factor, are found."""

import math

import pytest
import torch
from torch.nn import functional

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.judge import Status, judge_call


def judged(name, args, kwargs, result):
    [found] = judge_call(name, OperationCall(getattr(functional, name, None) or torch.rand, args, kwargs), result)
    return found.status, found.reason


@pytest.fixture
def taken():
    torch.manual_seed(0)
    return torch.randn(50, 8, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["dropout", "dropout1d"])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_a_sound_dropout_passes(taken, name, dtype, share):
    taken = taken.to(dtype)

    for _ in range(20):
        result = getattr(functional, name)(taken, share, training=True)
        assert judged(name, [taken, share], {"training": True}, result) == (Status.PASS, "")


def with_one_more(taken, mask):
    result = taken * mask / 0.9
    result[3, 3, 3] += 1e-3
    return result


def in_blocks(taken, mask):
    return taken / 0.9 * mask.flatten()[: mask.numel() // 16].repeat_interleave(16).view(mask.shape)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda taken, mask: taken * mask, "what it kept is not what it took, scaled"),
        (with_one_more, "what it kept is not what it took, scaled"),
        (lambda taken, mask: taken * mask / 0.9 * mask.flip(0), "a share of 0.1"),
        (in_blocks, "what is dropped depends on its neighbour"),
    ],
)
def test_a_wrong_dropout_is_found(taken, make, reason):
    mask = (torch.rand(taken.shape) > 0.1).float()

    status, found = judged("dropout", [taken], {"p": 0.1, "training": True}, make(taken, mask))

    assert status is Status.ERROR
    assert found.startswith(reason)


@pytest.mark.parametrize("size", [1e-3, 1e-4])
def test_small_numbers_in_16_bits_without_their_scale_are_found(taken, size):
    taken = (taken * size).half()

    status, reason = judged("dropout", [taken], {"p": 0.5}, taken * (torch.rand(taken.shape) > 0.5))

    assert (status, reason) == (Status.ERROR, "what it kept is not what it took, scaled")


@pytest.mark.parametrize(("name", "shape"), [("dropout1d", (40, 64)), ("dropout3d", (200, 2, 3, 4))])
def test_channels_without_a_batch_are_dropped_as_a_whole(name, shape):
    taken = torch.randn(shape)

    assert judged(name, [taken, 0.3], {}, getattr(functional, name)(taken, 0.3)) == (Status.PASS, "")


def test_infinite_and_overflowing_numbers_are_kept_as_they_are():
    taken = torch.tensor([math.inf, -math.inf, 60000.0, 1.0] * 50).half()
    result = torch.where(torch.arange(200) % 2 == 0, functional.dropout(taken, 0.0) * 2, 0.0).half()

    assert judged("dropout", [taken], {"p": 0.5}, result)[1] != "what it kept is not what it took, scaled"


def test_a_dropout_that_drops_nothing_is_judged_bit_for_bit(taken):
    assert judged("dropout", [taken, 0.1], {"training": False}, taken.clone())[0] is Status.PASS
    assert judged("dropout", [taken, 0.1], {"training": False}, taken * (1 + 2e-7))[0] is Status.ERROR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "numbers", "wrong"),
    [
        ("uniform_", (-2.0, 3.0), lambda drawn: drawn * 0.8),
        ("normal_", (1.0, 0.5), lambda drawn: drawn + 0.1),
        ("exponential_", (2.0,), lambda drawn: drawn * 1.2),
    ],
)
def test_numbers_are_held_against_their_distribution(name, numbers, wrong, dtype):
    torch.manual_seed(0)
    empty = torch.zeros(5000, dtype=dtype)

    for _ in range(20):
        drawn = getattr(torch.zeros(5000, dtype=dtype), name)(*numbers)
        assert judged(name, [empty, *numbers], {}, drawn)[0] is Status.PASS
    assert judged(name, [empty, *numbers], {}, wrong(drawn)) == (Status.ERROR, "another distribution")


def test_what_nobody_wrote_down_a_distribution_for_is_skipped():
    assert judged("poisson", [torch.ones(5)], {}, torch.ones(5)) == (Status.SKIP, "random")


def test_attention_that_drops_is_random_and_is_judged_without():
    q = torch.randn(2, 4, 8)
    result = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    assert judged("scaled_dot_product_attention", [q, q, q, None, 0.5], {}, result) == (Status.SKIP, "random")
    sound = functional.scaled_dot_product_attention(q, q, q)
    assert judged("scaled_dot_product_attention", [q, q, q], {"dropout_p": 0.0}, sound)[0] is Status.PASS


DRAWS = {
    "rand": lambda number: torch.rand(number),
    "randn": lambda number: torch.randn(number),
    "uniform": lambda number: torch.empty(number).uniform_(2, 3),
    "exponential": lambda number: torch.empty(number).exponential_(2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("number", [1, 2, 7, 20, 64, 5000])
@pytest.mark.parametrize("name", DRAWS)
def test_zeros_and_numbers_beyond_the_range_never_pass_for_draws(name, number, dtype):
    """Of a few numbers nothing can be said, and nothing is."""
    torch.manual_seed(number)
    drawn = DRAWS[name](number).to(dtype)
    taken = {"uniform": [drawn, 2.0, 3.0], "exponential": [drawn, 2.0]}.get(name, [number])

    assert judged(name, taken, {}, drawn)[0] in (Status.PASS, Status.SKIP)
    assert judged(name, taken, {}, torch.zeros_like(drawn))[0] is not Status.PASS
    if number >= 20:
        assert judged(name, taken, {}, torch.zeros_like(drawn))[0] is Status.ERROR
    if name != "randn" and float(drawn.float().max()) > 0.5:
        assert judged(name, taken, {}, (-drawn.float()).to(dtype))[0] is Status.ERROR
