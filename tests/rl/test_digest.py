"""The laws of digests, against exact integer arithmetic of Python."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainermon.rl.digest import Digester, added, digest_tensors, row_weights

M = 0x9E3779B97F4A7C15
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn]


def random(shape, dtype=torch.bfloat16, seed=0):
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * 8, np.uint8)
    return torch.from_numpy(raw).view(dtype)[: int(np.prod(shape))].reshape(shape).clone()


def exact(tensor):
    """Return total and order by Python's integers."""
    size = {1: "i1", 2: "i2", 4: "i4", 8: "i8"}[tensor.element_size()]
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    shape = tensor.shape
    num_rows = shape[0] * (shape[1] if len(shape) > 2 else 1)
    rows = tensor.contiguous().view(kind).reshape(num_rows, -1).numpy().astype(size).tolist()
    sums = [sum(w * (w + M) for w in row) for row in rows]
    weights = [weight_of(number) for number in range(shape[0])]
    if len(shape) > 2:
        weights = [weight * weight_of(2**40 + second) for weight in weights for second in range(shape[1])]
    return sum(sums) % 2**64, sum(w * s for w, s in zip(weights, sums, strict=True)) % 2**64


def weight_of(index):
    x = (index + 1) * M % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) | 1


def digest(tensor, starts=()):
    digester = Digester()
    digester.add("t", tensor, starts)
    return digester.finish()["t"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (5, 3), (6, 100), (3, 4, 50), (1, 2000)])
def test_digests_are_those_of_exact_arithmetic(dtype, shape):
    tensor = random(shape, dtype)

    found = digest(tensor)

    assert (found.total, found.order) == exact(tensor)
    assert (found.shape, found.count) == (shape, tensor.numel())


def test_arrays_have_the_digests_of_tensors():
    for tensor in (random((6, 40), torch.float32), random((9,), torch.float16), random((2, 3, 4), torch.int64)):
        assert digest(tensor.numpy()) == digest(tensor)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_digests_of_parts_add_up_however_they_are_split(data):
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 90))
    whole = random((rows, columns), seed=data.draw(st.integers(0, 99)))
    row_cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=4))})
    column_cuts = sorted({0, columns, *data.draw(st.lists(st.integers(0, columns), max_size=4))})
    parts = [
        digest(whole[a:b, c:d], (a, c))
        for a, b in itertools.pairwise(row_cuts)
        for c, d in itertools.pairwise(column_cuts)
    ]

    assert added(parts) == (digest(whole).total, digest(whole).order)


def test_a_fused_tensor_has_the_total_of_its_parts():
    q, k, v = (random((8, 64), seed=seed) for seed in range(3))

    assert digest(torch.cat([q, k, v])).total == added([digest(each) for each in (q, k, v)])[0]


def test_rows_of_zeros_add_nothing():
    tensor = random((10, 64))

    padded = digest(torch.cat([tensor, torch.zeros(6, 64, dtype=tensor.dtype)]))

    assert (padded.total, padded.order) == (digest(tensor).total, digest(tensor).order)


@given(st.integers(0, 19), st.integers(0, 19), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_two_rows_that_change_places_are_seen_by_the_order_alone(one, other, seed):
    tensor = random((20, 48), seed=seed)
    swapped = tensor.clone()
    swapped[[one, other]] = swapped[[other, one]]

    assert digest(swapped).total == digest(tensor).total
    assert (digest(swapped).order == digest(tensor).order) == (one == other)


@given(st.integers(0, 20 * 48 * 16 - 1), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_one_bit_is_seen(bit, seed):
    tensor = random((20, 48), seed=seed)
    flipped = tensor.clone()
    flipped.view(torch.uint8).view(-1)[bit // 8] ^= 1 << (bit % 8)

    assert digest(flipped).total != digest(tensor).total


def test_a_cast_comes_first():
    master = torch.randn(30, 50)

    assert digest_tensors({"t": master}, dtype="bfloat16") == digest_tensors({"t": master.bfloat16()})


def test_whole_numbers_are_not_cast():
    steps = torch.arange(5)

    assert digest_tensors([("steps", steps)], dtype="bfloat16")["steps"].dtype == "int64"


def test_weights_of_rows_depend_on_their_place_only():
    assert row_weights(7, 5).tolist() == row_weights(0, 12)[7:].tolist()
    assert len(set(row_weights(0, 100_000).tolist())) == 100_000


def test_scalars_and_empty_tensors_have_digests():
    assert digest(torch.tensor(1.5)).shape == ()
    assert (digest(torch.zeros(0, 4)).total, digest(torch.zeros(0, 4)).order) == (0, 0)


def test_strided_tensors_are_read_as_they_look():
    tensor = random((12, 64))

    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    assert digest(tensor[::2]) == digest(tensor[::2].clone())
