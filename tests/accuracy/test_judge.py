"""Verdicts on results that are right, and on results with one fault each.

Truth is torch on the CPU, and the fault that was planted.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.judge import Status, judge_call
from trainermon.accuracy.reference import RoundoffMove

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
UNIT = 2.0**-24


def call_of(function, *args, **kwargs):
    return OperationCall(function, args, kwargs)


def verdict(name, call, result):
    [judgement] = judge_call(name, call, result)
    return judgement


def product(dtype, *, rows=48, terms=96, columns=40):
    torch.manual_seed(0)
    call = call_of(functional.linear, torch.randn(rows, terms, dtype=dtype), torch.randn(columns, terms, dtype=dtype))
    return call, call.function(*call.args)


CALLS: dict[str, Any] = {
    "linear": (functional.linear, (48, 96), (40, 96)),
    "add": (torch.add, (48, 40), (48, 40)),
    "softmax": (lambda x: x.softmax(-1), (48, 96)),
    "layer_norm": (lambda x: functional.layer_norm(x, (96,)), (48, 96)),
    "gelu": (functional.gelu, (48, 96)),
    "exp": (torch.exp, (48, 96)),
    "relu": (torch.relu, (48, 96)),
    "sum": (lambda x: x.sum(-1), (48, 96)),
    "cat": (lambda x, y: torch.cat([x, y]), (48, 40), (48, 40)),
}


@given(st.integers(0, 3), st.floats(1e-3, 1e3))
def test_probes_move_numbers_by_a_roundoff_of_float32_up_and_down(probe, size):
    numbers = torch.full((64,), size, dtype=torch.float64)

    moved = RoundoffMove(torch.Generator().manual_seed(0), probe)(numbers)

    steps = (moved / numbers - 1) / UNIT
    assert steps.abs().tolist() == pytest.approx([1.0] * 64, rel=1e-6)
    assert {round(step) for step in steps.tolist()} == {-1, 1}


def healthy(name, dtype):
    function, *shapes = CALLS[name]
    torch.manual_seed(0)
    call = call_of(function, *(torch.randn(shape).to(dtype) for shape in shapes))
    return call, function(*call.args)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_sound_result_is_a_pass(name, dtype):
    assert verdict(name, *healthy(name, dtype)).status is Status.PASS


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_element_that_is_not_finite_is_an_error(name, dtype, value):
    call, result = healthy(name, dtype)
    result.view(-1)[7] = value

    found = verdict(name, call, result)

    assert (found.status, found.device_nonfinite, found.golden_nonfinite) == (Status.ERROR, 1, 0)
    assert found.place is not None
    assert found.place.kind == "element"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_one_element_that_is_a_tenth_too_large_is_an_error(name, dtype):
    call, result = healthy(name, dtype)
    at = int(result.abs().argmax())
    result.view(-1)[at] *= 1.1

    found = verdict(name, call, result)

    assert found.status is Status.ERROR
    assert found.index is not None
    assert int(torch.tensor(found.index) @ torch.tensor(result.stride())) == at


@pytest.mark.parametrize("name", CALLS)
def test_a_scale_that_is_off_by_64_roundoffs_is_an_error(name):
    call, result = healthy(name, torch.float32)

    assert verdict(name, call, result * (1 + 64 * 2 * UNIT)).status is Status.ERROR


def test_a_small_result_is_judged_as_strictly_as_a_large_one():
    x = torch.rand(1000) * 1e-4

    assert verdict("add", call_of(torch.add, x, x), 2 * x).status is Status.PASS
    assert verdict("add", call_of(torch.add, x, x), x).status is Status.ERROR


def test_infinities_of_a_mask_are_right():
    scores, mask = torch.randn(8, 8), torch.ones(8, 8).triu(1).bool()
    call = call_of(torch.Tensor.masked_fill, scores, mask, -math.inf)

    assert verdict("masked_fill", call, call.function(*call.args)).status is Status.PASS


def test_what_leaves_the_range_of_its_type_is_a_warning():
    x = torch.full((4,), 300.0, dtype=torch.float16)
    call = call_of(torch.mul, x, x)

    for found in (x * x, torch.full((4,), torch.finfo(torch.float16).max, dtype=torch.float16)):
        judged = verdict("mul", call, found)
        assert (judged.status, judged.reason) == (Status.WARNING, "range")
    assert verdict("mul", call, -(x * x)).status is Status.ERROR


def test_a_sum_in_sixteen_bits_is_coarse_and_a_wrong_one_an_error():
    torch.manual_seed(0)
    x = torch.rand(64, 256).to(torch.bfloat16)
    total = torch.zeros(64, dtype=torch.bfloat16)
    for column in x.unbind(1):
        total += column  # rounded after each addition

    judged = verdict("sum", call_of(torch.sum, x, 1), total)

    assert (judged.status, judged.reason) == (Status.WARNING, "coarse")
    assert verdict("sum", call_of(torch.sum, x, 1), total * 2).status is Status.ERROR


def test_rounding_always_down_is_biased():
    torch.manual_seed(0)
    a, b = torch.rand(200, 200), torch.rand(200, 200)
    exact = (a.double() * b.double()).view(torch.int64)
    truncated = (exact & ~((1 << 29) - 1)).view(torch.float64).float()

    assert verdict("mul", call_of(torch.mul, a, b), a * b).status is Status.PASS
    assert verdict("mul", call_of(torch.mul, a, b), truncated).reason == "biased"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_sum_in_16_bits_that_lost_terms_is_no_warning(dtype):
    """Rounding 64 partial sums to 16 bits is excused; that of each of 4 096 terms, or half of them lost, is not."""
    torch.manual_seed(0)
    a, b = torch.randn(16, 4096).to(dtype), torch.randn(4096, 16).to(dtype)
    rounded = torch.zeros(16, 16, dtype=dtype)
    for k in range(4096):
        rounded += a[:, k : k + 1] * b[k : k + 1]
    in_parts = torch.zeros(16, 16, dtype=dtype)
    for part in range(0, 4096, 64):
        in_parts += (a[:, part : part + 64].float() @ b[part : part + 64].float()).to(dtype)
    call = call_of(torch.mm, a, b)

    assert verdict("mm", call, in_parts).status is Status.WARNING
    assert verdict("mm", call, rounded).status is Status.ERROR
    assert verdict("mm", call, a[:, :2048] @ b[:2048]).status is Status.ERROR
    assert verdict("mm", call, torch.zeros_like(rounded)).status is Status.ERROR
    mean = call_of(torch.mean, a.abs(), 1)
    assert verdict("mean", mean, torch.zeros(16, dtype=dtype)).status is Status.ERROR


@pytest.mark.parametrize("name", ["fmod", "frac", "remainder"])
def test_a_remainder_of_zeros_is_wrong(name):
    torch.manual_seed(0)
    x = (3 * torch.randn(500)).bfloat16()
    function = getattr(torch, name)
    call = call_of(function, x) if name == "frac" else call_of(function, x, 1.5)

    assert verdict(name, call, function(*call.args)).status is Status.PASS
    assert verdict(name, call, torch.zeros_like(x)).status is Status.ERROR


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("svd", lambda left, values, right: (left, 2 * values, right / 2)),
        ("svd", lambda left, values, right: (2 * left, values / 2, right)),
        ("svd", lambda left, values, right: (left, values, torch.zeros_like(right))),
        ("qr", lambda q, r: (2 * q, r / 2)),
        ("qr", lambda q, r: (q @ q, q.mT @ r)),
        ("eig", lambda values, vectors: (values, torch.zeros_like(vectors))),
    ],
)
def test_factors_that_make_up_the_matrix_must_have_their_form(name, spoil):
    torch.manual_seed(0)
    matrix = torch.randn(6, 6)
    function = getattr(torch.linalg, name)

    assert {one.status for one in judge_call(f"linalg.{name}", call_of(function, matrix), list(function(matrix)))} == {
        Status.PASS
    }
    wrong = list(spoil(*function(matrix)))
    assert {one.status for one in judge_call(f"linalg.{name}", call_of(function, matrix), wrong)} == {Status.ERROR}


def test_singular_values_alone_are_judged():
    matrix = torch.randn(5, 4)
    call = OperationCall(torch.svd, (matrix,), {"compute_uv": False})

    found = list(torch.svd(matrix, compute_uv=False))

    assert {one.status for one in judge_call("svd", call, found)} == {Status.PASS}
    assert {one.status for one in judge_call("svd", call, [found[0], 2 * found[1], found[2]])} == {Status.ERROR}


def test_many_results_that_round_to_one_are_no_bias():
    tiny = torch.linspace(1e-6, 1e-4, 20000)

    assert verdict("acos", call_of(torch.acos, tiny.bfloat16()), torch.acos(tiny.bfloat16())).status is Status.PASS
    assert verdict("cos", call_of(torch.cos, tiny), torch.cos(tiny)).status is Status.PASS


def test_a_device_may_flush_what_is_below_its_smallest_normal_number():
    numbers = torch.linspace(-95, -85, 100)
    kept = torch.exp(numbers.double()).float()
    flushed = torch.where(kept < torch.finfo(torch.float32).tiny, 0.0, kept)

    assert bool((flushed != kept).any())
    assert verdict("exp", call_of(torch.exp, numbers), flushed).status is Status.PASS
    assert verdict("exp", call_of(torch.exp, numbers), torch.where(kept < 1e-37, 0.0, kept)).status is Status.ERROR


@pytest.mark.parametrize(
    ("kind", "where"),
    [("row", (3, slice(None))), ("column", (slice(None), 5)), ("tile", (slice(8, 24), slice(8, 24)))],
)
def test_the_place_of_wrong_elements_is_named(kind, where):
    call, result = product(torch.float32)
    result[where] += 1

    found = verdict("linear", call, result)

    assert found.place is not None
    assert found.place.kind == kind


def test_a_tail_that_was_not_written_is_named():
    call, result = product(torch.float32)
    result.view(-1)[-100:] = 0

    found = verdict("linear", call, result)

    assert found.place is not None
    assert (found.place.kind, found.place.number) == ("tail", 100)


@pytest.mark.parametrize("wrong", [lambda x: x[:-1], lambda x: x.to(torch.int32), lambda x: x.to(torch.complex64)])
def test_another_shape_or_kind_of_number_is_an_error(wrong):
    call, result = product(torch.float32)

    assert verdict("linear", call, wrong(result)).status is Status.ERROR


def test_indices_of_equal_values_and_of_other_ones():
    x = torch.tensor([[1.0, 3.0, 2.0]])
    call = call_of(torch.argmax, x, 1)

    assert verdict("argmax", call, torch.tensor([1])).status is Status.PASS
    assert verdict("argmax", call, torch.tensor([2])).status is Status.ERROR


def test_random_calls_and_memory_never_written_are_skipped_with_the_reason():
    x = torch.randn(8)

    assert verdict("poisson", call_of(torch.poisson, x.abs()), x).reason == "random"
    assert verdict("empty_like", call_of(torch.empty_like, x), x).reason == "undefined"


def test_what_float64_cannot_run_is_skipped_with_the_reason():
    def broken(x):
        raise RuntimeError("no such kernel")

    found = verdict("some", call_of(broken, torch.ones(2)), torch.ones(2))

    assert (found.status, found.reason) == (Status.SKIP, "cannot be run in float64: no such kernel")


@pytest.mark.parametrize("name", ["svd", "qr"])
def test_parts_that_make_up_the_matrix_are_right_whatever_their_signs(name):
    torch.manual_seed(0)
    matrix = torch.randn(12, 12)
    function = torch.linalg.svd if name == "svd" else torch.linalg.qr
    parts = list(function(matrix))
    call = call_of(function, matrix)
    flipped = [-parts[0], *parts[1:-1], -parts[-1]]

    assert {one.status for one in judge_call(f"linalg.{name}", call, parts)} == {Status.PASS}
    assert {one.status for one in judge_call(f"linalg.{name}", call, flipped)} == {Status.PASS}
    assert Status.ERROR in {one.status for one in judge_call(f"linalg.{name}", call, [parts[0] * 1.01, *parts[1:]])}


def test_right_singular_vectors_may_be_rows_or_columns():
    torch.manual_seed(0)
    for matrix in (torch.randn(9, 5), torch.randn(5, 9), torch.randn(6, 6)):
        for function in (torch.svd, torch.linalg.svd):
            found = judge_call("svd", call_of(function, matrix), list(function(matrix)))
            assert {one.status for one in found} == {Status.PASS}


def test_parts_that_were_not_computed_are_skipped():
    matrix = torch.randn(6, 4)
    call = OperationCall(torch.linalg.qr, (matrix,), {"mode": "r"})

    assert {one.status for one in judge_call("linalg.qr", call, list(call.function(matrix, mode="r")))} == {Status.SKIP}


def test_a_product_that_is_a_hundredth_too_large_in_sixteen_bits_is_no_pass():
    call, result = product(torch.bfloat16)

    assert verdict("linear", call, (result.double() * 1.012).to(torch.bfloat16)).status is not Status.PASS


@given(st.permutations(range(12)), st.floats(0, 3))
def test_the_order_of_independent_rows_changes_no_verdict(order, factor):
    torch.manual_seed(0)
    x, weight = torch.randn(12, 64), torch.randn(16, 64)
    result = functional.linear(x, weight)
    result[4] *= 1 + factor * 1e-6
    before = verdict("linear", call_of(functional.linear, x, weight), result)

    after = verdict("linear", call_of(functional.linear, x[order], weight), result[order])

    assert after.status is before.status
    assert after.worst == pytest.approx(before.worst)


@given(st.integers(-20, 20))
def test_a_power_of_two_changes_no_verdict_of_a_product(exponent):
    call, result = product(torch.float32, rows=8)
    result[2, 3] *= 1 + 1e-5
    scaled = call._replace(args=(call.args[0] * 2.0**exponent, call.args[1]))

    assert verdict("linear", scaled, result * 2.0**exponent).status is verdict("linear", call, result).status


def test_nothing_that_is_given_changes():
    call, result = product(torch.bfloat16)
    before = [tensor.clone() for tensor in (*call.args, result)]
    state = torch.get_rng_state()

    judge_call("softmax", call_of(torch.softmax, call.args[0], -1), torch.softmax(call.args[0], -1))
    judge_call("linear", call, result)

    assert all(torch.equal(one, other) for one, other in zip(before, (*call.args, result), strict=True))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("given", [{}, {"eps": None}], ids=["left out", "None"])
def test_without_eps_a_norm_takes_that_of_its_own_type(given):
    call = call_of(functional.rms_norm, torch.full((4, 32), 1e-4), (32,), **given)

    found = verdict("rms_norm", call, call.function(*call.args, **given))

    assert found.status is Status.PASS, found  # float64's own would make every element 1
    assert found.golden_value == pytest.approx(1e-4 / math.sqrt(1e-8 + torch.finfo(torch.float32).eps), rel=1e-5)


@pytest.mark.filterwarnings("ignore:The reduce argument")
@pytest.mark.parametrize("name", ["index_put", "put", "scatter"])
def test_writing_to_one_place_twice_adds_up_with_rounding_where_the_call_says_so(name):
    torch.manual_seed(1)
    to, added = torch.randn(64), torch.randn(512)
    places = torch.arange(512) % 64
    adding: dict[str, Any] = {
        "index_put": call_of(torch.index_put, to, (places,), added, accumulate=True),
        "put": call_of(torch.Tensor.put, to, places, added, True),
        "scatter": call_of(torch.scatter, to, 0, places, added, reduce="add"),
    }
    call = adding[name]
    sound = call.function(*call.args, **call.kwargs)
    last_lost = sound - 0.5

    assert verdict(name, call, sound).status is Status.PASS
    assert verdict(name, call, last_lost).status is Status.ERROR


@pytest.mark.parametrize("name", ["cosine_embedding_loss", "hinge_embedding_loss"])
def test_labels_that_a_loss_compares_with_one_are_not_moved(name):
    torch.manual_seed(2)
    labels = torch.randint(0, 2, (32,)).float() * 2 - 1
    values = torch.randn(32, 8), torch.randn(32, 8)
    inputs = (*values, labels) if name.startswith("cosine") else (values[0][:, 0], labels)
    call = call_of(getattr(functional, name), *inputs)
    sound = call.function(*call.args)

    assert verdict(name, call, sound).status is Status.PASS
    assert verdict(name, call, sound * 1.001).status is Status.ERROR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_of_a_few_elements_that_is_far_off_is_no_coarse_computation(dtype):
    torch.manual_seed(3)
    call = call_of(functional.linear, torch.randn(2, 16, dtype=dtype), torch.randn(5, 16, dtype=dtype))
    result = call.function(*call.args)
    result[1, 2] *= 1.5

    assert verdict("linear", call, result).status is Status.ERROR


def test_what_cancels_between_arguments_is_allowed_the_rounding_of_each():
    torch.manual_seed(6)
    one = torch.randn(20000)
    other = -9 * one * (1 + 1e-4 * torch.randn(20000))
    call = call_of(torch.lerp, one, other, 0.1)

    assert verdict("lerp", call, torch.lerp(one, other, 0.1)).status is Status.PASS
    assert verdict("lerp", call, torch.lerp(one, other, 0.1) + 3e-6 * one).status is Status.ERROR
