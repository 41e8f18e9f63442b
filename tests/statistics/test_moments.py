"""Every way to compute moments against numpy in float64, and against the laws that moments obey."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.statistics.numpy_moments import assert_moments, elements_of
from tests.strategies import FLOATS, INTEGERS, PATTERNS, fill, fixed, flat_tensors, laid_out_tensors
from trainermon.core.values import Moments
from trainermon.statistics.merge import merge_rows

COUNTS = [0, 5, 6, 7]


@fixed
@given(tensor=flat_tensors())
def test_moments_equal_those_of_numpy(rows_of, tensor):
    [row] = rows_of([tensor])

    assert_moments(row, elements_of(tensor))


@fixed
@given(tensor=laid_out_tensors())
def test_strides_do_not_change_the_elements(rows_of, tensor):
    [row] = rows_of([tensor])

    assert_moments(row, elements_of(tensor))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_every_pattern_of_every_float_type(rows_of, pattern, dtype):
    tensor = fill(pattern, 150_003, dtype=dtype, seed=1)

    [row] = rows_of([tensor])

    assert_moments(row, elements_of(tensor))


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_extremes_of_every_integer_type(rows_of, dtype):
    limits = [0, 1] if dtype is torch.bool else [torch.iinfo(dtype).min, torch.iinfo(dtype).max, 0, 1]
    tensor = torch.from_numpy(np.array(limits * 40, dtype=str(dtype).removeprefix("torch.")))

    [row] = rows_of([tensor])

    assert_moments(row, elements_of(tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_bit_patterns_of_sixteen_bits(rows_of, dtype):
    tensor = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)

    [row] = rows_of([tensor])

    assert_moments(row, elements_of(tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_bit_pattern_of_sixteen_bits_alone(compiled_rows, dtype):
    tensor = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)

    rows = compiled_rows(list(tensor.reshape(-1, 1)))

    values = elements_of(tensor)
    np.testing.assert_array_equal(rows[:, 3], np.where(np.isfinite(values), values, 0))
    np.testing.assert_array_equal(rows[:, COUNTS[1:]], np.stack([values == 0, np.isnan(values), np.isinf(values)], 1))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_widened(rows_of, dtype):
    tensor = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)

    [row] = rows_of([tensor])

    assert_moments(row, elements_of(tensor.to(torch.float64)))


@pytest.mark.parametrize("size", [1e-150, 1e-163, 1e-170, 1e-300, 5e-324])
def test_float64_below_its_squares_has_exact_extrema_and_is_told_from_zeros(rows_of, size):
    [row] = rows_of([torch.tensor([size, -2 * size, 0.0], dtype=torch.float64)])

    found = Moments(*row)
    assert (found.min, found.max, found.zeros, found.nonfinite) == (-2 * size, size, 1, 0)
    assert found.sum_sq == pytest.approx(5 * size**2, rel=1e-6)
    assert (found.norm == 0) is (size <= 1e-163)  # as the documents say


@fixed
@given(tensor=flat_tensors(), cuts=st.lists(st.floats(0, 1), max_size=5))
def test_moments_of_shards_merge_to_those_of_the_whole(rows_of, tensor, cuts):
    ends = [0, *sorted(int(cut * tensor.numel()) for cut in cuts), tensor.numel()]

    rows = rows_of([tensor[start:stop] for start, stop in itertools.pairwise(ends)])

    assert_moments(merge_rows(torch.from_numpy(rows)).numpy(), elements_of(tensor))


@fixed
@given(tensor=flat_tensors(), seed=st.integers(0, 1 << 16))
def test_order_of_elements_does_not_matter(rows_of, tensor, seed):
    order = torch.from_numpy(np.random.default_rng(seed).permutation(tensor.numel()))

    [row] = rows_of([tensor[order]])

    assert_moments(row, elements_of(tensor))


@fixed
@given(tensors=st.lists(laid_out_tensors(), max_size=6), first_row=st.integers(0, 3))
def test_each_tensor_gets_the_row_it_would_get_alone(rows_of, tensors, first_row):
    rows = rows_of(tensors, first_row)

    alone = [rows_of([tensor])[0] for tensor in tensors]
    np.testing.assert_array_equal(rows, np.reshape(alone, (-1, 8)))


def test_a_hundred_million_ones(rows_of):
    [row] = rows_of([torch.ones(100_000_000)])

    assert row.tolist() == [1e8, 1.0, 1.0, 1e8, 1e8, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("value", [0.1, -0.7, 1.9])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rounding_of_equal_elements_does_not_add_up(rows_of, dtype, value):
    tensor = torch.full((3_000_000,), value, dtype=dtype)

    [row] = rows_of([tensor])

    assert_moments(row, elements_of(tensor))


def test_no_element_gives_the_neutral_row(rows_of):
    rows = rows_of([torch.empty(0), torch.empty(4, 0, 3), torch.empty(0, dtype=torch.int8), torch.empty(0, 5).t()])

    assert rows.tolist() == [[0.0, np.inf, -np.inf, 0.0, 0.0, 0.0, 0.0, 0.0]] * 4


def test_a_scalar_is_one_element(rows_of):
    [row] = rows_of([torch.tensor(-3.0)])

    assert row.tolist() == [1.0, -3.0, -3.0, -3.0, 9.0, 0.0, 0.0, 0.0]
