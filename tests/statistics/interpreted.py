"""The Triton kernels in Triton's interpreter, on the CPU, against float64 numpy.

`test_launches.py` runs this in a process of its own: TRITON_INTERPRET has to be set before triton is imported. With
WIDE there are more examples.
"""

import itertools
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.statistics.conftest import rows_by
from tests.statistics.histogram_truth import numpy_histogram
from tests.statistics.numpy_moments import assert_moments, elements_of
from tests.strategies import FLOATS, LAYOUTS, PATTERNS, fill, flat_tensors, laid_out_tensors
from trainermon.statistics import launches
from trainermon.statistics.histograms import triton_counts

# numpy warns of what the kernels compute on purpose: squares that overflow, and the smallest of no element
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CHUNK = launches.CHUNK
SIZES = st.one_of(st.integers(0, 70), st.sampled_from((CHUNK - 1, CHUNK, CHUNK + 1)), st.integers(0, 20_000))
many = settings(derandomize=True, deadline=None, max_examples=25)
few = settings(derandomize=True, deadline=None, max_examples=5 if os.environ.get("WIDE") else 2)
LONG = {"mixed", "specials", "any magnitude"}


@pytest.fixture(scope="session")
def rows_of():
    return rows_by(launches.KernelLauncher(torch.device("cpu")).moments)


@many
@given(
    tensors=st.lists(st.one_of(flat_tensors(sizes=SIZES), laid_out_tensors()), min_size=1, max_size=4),
    first_row=st.integers(0, 3),
)
def test_any_list_of_tensors_has_the_moments_of_its_elements(rows_of, tensors, first_row):
    for row, tensor in zip(rows_of(tensors, first_row), tensors, strict=True):
        assert_moments(row, elements_of(tensor))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_kind_of_data_is_read_right_in_whole_chunks_and_in_part(rows_of, dtype):
    long = PATTERNS if os.environ.get("WIDE") else LONG
    sizes = {pattern: CHUNK + 2000 if pattern in long else 2000 for pattern in sorted(PATTERNS)}
    tensors = [fill(pattern, size, dtype=dtype, seed=1) for pattern, size in sizes.items()]

    for row, tensor in zip(rows_of(tensors), tensors, strict=True):
        assert_moments(row, elements_of(tensor))


@pytest.mark.parametrize("magnitude", [1e-38, 1e-25, 2.0**-41, 2.0**-39, 2.0**39, 2.0**41, 1e25, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_magnitude_overflows_or_vanishes(rows_of, dtype, magnitude):
    tensor = (torch.rand(3000) * magnitude).to(dtype)

    [row] = rows_of([tensor])

    assert_moments(row, elements_of(tensor))


@few
@given(
    patterns=st.lists(st.sampled_from(sorted(PATTERNS)), min_size=2, max_size=4),
    dtype=st.sampled_from(FLOATS),
    layout=st.sampled_from(sorted(LAYOUTS)),
)
def test_a_row_has_the_same_bits_alone_and_in_any_list(rows_of, patterns, dtype, layout):
    tensors = [
        LAYOUTS[layout](fill(pattern, 20_000, dtype=dtype, seed=seed).reshape(20, 1000))
        for seed, pattern in enumerate(patterns)
    ]

    together = rows_of(tensors)

    np.testing.assert_array_equal(rows_of(tensors[::-1])[::-1], together)
    for row, tensor in zip(together, tensors, strict=True):
        np.testing.assert_array_equal(rows_of([tensor])[0], row)


def test_a_list_too_large_for_the_workspace_is_taken_in_parts(rows_of, monkeypatch):
    monkeypatch.setattr(launches, "MAX_CHUNKS", 3)
    tensors = [torch.randn(size) for size in (CHUNK + 5, 10, 2 * CHUNK + 1, 0, 4 * CHUNK)]

    for row, tensor in zip(rows_of(tensors), tensors, strict=True):
        assert_moments(row, elements_of(tensor))


def test_what_the_kernels_cannot_read_is_left_to_torch_calls(rows_of):
    dense = torch.zeros(6, 3)
    dense[2] = 7.0
    tensors = [
        torch.arange(5),
        torch.randn(4, dtype=torch.complex64),
        dense.to_sparse(1),
        torch.randn(4, 6, 8)[::2, ::2, ::2],
    ]

    rows = rows_of(tensors)

    assert_moments(rows[0], np.arange(5.0))
    assert_moments(rows[1], torch.view_as_real(tensors[1]).double().numpy().ravel())
    assert_moments(rows[2], elements_of(dense))
    assert_moments(rows[3], elements_of(tensors[3]))


def test_a_tensor_without_memory_is_refused(rows_of):
    freed = torch.randn(4)
    freed.untyped_storage().resize_(0)

    with pytest.raises(ValueError, match="has no memory of its own"):
        rows_of([freed])
    with pytest.raises(ValueError, match="has no memory of its own"):
        rows_of([torch.randn(2), freed])


def test_a_tensor_on_another_device_is_refused_before_anything_is_written(rows_of):
    with pytest.raises(ValueError, match="tensor is on meta, expected the device of the rows: cpu"):
        rows_of([torch.randn(2), torch.empty(3, device="meta")])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_kind_of_data_is_counted_by_sign_and_exponent(dtype):
    sizes = (1, 1023, triton_counts.CHUNK.value + 2000)
    for size, pattern in itertools.product(sizes, sorted(LONG)):
        tensor = fill(pattern, size, dtype=dtype, seed=1)
        row = torch.full((128,), 7)

        triton_counts.count_chunks(tensor, row)

        np.testing.assert_array_equal(row.numpy() - 7, numpy_histogram(elements_of(tensor)))
