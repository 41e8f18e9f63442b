"""Products too large for float64 as a whole: a sound one passes, wrong ones are found."""

import math

import pytest
import torch
from torch.nn import functional

from trainermon.accuracy import large
from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import Status
from trainermon.accuracy.products import BackwardCall


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


BATCHED = [
    ("bmm", torch.bmm, [(5, 90, 40), (5, 40, 70)], {}),
    ("matmul", torch.matmul, [(5, 2, 90, 40), (5, 2, 40, 70)], {}),
    ("addmm", torch.addmm, [(300,), (300, 64), (64, 300)], {"beta": 0.5, "alpha": 2.0}),
    ("baddbmm", torch.baddbmm, [(5, 90, 70), (5, 90, 40), (5, 40, 70)], {"alpha": 0.125}),
    ("einsum", torch.einsum, ["bthd,bshd->bhts", (2, 90, 5, 40), (2, 70, 5, 40)], {}),
]


@pytest.fixture
def very_few_are_many(monkeypatch):
    monkeypatch.setattr(large, "MAX_PRODUCTS", 2**18)


@pytest.mark.parametrize(("name", "function", "shapes", "keywords"), BATCHED, ids=[case[0] for case in BATCHED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("very_few_are_many")
def test_products_of_batches_and_sums_with_others_are_projected(name, function, shapes, keywords, dtype):
    torch.manual_seed(0)
    args = [one if isinstance(one, str) else torch.randn(one).to(dtype) for one in shapes]
    sound = function(*args, **keywords)
    wrong = sound.clone()
    wrong.view(-1)[5:9] += 100  # in the first matrix, of which some rows are judged in full
    call = OperationCall(function, args, keywords)

    [passed], [failed] = (large.judge_any_call(name, call, one) for one in (sound, wrong))

    assert (passed.status, passed.standard, passed.shape) == (Status.PASS, "projected", tuple(sound.shape))
    assert failed.status is Status.ERROR


def large_backward(name, function, args, number_of_calls=1):
    """Return backwards of calls of the same first argument, and the gradients that torch gives their arguments."""
    taken = [one.requires_grad_() for one in args]
    found = []
    for _ in range(number_of_calls):
        result = function(*taken)
        gradient = torch.randn(result.shape).to(result.dtype)
        result.backward(gradient)
        call = OperationCall(function, [one.detach() for one in taken], {})
        backward = BackwardCall(call, [gradient], Family.CONTRACTION, range(len(args)))
        found.append(large.LargeBackward.of(name, backward))
    return found, [one.grad for one in taken]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "function", "shapes"),
    [
        ("linear", functional.linear, [(3, 200, 48), (300, 48), (300,)]),
        ("matmul", torch.matmul, [(3, 200, 48), (48, 300)]),
        ("bmm", torch.bmm, [(5, 90, 40), (5, 40, 70)]),
    ],
)
@pytest.mark.usefixtures("very_few_are_many")
def test_gradients_of_a_large_product_are_projected(name, function, shapes, dtype):
    torch.manual_seed(0)
    [backward], gradients = large_backward(name, function, [torch.randn(shape).to(dtype) for shape in shapes])

    for number, gradient in enumerate(gradients):
        scaled = gradient * 2
        passed, failed = (large.judge_large_gradient(one, [(backward, number)]) for one in (gradient, scaled))
        assert (passed.status, passed.standard, passed.shape) == (Status.PASS, "projected", tuple(gradient.shape))
        assert (failed.status, failed.reason) == (Status.ERROR, "inexact, projected")


@pytest.mark.usefixtures("very_few_are_many")
def test_the_gradient_of_what_several_large_products_take_is_their_sum(monkeypatch):
    torch.manual_seed(0)
    backwards, [gradient, _] = large_backward(
        "linear", functional.linear, [torch.randn(300, 48), torch.randn(300, 48)], 3
    )

    every = large.judge_large_gradient(gradient, [(one, 0) for one in backwards])
    without_the_last = large.judge_large_gradient(gradient, [(one, 0) for one in backwards[:2]])
    monkeypatch.setattr(large, "_blocks", lambda given: ())
    projected_alone = [
        large.judge_large_gradient(one, [(each, 0) for each in backwards]) for one in (gradient, gradient * 1.01)
    ]

    assert (every.status, without_the_last.status) == (Status.PASS, Status.ERROR)
    assert [one.status for one in projected_alone] == [Status.PASS, Status.ERROR]


def test_a_smaller_product_is_judged_whole():
    x = torch.randn(8, 8)

    [found] = large.judge_any_call("mm", OperationCall(torch.mm, [x, x], {}), x @ x)

    assert (found.status, found.standard) == (Status.PASS, "contraction")
